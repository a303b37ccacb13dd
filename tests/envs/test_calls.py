"""Tool calls as models write them."""

from __future__ import annotations

import time

import pytest

from lockstep.envs.calls import MAX_CALLS, BadCall, Call, read_calls

TOOLS = ("calculator", "look_up")
ADD = Call("calculator", {"expression": "3 + 4"})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 4"}}\n</tool_call>', [ADD]),
        ('I add.\n<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 4"}}', [ADD]),
        ('<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"3 + 4\\"}"}</tool_call>', [ADD]),
        ('{"name": "calculator", "parameters": {"expression": "3 + 4"}}', [ADD]),
        (
            '[{"name": "calculator", "arguments": {"expression": "3 + 4"}}, {"name": "look_up"}]',
            [ADD, Call("look_up", {})],
        ),
        ("<think><tool_call>{}</tool_call></think>The answer is 7.", []),
        ("7", []),
        ('{"answer": 7}', []),
        ('{"name": "Alice", "age": 30}', []),
        ('[{"name": "Alice"}, {"name": "Bob"}]', []),
        ('{"name": "look_up"}', [Call("look_up", {})]),
        ("", []),
    ],
)
def test_calls_in_tags_or_as_the_whole_reply(reply: str, expected: list[Call]) -> None:
    assert list(read_calls(reply, "hermes", TOOLS)) == expected


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>3 + 4</tool_call>",
        '<tool_call>{"name": "calculator", "argum',
        '<tool_call>["calculator"]</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "look_up", "arguments": {"times": ' + "1" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "look_up", "arguments": {"times": NaN}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": "{\\"times\\": 1e999}"}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_says_why(reply: str) -> None:
    (found,) = read_calls(reply, "hermes", TOOLS)
    assert isinstance(found, BadCall)
    assert 0 < len(found.why) < 130


def test_plain_calls_are_lines_that_name_a_tool() -> None:
    reply = 'Let me see.\ncalculator(3 * (4 + 1))\n look_up("a", 2).\nprint(1)\nthe calculator(1) says'
    assert read_calls(reply, "plain", TOOLS) == (Call("calculator", "3 * (4 + 1)"), Call("look_up", '"a", 2'))


def test_floods_are_cut_and_read_in_linear_time() -> None:
    started = time.process_time()
    assert len(read_calls("<tool_call>{}</tool_call>" * 100_000, "hermes", TOOLS)) == MAX_CALLS
    assert len(read_calls("calculator(1)\n" * 100_000, "plain", TOOLS)) == MAX_CALLS
    assert read_calls("calculator(" * 200_000, "plain", TOOLS) == ()
    assert time.process_time() - started < 2
