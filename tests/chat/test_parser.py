"""What of a reply is graded: think tags and harmony channels, from the text alone and through a tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from lockstep.chat.chat import ChatFormat
from lockstep.chat.parser import answer_of, opens_thought, parser_of
from lockstep.config.schema import Chat
from tests.chat.toy_tokenizers import CHATML, chatml

THINKING = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
"""Opens the thought itself, as the templates of R1 do."""
TAGGED = CHATML + "{# replies may hold <think> and </think> #}"
HARMONY = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{% if loop.last %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""The turns of gpt-oss's template."""


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = chatml(HARMONY)
    names = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(n, special=True) for n in names]})
    tokenizer.bos_token, tokenizer.eos_token = None, "<|return|>"
    return tokenizer


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("<think>4 and 3</think>\n\n7", False, "7"),
        ("4 and 3</think>7 apples", True, "7 apples"),
        ("4 and 3 make 7", True, ""),
        ("<think>is it 7", False, ""),
        ("It is 7 <think>or 8", False, "It is 7"),
        ("It is 7", False, "It is 7"),
        ("<think>a</think>6<think>b</think>7", False, "7"),
        ("<think>a</think>7<think>or 8", False, "7"),
        ("</think>", True, ""),
        ("", True, ""),
    ],
)
def test_think_tags(text: str, opened: bool, answer: str) -> None:
    assert answer_of(text, "think", opened=opened) == answer
    assert answer_of(text, "none", opened=opened) == text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>analysis<|message|>4+3=8? no<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>", "7"),
        ("<|channel|>final<|message|>The answer is 7", "The answer is 7"),
        ("<|channel|>analysis<|message|>4+3=7", ""),
        ("<|channel|>analysis<|message|>is it final? 7<|end|>", ""),
        ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>", ""),
        (
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|><|channel|>final<|message|>7<|return|>",
            "7",
        ),
        ("<|channel|>final <|constrain|>json<|message|>7<|return|>", "7"),
        ("7<|return|>", "7"),
        ("<|message|>7<|end|>", "7"),
    ],
)
def test_harmony_channels(text: str, answer: str) -> None:
    assert answer_of(text, "harmony") == answer


def test_the_parser_follows_from_the_template() -> None:
    assert parser_of(HARMONY) == "harmony"
    assert parser_of(THINKING) == parser_of(TAGGED) == "think"
    assert parser_of(CHATML) == "none"
    assert opens_thought("Put thoughts in <think> </think> tags. assistant <think>\n")
    assert not opens_thought("assistant <think>\n\n</think>\n\n")


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_harmony_through_a_tokenizer() -> None:
    tokenizer = harmony_tokenizer()
    chat = ChatFormat(tokenizer, Chat())
    assert chat.parser == "harmony"
    ids = ids_of(
        tokenizer, "<|channel|>analysis<|message|>4 or 8<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>"
    )
    assert chat.answer(ids) == "7"
    assert chat.decode(ids) == (
        "<|channel|>analysis<|message|>4 or 8<|end|><|start|>assistant<|channel|>final<|message|>7"
    )
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in chat.stop_ids, "a thought's end is not the reply's"
    assert tokenizer.convert_tokens_to_ids("<|return|>") in chat.stop_ids
    assert any("parser harmony" in note for note in chat.notes)


@pytest.mark.parametrize("special", [True, False])
def test_think_tags_through_a_tokenizer(special: bool) -> None:
    """Whether or not a model's makers declared the tags as special tokens."""
    tokenizer = chatml(THINKING)
    tags = [AddedToken("<think>", special=special), AddedToken("</think>", special=special)]
    tokenizer.add_tokens(tags, special_tokens=special)
    chat = ChatFormat(tokenizer, Chat())
    ids = ids_of(tokenizer, "4 or 8\n</think>\n\n7<|im_end|>")
    assert chat.answer(ids) == "7"
    assert chat.decode(ids) == "4 or 8\n</think>\n\n7"
    assert chat.answer(ids_of(tokenizer, "4 or 8, or 7")) == "", "a thought without an end has no answer"
    everything = ChatFormat(tokenizer, Chat(parser="none"))
    assert "4 or 8" in everything.answer(ids)
    assert everything.template_hash != chat.template_hash, "what is graded is part of a score's conditions"


def test_without_thoughts_the_whole_reply_is_graded() -> None:
    tokenizer = chatml()
    chat, ids = ChatFormat(tokenizer, Chat()), ids_of(tokenizer, " 7 <think>")
    assert chat.parser == "none"
    assert chat.answer([*ids, 2]) == chat.decode([*ids, 2]) == " 7 <think>"
