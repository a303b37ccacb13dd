from __future__ import annotations

import pytest

from lockstep.chat import ChatFormat, check_length
from lockstep.chat.template import freeze_date
from lockstep.config.schema import Chat, Example
from lockstep.errors import ChatError
from lockstep.types import Message, Prompt
from tests.chat.toy_tokenizers import CHATML, LLAMA2, chatml, llama2, qwen_base

QUESTION = Message(role="user", content="4 + 3 =")
SHOTS = Chat(
    system="You are a helpful assistant.",
    examples=[Example(user="1 + 1 =", assistant="\\boxed{2}"), Example(user="2 + 3 =", assistant="\\boxed{5}")],
    suffix=" State the final answer.",
)


def text_of(chat: ChatFormat, ids: tuple[int, ...]) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False))


# --- render ---------------------------------------------------------------------------------------------------------
def test_render_writes_system_examples_question_and_suffix_in_order() -> None:
    chat = ChatFormat(chatml(), SHOTS)
    assert text_of(chat, chat.render([QUESTION])) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1 + 1 = State the final answer.<|im_end|>\n<|im_start|>assistant\n\\boxed{2}<|im_end|>\n"
        "<|im_start|>user\n2 + 3 = State the final answer.<|im_end|>\n<|im_start|>assistant\n\\boxed{5}<|im_end|>\n"
        "<|im_start|>user\n4 + 3 = State the final answer.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_system_text_the_template_puts_its_own() -> None:
    chat = ChatFormat(chatml(), Chat())
    assert text_of(chat, chat.render([QUESTION])).startswith("<|im_start|>system\nYou are a helpful assistant.")


def test_the_tasks_own_system_turn_comes_before_the_examples() -> None:
    chat = ChatFormat(chatml(), Chat(examples=[Example(user="q", assistant="r")]))
    text = text_of(chat, chat.render([Message(role="system", content="Be brief."), QUESTION]))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>")


def test_suffix_goes_on_the_last_user_turn_only() -> None:
    chat = ChatFormat(chatml(), Chat(suffix="!"))
    turns = [QUESTION, Message(role="assistant", content="7"), Message(role="user", content="Sure?")]
    text = text_of(chat, chat.render(turns))
    assert "4 + 3 =<|im_end|>" in text
    assert "Sure?!<|im_end|>" in text


def test_render_does_not_change_the_callers_messages() -> None:
    messages = [Message(role="user", content="4 + 3 =")]
    ChatFormat(chatml(), SHOTS).render(messages)
    assert messages == [{"role": "user", "content": "4 + 3 ="}]


# --- exactly one BOS ------------------------------------------------------------------------------------------------
def test_a_template_that_opens_with_bos_gets_no_second_one() -> None:
    chat = ChatFormat(chatml(), Chat())
    ids = chat.render([QUESTION])
    assert ids[0] == chat.tokenizer.bos_token_id == 1
    assert ids[1] != 1
    assert ids.count(1) == 3  # one for each turn: system, user, assistant


def test_a_template_with_bos_in_it_has_one_where_plain_encoding_would_have_two() -> None:
    tokenizer = llama2()
    chat = ChatFormat(tokenizer, Chat())
    ids = chat.render([QUESTION])
    rendered = tokenizer.apply_chat_template([dict(QUESTION)], tokenize=False)
    assert tokenizer(rendered)["input_ids"][:2] == [0, 0]  # the trap: plain encoding doubles it
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert ids == tuple(tokenizer(rendered)["input_ids"][1:])


def test_two_bos_tokens_are_refused() -> None:
    with pytest.raises(ChatError, match="two BOS tokens"):
        ChatFormat(llama2("{{ bos_token }}" + LLAMA2), Chat()).render([QUESTION])


def test_a_missing_bos_is_noted() -> None:
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    chat = ChatFormat(llama2(plain), Chat())
    assert 0 not in chat.render([QUESTION])
    assert "puts <s> before plain text but the template does not" in chat.notes[0]
    assert ChatFormat(llama2(), Chat()).notes == ()


def test_a_tokenizer_whose_two_ways_to_ids_differ_is_refused() -> None:
    from tests.chat.toy_tokenizers import PreTrainedTokenizerFast

    class Odd(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, tokenize=True, **kwargs):  # type: ignore[no-untyped-def]
            out = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            return [1, *out] if tokenize else out

    base = chatml()
    odd = Odd(tokenizer_object=base.backend_tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")
    odd.chat_template = CHATML
    with pytest.raises(ChatError, match="gives ids that differ from those of the text"):
        ChatFormat(odd, Chat()).render([QUESTION])


# --- refusals -------------------------------------------------------------------------------------------------------
def test_a_tokenizer_without_template_says_what_to_do() -> None:
    with pytest.raises(ChatError, match="no chat template") as caught:
        ChatFormat(chatml(template=None), Chat())
    assert "instruct version" in caught.value.fix


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = chatml()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "x"}  # type: ignore[assignment]
    assert ChatFormat(tokenizer, Chat()).template_hash == ChatFormat(chatml(), Chat()).template_hash
    tokenizer.chat_template = {"rag": CHATML, "tool_use": "x"}  # type: ignore[assignment]
    with pytest.raises(ChatError, match="chat templates rag, tool_use, but none is called default"):
        ChatFormat(tokenizer, Chat())


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(ChatError, match="no system turn here"):
        ChatFormat(llama2(), Chat(system="Be brief.")).render([QUESTION])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no user turn"),
        ([{"role": "system", "content": "x"}], "no user turn"),
        ([{"role": "user"}], "exactly the fields role and content"),
        ([{"role": "User", "content": "x"}], "the role 'User' is unknown"),
        ([{"role": "user", "content": ["x"]}], "not text but of type list"),
        ([{"role": "user", "content": "a\ud800b"}], "not valid Unicode at character 1"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "after other turns"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "nothing to reply to"),
        ([{"role": "user", "content": "x<|im_end|>"}], "reads as a control token"),
    ],
)
def test_turns_that_make_no_chat_are_refused(messages: list[Message], says: str) -> None:
    with pytest.raises(ChatError, match=says):
        ChatFormat(chatml(), Chat()).render(messages)


def test_an_error_of_a_prompt_names_it() -> None:
    chat = ChatFormat(chatml(), Chat())
    assert chat.render_prompt(Prompt("sum/1", (QUESTION,), "7")) == chat.render([QUESTION])
    with pytest.raises(
        ChatError, match="prompt sum/2, turn 0: the user turn contains '<|im_end|>'".replace("|", "[|]")
    ):
        chat.render_prompt(Prompt("sum/2", (Message(role="user", content="x<|im_end|>"),), "7"))


def test_prepared_prompts_are_rendered_once_and_other_ones_of_their_id_anew() -> None:
    chat = ChatFormat(chatml(), Chat())
    prompt, other = Prompt("sum/1", (QUESTION,), "7"), Prompt("sum/1", (Message(role="user", content="1 + 1 ="),), "2")
    chat.prepare([prompt])
    found = chat.render_prompt(prompt)
    assert found == chat.render([QUESTION])
    assert chat.render_prompt(Prompt("sum/1", (QUESTION,), "7")) is found
    assert chat.render_prompt(other) == chat.render(other.messages)
    chat.prepare([other])
    assert chat.render_prompt(prompt) == found
    assert chat.render_prompt(prompt) is not found


def test_two_system_texts_are_refused() -> None:
    with pytest.raises(ChatError, match="both the recipe and the task"):
        ChatFormat(chatml(), SHOTS).render([Message(role="system", content="x"), QUESTION])


def test_template_kwargs_reach_the_template_but_not_the_tokenizer() -> None:
    template = CHATML + "{% if thinking %}{{ 'hm' }}{% endif %}"
    with_kwargs = ChatFormat(chatml(template), Chat(template_kwargs={"thinking": True}))
    assert text_of(with_kwargs, with_kwargs.render([QUESTION])).endswith("assistant\nhm")
    with pytest.raises(ChatError, match="add_generation_prompt, tokenize"):
        ChatFormat(chatml(), Chat(template_kwargs={"tokenize": False, "add_generation_prompt": False}))


# --- a date in the template -----------------------------------------------------------------------------------------
def test_a_template_that_prints_today_gets_a_fixed_date() -> None:
    template = "{{ '<|im_start|>' }}{{ strftime_now('%d %b %Y') }}" + CHATML[: CHATML.index("{% if loop.first")]
    template += "{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    chat = ChatFormat(chatml(template), Chat())
    assert text_of(chat, chat.render([QUESTION])) == "<|im_start|>26 Jul 20244 + 3 =<|im_end|>"
    assert "2024-07-26 replaces it" in chat.notes[0]


def test_freeze_date_replaces_both_quotes_and_refuses_what_it_cannot() -> None:
    assert freeze_date("{{ strftime_now( \"%Y\" ) }}-{{ strftime_now('%m') }}") == '{{ "2024" }}-{{ "07" }}'
    assert freeze_date("{% if strftime_now is defined %}x{% endif %}") == "{% if strftime_now is defined %}x{% endif %}"
    with pytest.raises(ChatError, match="Lockstep cannot replace"):
        freeze_date("{{ strftime_now(fmt) }}")


# --- stop ids, decode, hash, preview --------------------------------------------------------------------------------
def test_stop_ids_hold_the_tokenizers_the_configs_and_the_templates_end() -> None:
    assert ChatFormat(chatml(), Chat()).stop_ids == (2,)
    assert ChatFormat(llama2(), Chat()).stop_ids == (1,)
    # eos is <|endoftext|>, but a turn ends at <|im_end|>: without it a base model with a template would never stop.
    assert ChatFormat(qwen_base(), Chat()).stop_ids == (0, 2)
    assert ChatFormat(chatml(), Chat(), generation_eos=7).stop_ids == (2, 7)
    assert ChatFormat(chatml(), Chat(), generation_eos=[0, 7]).stop_ids == (0, 2, 7)


def test_an_end_token_that_is_no_number_is_refused() -> None:
    for wrong in ("two", ["<|im_end|>"], [2, 7.0]):
        with pytest.raises(ChatError, match="as eos_token_id, which is not the number of a token"):
            ChatFormat(chatml(), Chat(), generation_eos=wrong)  # type: ignore[arg-type]


def test_a_chat_that_nothing_ends_is_refused() -> None:
    tokenizer = qwen_base()
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    with pytest.raises(ChatError, match="no token ends a reply"):
        ChatFormat(tokenizer, Chat())


def test_a_template_that_drops_the_reply_is_refused() -> None:
    with pytest.raises(ChatError, match="leaves out the assistant's turns"):
        ChatFormat(chatml("{{ messages[0]['content'] }}"), Chat())


def test_decode_drops_the_end_token_and_keeps_the_text() -> None:
    chat = ChatFormat(chatml(), Chat())
    ids = chat.tokenizer("The answer is \\boxed{7} .\n", add_special_tokens=False)["input_ids"]
    assert chat.decode([*ids, 2]) == "The answer is \\boxed{7} .\n"
    assert chat.decode([2]) == ""
    assert chat.decode([]) == ""


@pytest.mark.parametrize("parser", ["none", "think"])
def test_reading_a_reply_is_decoding_it_and_finding_its_answer(parser: str) -> None:
    tokenizer = chatml()
    plain = int(tokenizer.convert_tokens_to_ids("a"))  # an end token that is an ordinary piece of text
    chat = ChatFormat(tokenizer, Chat.model_validate({"parser": parser}), plain)
    assert plain in chat.stop_ids
    ids = tokenizer("so 3 + 4 is 7", add_special_tokens=False)["input_ids"]
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    replies = ([], ids, [*ids, 2], [*ids, plain], [plain], [2, *ids], [*ids, plain, 2], half, [*half, 2], tuple(ids))
    for reply in replies:
        assert chat.read(reply) == (chat.decode(reply), chat.answer(reply))
    assert chat.read_many(replies) == [chat.read(reply) for reply in replies]
    assert chat.read_many([]) == []
    assert chat.read([*ids, plain]) == ("so 3 + 4 is 7", "so 3 + 4 is 7a")


def test_replies_are_read_together_where_thoughts_are_marked_by_special_tokens() -> None:
    tokenizer = chatml()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    chat = ChatFormat(tokenizer, Chat(parser="think"))
    texts = (
        "<think>7?</think> 7<|im_end|>",
        "<think>7? 7<|im_end|>",
        "7",
        "<|im_end|>",
        "<think>a</think><|im_start|>",
    )
    replies = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = chat.read_many(replies)
    assert found == [(chat.decode(reply), chat.answer(reply)) for reply in replies]
    assert found[0] == ("<think>7?</think> 7", "7")


def test_a_tokenizer_that_decodes_in_its_own_way_reads_replies_in_it() -> None:
    tokenizer = chatml()
    ids = tokenizer("7", add_special_tokens=False)["input_ids"]

    class Loud(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *given: object, **settings: object) -> str:
            return f"{super()._decode(*given, **settings)}!"

    tokenizer.__class__ = Loud
    chat = ChatFormat(tokenizer, Chat())
    assert chat.read_many([ids, [*ids, 2]]) == [("7!", "7!")] * 2


def test_decode_of_half_a_character_gives_text() -> None:
    chat = ChatFormat(chatml(), Chat())
    ids = chat.tokenizer("é", add_special_tokens=False)["input_ids"]
    assert chat.decode(ids) == "é"
    assert chat.decode(ids[:1]) == "\ufffd"


def test_the_hash_changes_with_everything_that_shapes_a_prompt() -> None:
    def of(chat: Chat, template: str = CHATML) -> str:
        return ChatFormat(chatml(template), chat).template_hash

    hashes = [
        of(Chat()),
        of(Chat(system="x")),
        of(Chat(suffix="x")),
        of(Chat(examples=[Example(user="x", assistant="y")])),
        of(Chat(examples=[Example(user="y", assistant="x")])),
        of(Chat(template_kwargs={"a": 1})),
        of(Chat(), CHATML + " "),
        ChatFormat(qwen_base(), Chat()).template_hash,
    ]
    assert len(set(hashes)) == len(hashes)
    assert of(Chat()) == hashes[0]
    assert len(hashes[0]) == 16
    int(hashes[0], 16)


def test_the_hash_counts_the_vocabulary() -> None:
    tokenizer = chatml()
    before = ChatFormat(tokenizer, Chat()).template_hash
    tokenizer.add_tokens(["newword"])
    assert ChatFormat(tokenizer, Chat()).template_hash != before


def test_the_hash_does_not_depend_on_padding_or_generation_config() -> None:
    tokenizer = chatml()
    before = ChatFormat(tokenizer, Chat()).template_hash
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.padding_side = "left"
    assert ChatFormat(tokenizer, Chat(), generation_eos=[0]).template_hash == before


def test_preview_shows_what_the_model_sees() -> None:
    chat = ChatFormat(chatml(), Chat(suffix=" now"))
    head, *lines = chat.preview([QUESTION]).split("\n")
    assert f"{len(chat.render([QUESTION]))} tokens" in head
    assert chat.template_hash in head
    assert "<|im_end|> (2)" in head
    assert "| 4 + 3 = now<|im_end|>" in lines
    assert "| <|im_start|>assistant" in lines


# --- length ---------------------------------------------------------------------------------------------------------
def test_check_length_names_the_prompt_and_allows_the_exact_fit() -> None:
    check_length("chain_sum/17", 100, 28, 128)
    with pytest.raises(ChatError, match="chain_sum/17: 100 tokens of prompt and 29") as caught:
        check_length("chain_sum/17", 100, 29, 128)
    assert "28 or less" in caught.value.fix
    with pytest.raises(ChatError, match="a: 128") as caught:
        check_length("a", 128, 1, 128)
    assert "alone fills" in caught.value.fix
