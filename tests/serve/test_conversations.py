"""Token exactness: whatever a client sends next, what was sampled stays as it was sampled."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.chat.chat import ChatFormat
from lockstep.errors import ChatError
from lockstep.serve.conversations import Conversations, Said, ToolCall
from lockstep.types import TokenIds
from tests.conftest import write_tiny_model
from tests.envs.played import chat_of

WORDS = ("go on", "What?", " seven ", "<b>&", "日本語 ✓", "line\nline", "", '{"a": 1}')


@cache
def chat() -> ChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        return chat_of(Path(folder))


def reply_ids(chance: random.Random) -> TokenIds:
    """Ids as a model samples them: hardly ever those that its text would be split into."""
    ids = tuple(chance.randrange(3, 600) for _ in range(chance.randint(1, 12)))
    return ids if chance.random() < 0.2 else (*ids, chat().stop_ids[0])


@given(seed=st.integers(0, 10**6))
def test_a_chat_goes_on_from_the_longest_known_beginning(seed: int):
    """Chats that grow, fork, are sampled again and rewritten; the oracle keeps every chat's turns and ids in a list."""
    chance, held = random.Random(seed), Conversations(chat())
    continuation = chat().continuation()
    known: list[tuple[list[Said], TokenIds]] = []
    chats: list[list[Said]] = [[Said("user", "What is 4 + 3?")], [Said("system", "Be brief."), Said("user", "a")]]
    for _ in range(12):
        turns = list(chance.choice(chats))
        match chance.randrange(4):
            case 0 if known:  # the client's own summary of what was said, or an edited turn
                place = chance.randrange(len(turns))
                turns[place] = Said(turns[place].role, turns[place].text + "!")
            case 1 if len(turns) > 2:  # a fork
                end = chance.randrange(1, len(turns))
                turns = [*turns[:end], Said("assistant", "my own words"), Said("user", "and?")]
        if turns[-1].role == "assistant":
            turns += [Said(chance.choice(["user", "tool"]), chance.choice(WORDS))]
        prompt, reused = held.render("k", turns, "")
        before = [(said, ids) for said, ids in known if said == turns[: len(said)] and len(said) < len(turns)]
        if before:
            longest = max(len(said) for said, _ in before)
            ids = [ids for said, ids in before if len(said) == longest][-1]  # the same text twice: the newest
            rest = [held._message(turn) for turn in turns[longest:]]
            assert prompt == ids + continuation.after(ids[-1], rest)
            assert reused == len(ids)
        else:
            assert reused == 0
            assert prompt == chat().render([held._message(turn) for turn in turns])
        ids = reply_ids(chance)
        said = held.read(ids, (), "", "c").said
        held.replied("k", turns, said, "", prompt + ids)
        known.append(([*turns, said], prompt + ids))
        chats.append([*turns, said])
    assert held.render("another key", chats[-1][:-1], "")[1] == 0
    held.forget("k")
    assert not held._known


def test_white_space_and_the_form_of_json_do_not_matter_and_anything_else_does():
    held = Conversations(chat())
    turns = [Said("user", "a")]
    reply = Said("assistant", " I add. ", (ToolCall("add", '{"a": 1, "b": [2]}', "c_0"),))
    held.replied("k", turns, reply, "", (1, 2, 3))

    def reused(text: str = "I add.", call: str = '{"b":[2],"a":1}', name: str = "add", first: str = "a") -> int:
        changed = Said("assistant", text, (ToolCall(name, call, "other"),))
        return held.render("k", [Said("user", first), changed, Said("tool", "3")], "")[1]

    assert reused() == 3
    assert not reused(text="I added.")
    assert not reused(call='{"b": [2], "a": 2}')
    assert not reused(name="sub")
    assert not reused(first="b")
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    changed = [Said("user", "a"), reply, Said("tool", "3")]
    assert held.render("k", changed, tools)[1] == 0, "with other tools the prompt was another"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "I add.", [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {}}', "", [("add", {})]),
        ('<tool_call>{"name": "add"}</tool_call> <tool_call>no</tool_call>', None, []),
        ("<tool_call>" * 3, None, []),
        ("no call", None, []),
    ],
)
def test_calls_of_a_reply(text: str, said: str | None, calls: list[tuple[str, dict[str, int]]]):
    held = Conversations(chat())
    ids = (*chat().tokenizer(text, add_special_tokens=False)["input_ids"], chat().stop_ids[0])
    tools = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])
    found = held.read(ids, (), tools, "id").said
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert found.text == (text if said is None else said)
    assert not held.read(ids, (), "", "id").said.calls, "no tools were offered"


def test_a_stop_string_is_not_in_the_text_and_its_ids_are_kept():
    held = Conversations(chat())
    ids = tuple(chat().tokenizer("one two STOP", add_special_tokens=False)["input_ids"])
    reply = held.read(ids, ("STOP", "two"), "", "id")
    assert (reply.said.text, reply.stop) == ("one ", "two")


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [("4\n", ""), ("4", ""), ("<think>a b</think>\n\n4\n", "<think>a b</think>"), ("<think>4\n", "<think>4")],
)
def test_white_space_at_the_end_repeats_no_answer_and_hides_no_stop_string(text: str, thoughts: str):
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        own = chat_of(Path(folder))
    own.parser = "think"
    ids = tuple(own.tokenizer(text, add_special_tokens=False)["input_ids"])
    reply = Conversations(own).read(ids, ("\n",), "", "id")
    assert (reply.said.text, reply.thoughts) == ("" if thoughts == "<think>4" else "4", thoughts)
    assert reply.stop == ("\n" if text.endswith("\n") else "")


@pytest.mark.parametrize("last", [Said("assistant", '{"answer":'), Said("system", "Be brief.")])
@pytest.mark.parametrize("known", [True, False])
def test_what_is_remembered_does_not_decide_whether_a_chat_is_refused(known: bool, last: Said):
    held = Conversations(chat())
    turns, reply = [Said("user", "What is 4 + 3?")], Said("assistant", "7")
    if known:
        held.replied("k", turns, reply, "", (*held.render("k", turns, "")[0], 5, chat().stop_ids[0]))
    with pytest.raises(ChatError):
        held.render("k", [*turns, reply, Said("user", "and?"), last], "")


def test_what_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.serve.conversations.MOST_IDS", 25)
    held = Conversations(chat())
    for i in range(3):
        held.replied("k", [Said("user", str(i))], Said("assistant", "x"), "", tuple(range(3, 13)))
    reused = [
        held.render("k", [Said("user", str(i)), Said("assistant", "x"), Said("user", "b")], "")[1] for i in range(3)
    ]
    assert reused == [0, 10, 10]
