"""Parses the tool calls in a reply, in the formats that models use."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from lockstep.codec import strict_json

Format: TypeAlias = Literal["hermes", "plain"]

MAX_CALLS = 16
"""Most calls read from one reply."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PLAIN = re.compile(r"^[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*\((.*)\)[ \t]*\.?[ \t]*$")
_END_THINK = "</think>"
_WHY = 120
"""Most characters of a reason."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call as read from a reply. Example: Call("calculator", {"expression": "3 + 4"})"""

    name: str
    arguments: Mapping[str, object] | str
    """Arguments by name; or, for a plain call, as text: the tool's only argument, or a list of them."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """Text that begins like a call but is not one; `why` is for the model to read."""

    why: str


def read_calls(reply: str, format: Format, names: Collection[str]) -> tuple[Call | BadCall, ...]:
    """Return the calls of a reply in order, at most MAX_CALLS; empty if it calls nothing and so is an answer.

    If a reply thinks aloud, only the text after the thoughts is read. `names` are the known tools: a plain line counts as a
    call only if it begins with one of them. Time grows linearly with the reply.
    """
    said = reply.rpartition(_END_THINK)[2]
    match format:
        case "hermes":
            return _tagged(said) or _bare(said, names)
        case "plain":
            found = (_PLAIN.match(line) for line in said.splitlines() if len(line) <= 4096)
            calls = [Call(line.group(1), line.group(2).strip()) for line in found if line and line.group(1) in names]
            return tuple(calls[:MAX_CALLS])
        case _:
            assert_never(format)


def _tagged(said: str) -> tuple[Call | BadCall, ...]:
    """Read <tool_call>{"name": …, "arguments": {…}}</tool_call>, the form of Hermes and Qwen."""
    calls: list[Call | BadCall] = []
    for piece in said.split(_OPEN)[1 : MAX_CALLS + 1]:
        body, closed, _ = piece.partition(_CLOSE)
        # The end of the turn closes the last one as well: a template may end a reply inside the tag.
        calls += _of_json(body) if closed or body.strip().endswith("}") else [BadCall(f"a {_OPEN} is not closed")]
    return tuple(calls)


def _bare(said: str, names: Collection[str]) -> tuple[Call | BadCall, ...]:
    """Read the whole reply as JSON: an object with name and parameters (Llama 3), or a list of objects (Mistral).

    An answer may be JSON with a name, too: without arguments it must be that of a tool.
    """
    text = said.strip()
    if not text.startswith(("{", "[")) or '"name"' not in text:
        return ()
    calls = _of_json(text, names)
    return tuple(calls[:MAX_CALLS]) if all(isinstance(call, Call) for call in calls) else ()


def _of_json(text: str, names: Collection[str] | None = None) -> list[Call | BadCall]:
    try:
        found = strict_json(text, finite=True)
    except ValueError as error:
        return [BadCall(f"the call is not JSON: {error}"[:_WHY])]
    return [_of_object(one, names) for one in (found if isinstance(found, list) else [found])]


def _of_object(found: object, names: Collection[str] | None) -> Call | BadCall:
    """Read a call. `names`: those that need no arguments; None for all."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    if names is not None and found["name"] not in names and not found.keys() & {"arguments", "parameters"}:
        return BadCall("it has no arguments, and its name is not a tool's")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a text that holds JSON
        try:
            arguments = strict_json(arguments, finite=True)
        except ValueError as error:
            return BadCall(f"the arguments are not JSON: {error}"[:_WHY])
    if not isinstance(arguments, dict):
        return BadCall('"arguments" is not an object')
    return Call(found["name"], arguments)
