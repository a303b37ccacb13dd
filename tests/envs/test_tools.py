"""Tools: schemas, arguments, results, and the calculator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.envs.calculator import calculator
from lockstep.envs.calls import BadCall, Call
from lockstep.envs.tool_env import ToolEnv, explained
from lockstep.envs.tools import build_tools, run_call
from lockstep.errors import TaskError
from tests.envs.played import OWN

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a key up.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "key": {"type": "string", "title": "Key", "description": "what to look up"},
                "times": {"type": "integer", "title": "Times", "default": 1, "description": "how often to say it"},
            },
            "required": ["key"],
        },
    },
}
TOOLS = build_tools([schema.Tool(path="calculator"), schema.Tool(path=f"{OWN}:look_up")])


def test_a_schema_is_made_from_signature_and_docstring() -> None:
    assert TOOLS["look_up"].schema == LOOK_UP


@pytest.mark.parametrize(
    ("call", "text", "failed"),
    [
        (Call("look_up", {"key": "ab", "times": 2}), "AB AB", False),
        (Call("look_up", {"key": "ab", "times": "2"}), "AB AB", False),
        (Call("look_up", '"ab", 2'), "AB AB", False),
        (Call("look_up", "ab, 2"), "AB AB", False),
        (Call("look_up", '{"key": "ab"}'), "AB", False),
        (Call("look_up", 'key="ab", times=2'), "AB AB", False),
        (Call("look_up", "times=2, key='a, b'"), "A, B A, B", False),
        (Call("look_up", "key=ab"), "KEY=AB", False),
        (Call("calculator", "3 + 4"), "7", False),
        (Call("calculator", '{"expression": "3 + 4"}'), "7", False),
        (Call("calculator", "'3 + 4'"), "7", False),
        (Call("calculator", "expression=3 + 4"), "7", False),
        (Call("calculator", '"3 + 4"'), "7", False),
        (Call("look_up", {}), "error: key: Field required", True),
        (Call("look_up", {"key": "a", "times": "many"}), "error: times: ", True),
        (Call("look_up", {"key": "a", "more": 1}), "error: more: ", True),
        (Call("look_up", "1, 2, 3"), "error: look_up takes 2 arguments, not 3", True),
        (Call("look_up", {"key": "raise"}), "error: KeyError: 'raise'", True),
        (Call("nothing", {}), "error: there is no tool 'nothing'; there are calculator, look_up", True),
        (BadCall("why"), "error: why", True),
    ],
)
def test_a_call_gives_a_result_or_a_reason(call: Call | BadCall, text: str, failed: bool) -> None:
    result = run_call(TOOLS, call)
    assert result.text.startswith(text)
    assert result.failed is failed


def test_a_json_schema_of_ones_own_is_kept_to() -> None:
    parameters = {"type": "object", "properties": {"key": {"enum": ["a", "b"]}}, "required": ["key"]}
    (tool,) = build_tools([schema.Tool(path=f"{OWN}:look_up", name="pick", parameters=parameters)]).values()
    assert tool.schema["function"]["parameters"] == parameters
    assert run_call({"pick": tool}, Call("pick", {"key": "b"})).text == "B"
    assert run_call({"pick": tool}, Call("pick", {"key": "c"})).failed
    for wrong, why in (
        ({"type": 7}, "7 is not"),
        ({"properties": {"key": {"$ref": "#/$defs/Key"}}}, r"\$ref #/\$defs/Key"),
    ):
        with pytest.raises(TaskError, match=f"not a JSON Schema: .*{why}") as refused:
            build_tools([schema.Tool(path=f"{OWN}:look_up", parameters=wrong)])
        assert refused.value.where == f"{OWN}:look_up"


def test_tools_that_cannot_be_used_are_refused() -> None:
    for path in (f"{OWN}:nothing", f"{OWN}:Counter", "none.py:f"):
        with pytest.raises(TaskError):
            build_tools([schema.Tool(path=path)])
    with pytest.raises(TaskError, match="two tools"):
        build_tools([schema.Tool(path="calculator"), schema.Tool(path="calculator")])


@pytest.mark.parametrize("parameter", ["order: Order", "_order: str", "order: Callable[[int], int]"])
def test_a_parameter_without_a_json_schema_is_named_with_the_remedy(tmp_path: Path, parameter: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"from collections.abc import Callable\nclass Order: pass\ndef buy({parameter}) -> str: return ''\n")
    with pytest.raises(TaskError, match="no JSON schema can be made") as error:
        build_tools([schema.Tool(path=f"{own}:buy")])
    assert error.value.where == f"{own}:buy"
    if parameter[0] != "_":
        parameters = {"type": "object", "properties": {"order": {}}}
        assert build_tools([schema.Tool(path=f"{own}:buy", parameters=parameters)])


def test_an_argument_of_any_kind_may_have_true_as_its_schema() -> None:
    parameters = {"type": "object", "properties": {"key": True}}
    tools = build_tools([schema.Tool(path=f"{OWN}:look_up", parameters=parameters)])
    assert explained(tools).endswith("look_up(key): Looks a key up.")
    assert run_call(tools, Call("look_up", "ab")).text == "AB"


def test_an_episode_with_tools() -> None:
    env = ToolEnv(TOOLS, "hermes")
    turn = env.step('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call><tool_call>x')
    assert [message["content"] for message in turn.observation] == ["42", "error: a <tool_call> is not closed"]
    assert {message["role"] for message in turn.observation} == {"tool"}
    assert turn.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert not turn.done
    last = env.step("\\boxed{42}")
    assert last.done
    assert last.answer
    assert ToolEnv(TOOLS, "plain").step("calculator(6*7)").observation == ({"role": "user", "content": "42"},)
    told = explained(TOOLS)
    assert "look_up(key: string, times: integer): Looks a key up." in told
    assert "\n  key: what to look up\n  times: how often to say it" in told


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30 * 2", "72"),
        ("(1 + 2) / 4", "0.75"),
        ("2^10", "1024"),
        ("2**-1", "0.5"),
        ("-7 // 2", "-4"),
        ("7 % 4 =", "3"),
        ("6 × 7 − 2 ÷ 2", "41"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        (str(10**30) + "+1", str(10**30 + 1)),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**99999999",
        "1/0",
        "0**-1",
        "x",
        "__import__('os')",
        "(" * 190,
        "1+" * 99,
        "",
        "True",
        "'a'*9",
        "1e999",
        "[1]",
    ],
)
def test_the_calculator_refuses_at_once(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)
    assert time.process_time() - started < 0.5
