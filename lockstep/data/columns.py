"""Converts rows to prompts and conversations by their columns; a row that does not fit gets a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, assert_never

from lockstep.config.data import Data, Extract
from lockstep.data.presets import preset_of
from lockstep.types import Message, Prompt
from lockstep.verifiers.extract import last_boxed

VERL_ANSWER = "reward_model.ground_truth"
"""Place of the reference in verl's parquet files."""
ROLES = ("system", "user", "assistant", "tool")
CALLS = ("tool_calls", "tool_call_id", "name")
FIELDS = {"role", "content", *CALLS}
"""Fields of a message."""
TOOLS = "tools"
"""Column with the functions that a reply may call, in OpenAI's form, as a list or as JSON."""


class BadRow(Exception):
    """A row that cannot be a prompt; the message says why."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a data set by purpose. Example: Columns(prompt="input", answer="label")"""

    prompt: str = "prompt"
    """Text, or a list of messages with role and content."""
    answer: str = "answer"
    """Text or a number."""
    response: str = "answer"
    """Reply that SFT learns."""
    extract: Extract = "text"
    messages: str | None = None
    """A whole conversation."""
    id: str | None = None
    """Unique id; None numbers the rows."""
    keep: tuple[str, ...] | None = None
    """Other columns for prompt.data; None is all."""
    before: str = ""
    after: str = ""
    whole: bool = False
    """The grader reads rows itself: prompt.data also has the columns of question and answer as they are, and an answer may be
    missing or of any kind."""


def columns_of(data: Data, *, whole: bool = False) -> Columns:
    """Return the columns by settings and preset; the settings win."""
    preset = preset_of(data)
    return Columns(
        prompt=data.prompt or (preset.prompt if preset else "prompt"),
        answer=data.answer or (preset.answer if preset else "answer"),
        response=data.answer or (preset.response if preset else "answer"),
        extract=data.extract or (preset.extract if preset and data.answer is None else "text"),
        messages=data.messages,
        id=data.id or (preset.id if preset else None),
        keep=None if data.keep is None else tuple(data.keep),
        before=preset.before if preset else "",
        after=preset.after if preset else "",
        whole=whole,
    )


def row_key(values: Mapping[str, object], number: int, columns: Columns) -> str:
    """Return a row's unique key. Raises BadRow."""
    if columns.id is None:
        return str(number)
    found = value_at(values, columns.id)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise BadRow(f"{columns.id!r} must be text or a whole number, this is {kind_of(found)}")
    return _text(str(found), columns.id)


def to_prompt(values: Mapping[str, object], id: str, task: str, columns: Columns) -> Prompt:
    """Return a row's prompt. Raises BadRow."""
    turns = question_of(values, columns)
    answer = answer_of(values, columns)
    used = {path.split(".")[0] if path not in values else path for path in (columns.prompt, columns.answer)}
    used = set() if columns.whole else used | ({columns.id} if columns.id else set())
    wanted = [name for name in values if name not in used] if columns.keep is None else columns.keep
    tools = tools_of(values)
    kept = {name: cell(values, name) for name in wanted if not (tools and name == TOOLS)}
    return Prompt(id, turns, answer, task, kept, tools)


def tools_of(values: Mapping[str, object]) -> str:
    """Return the functions of the column `tools` as a JSON list; "" if the row names none, or the column is something else.

    Raises BadRow for a list of functions in which one has no name.
    """
    given = values.get(TOOLS)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return ""
    if not isinstance(given, list) or not given or not all(_is_function(one) for one in given):
        return ""
    for place, one in enumerate(given):
        if not isinstance(one["function"].get("name"), str):
            raise BadRow(f"{TOOLS!r}[{place}].function has no name")
    return json.dumps([_plain(one) for one in given], ensure_ascii=False)


def _is_function(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "function" and isinstance(value.get("function"), Mapping)


def _plain(value: Any) -> Any:
    """Return JSON without the nulls that parquet puts where another row's function has a field."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def question_of(values: Mapping[str, object], columns: Columns) -> tuple[Message, ...]:
    """Return the turns before the reply. Raises BadRow."""
    if columns.messages is not None:
        turns = _turns(values, columns.messages)
        turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        if not turns or turns[-1]["role"] != "user":
            raise BadRow(f"{columns.messages!r} has no user message before its last reply")
        return turns
    value = value_at(values, columns.prompt)
    if isinstance(value, str):
        return (Message(role="user", content=_text(_bare(value, columns), columns.prompt)),)
    if not isinstance(value, list):
        raise BadRow(f"{columns.prompt!r} must be text or a list of messages, this is {kind_of(value)}")
    turns = _turns(values, columns.prompt)
    if turns[-1]["role"] != "user":
        raise BadRow(f"{columns.prompt!r} must end with a user message")
    if not (columns.before or columns.after):
        return turns
    last = _text(_bare(turns[-1]["content"], columns), columns.prompt)
    return (*turns[:-1], Message(role="user", content=last))


def answer_of(values: Mapping[str, object], columns: Columns) -> str:
    """Return the reference answer. Raises BadRow."""
    if columns.messages is not None:
        turns = _turns(values, columns.messages)
        if turns[-1]["role"] != "assistant":
            raise BadRow(f"{columns.messages!r} must end with an assistant message, which is the answer")
        return _extracted(turns[-1]["content"], columns.extract, columns.messages)
    place = VERL_ANSWER if in_verl_layout(values, columns) else columns.answer
    if columns.whole and place == "answer" and values.get(place) is None:
        return ""
    value = value_at(values, place)
    if columns.whole and not isinstance(value, str | int | float | Decimal):
        return json.dumps(value, ensure_ascii=False, default=repr)
    return _extracted(_written(value, columns.answer), columns.extract, columns.answer)


def in_verl_layout(values: Mapping[str, object], columns: Columns) -> bool:
    """Return whether a row without the default column `answer` has its reference where verl keeps it."""
    model = values.get("reward_model")
    return columns.answer == "answer" not in values and isinstance(model, Mapping) and "ground_truth" in model


def to_conversation(values: Mapping[str, object], columns: Columns) -> tuple[Message, ...]:
    """Return a chat that ends with the assistant: the messages column, or the question and its response. Raises BadRow."""
    if columns.messages is not None:
        turns = _turns(values, columns.messages)
        if turns[-1]["role"] != "assistant":
            raise BadRow(f"{columns.messages!r} must end with an assistant message")
        return turns
    reply = _text(_written(value_at(values, columns.response), columns.response), columns.response)
    return (*question_of(values, columns), Message(role="assistant", content=reply))


def value_at(values: Mapping[str, object], path: str) -> object:
    """Return the value of a column; for "a.b" the value b of the mapping in column a, unless there is a column "a.b".

    Raises BadRow if there is none, or it is null.
    """
    found: object
    if path in values or "." not in path:
        found = _member(values, path, "column")
    else:
        found = values
        for part in path.split("."):
            if not isinstance(found, Mapping):
                raise BadRow(f"{path!r}: {part!r} is looked for in {kind_of(found)}, not in an object")
            found = _member(found, part, "column" if found is values else "value")
    if found is None:
        raise BadRow(f"{path!r} is null")
    return found


def cell(values: Mapping[str, object], path: str) -> object:
    """Return what `value_at` does, but None for a column that is null."""
    return values[path] if path in values else value_at(values, path)


def kind_of(value: object) -> str:
    """Return the kind of a value in words."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _member(values: Mapping[str, object], name: str, what: str) -> object:
    if name not in values:
        near = get_close_matches(name, values, n=1, cutoff=0.5)
        has = ", ".join(map(repr, list(values)[:8])) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"it has {has}"
        raise BadRow(f"there is no {what} {name!r}; {hint}")
    return values[name]


def _bare(text: str, columns: Columns) -> str:
    return text.removeprefix(columns.before).removesuffix(columns.after)


def _extracted(text: str, extract: Extract, column: str) -> str:
    match extract:
        case "text":
            found = text
        case "after_hashes":
            _, marks, found = text.rpartition("####")
            if not marks:
                raise BadRow(f"{column!r} has no ####, which must come before the answer")
            found = found.strip()
        case "last_boxed":
            box = last_boxed(text)
            if box is None:
                raise BadRow(f"{column!r} has no closed \\boxed{{…}} with the answer")
            found = box.content.strip()
        case _:
            assert_never(extract)
    return _text(found, column)


def _written(value: object, column: str) -> str:
    if isinstance(value, Decimal):  # parquet has a type for them
        return format(value, "f")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"{column!r} must be text or a number, this is {kind_of(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{column!r} is {value}, not a finite number")
    return value if isinstance(value, str) else repr(value)


def _turns(values: Mapping[str, object], column: str) -> tuple[Message, ...]:
    value = value_at(values, column)
    if not isinstance(value, list):
        raise BadRow(f"{column!r} must be a list of messages, this is {kind_of(value)}")
    turns = tuple(_message(turn, f"{column}[{index}]") for index, turn in enumerate(value))
    if not turns:
        raise BadRow(f"{column!r} must end with a user message")
    return turns


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= FIELDS:
        raise BadRow(f"{place} must have role and content, and of OpenAI's other fields only {', '.join(CALLS)}")
    role, calls = value["role"], value.get("tool_calls")
    content = "" if calls and value["content"] is None else value["content"]
    if role not in ROLES:
        raise BadRow(f"{place}.role must be one of {', '.join(ROLES)}, not {role!r}")
    if not isinstance(content, str):
        raise BadRow(f"{place}.content must be text, this is {kind_of(content)}")
    if calls:
        content = "\n".join([*([content] if content else []), *_calls(calls, place)])
    return Message(role=role, content=_text(content, f"{place}.content"))


def _calls(calls: object, place: str) -> list[str]:
    """Return calls as text, in the form in which most templates write them and `with_tools` asks for them."""
    if not isinstance(calls, list):
        raise BadRow(f"{place}.tool_calls must be a list, this is {kind_of(calls)}")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{place}.tool_calls[{number}] has no function with a name")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else _plain(arguments)
        except ValueError as error:
            raise BadRow(f"{place}.tool_calls[{number}].function.arguments is not JSON") from error
        text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        found.append(f"<tool_call>\n{text}\n</tool_call>")
    return found


def _text(text: str, column: str) -> str:
    if not text.strip():
        raise BadRow(f"{column!r} is empty")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{column!r} has a lone surrogate at character {error.start}") from error
    return text
