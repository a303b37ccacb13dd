from __future__ import annotations

import pytest

from lockstep.chat import ChatFormat
from lockstep.chat.mask import runs_of_true
from lockstep.config.schema import Chat, Example
from lockstep.errors import ChatError
from lockstep.types import Message
from tests.chat.toy_tokenizers import CHATML_GENERATION, REWRITING, chatml, llama2


def u(text: str) -> Message:
    return Message(role="user", content=text)


def a(text: str) -> Message:
    return Message(role="assistant", content=text)


def trained_texts(chat: ChatFormat, messages: list[Message]) -> list[str]:
    ids, mask = chat.trained_mask(messages)
    assert len(ids) == len(mask)
    return [str(chat.tokenizer.decode(list(ids[start:end]))) for start, end in runs_of_true(mask)]


def test_runs_of_true() -> None:
    assert runs_of_true([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert runs_of_true([]) == []
    assert runs_of_true([True]) == [(0, 1)]


@pytest.mark.parametrize(
    ("tokenizer", "end"),
    [(chatml(), "<|im_end|>"), (chatml(CHATML_GENERATION), "<|im_end|>")],
    ids=["by prefix", "by generation blocks"],
)
def test_assistant_turns_are_trained_to_their_end_token(tokenizer: object, end: str) -> None:
    chat = ChatFormat(tokenizer, Chat())  # type: ignore[arg-type]
    messages = [u("4 + 3 ="), a("The answer is 7"), u("Sure?"), a("7 7")]
    assert trained_texts(chat, messages) == ["The answer is 7" + end, "7 7" + end]


def test_llama_turns_are_trained_with_their_eos() -> None:
    chat = ChatFormat(llama2(), Chat())
    assert trained_texts(chat, [u("q"), a("r"), u("s"), a("t")]) == [" r </s>", " t </s>"]


@pytest.mark.parametrize("template", [CHATML_GENERATION, None], ids=["generation", "prefix"])
def test_examples_are_not_trained_and_the_prompt_is_the_one_of_rollouts(template: str | None) -> None:
    recipe = Chat(system="s", examples=[Example(user="1 + 1 =", assistant="2")], suffix=" now")
    chat = ChatFormat(chatml(template) if template else chatml(), recipe)
    ids, mask = chat.trained_mask([u("4 + 3 ="), a("7")])
    prompt = chat.render([u("4 + 3 =")])
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)])
    assert chat.decode(ids[len(prompt) :]) == "7\n"
    assert [i for i, on in zip(ids, mask, strict=True) if on] == [*chat.tokenizer("7")["input_ids"], 2]


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_one_turn_is_trained() -> None:
    chat = ChatFormat(chatml(REWRITING), Chat())
    assert trained_texts(chat, [u("q"), a("7 think: hm")]) == ["7 think: hm<|im_end|>"]
    with pytest.raises(ChatError, match="turn 1: the prompt of assistant turn 1 is not a prefix"):
        chat.trained_mask([u("q"), a("7 think: hm"), u("r"), a("8")])


def test_a_generation_prompt_that_the_full_chat_lacks_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nthink:' }}{% endif %}"
    )
    with pytest.raises(ChatError, match="not a prefix"):
        ChatFormat(chatml(template), Chat()).trained_mask([u("q"), a("7")])


def test_a_reply_whose_first_token_merges_with_the_prompt_is_refused() -> None:
    # Without a line break of its own after the role, "assistant" + "s" could become other tokens than in sampling.
    template = (
        "{% for m in messages %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    chat = ChatFormat(chatml(template), Chat())
    assert trained_texts(chat, [u("q"), a(" 7")]) == [" 7<|im_end|>"]
    merged = chat.tokenizer("You", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    split = template.replace("'assistant'", "'Y'").replace("m['role'] +", "(m['role'] if loop.first else 'Y') +")
    with pytest.raises(ChatError, match="not a prefix"):
        ChatFormat(chatml(split), Chat()).trained_mask([u("q"), a("ou are")])


def test_a_chat_without_a_final_reply_is_refused() -> None:
    with pytest.raises(ChatError, match="last turn is not the assistant's"):
        ChatFormat(chatml(), Chat()).trained_mask([u("q"), a("r"), u("s")])


def test_generation_blocks_that_do_not_match_the_turns_are_refused() -> None:
    unmarked = CHATML_GENERATION.replace("message['role'] == 'assistant' %}", "message['content'] == 'never' %}")
    assert unmarked != CHATML_GENERATION
    with pytest.raises(ChatError, match=r"marks 0 spans with {% generation %}, but the chat has 1 assistant"):
        ChatFormat(chatml(unmarked), Chat()).trained_mask([u("q"), a("7")])
