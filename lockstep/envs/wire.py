"""Messages between the driver and an environment's process: a length, then JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from lockstep.types import Message, Prompt, Turn

HEAD = struct.Struct(">I")
LARGEST = 1 << 24
"""Most bytes of a message; a longer one ends the episode."""


def packed(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes is too long, the most is {LARGEST}")
    return HEAD.pack(len(body)) + body


def unpack(buffer: bytearray) -> dict[str, Any] | None:
    """Remove and return the first message of the buffer; None if it is not complete. Raises ValueError if it is invalid."""
    if len(buffer) < HEAD.size:
        return None
    (size,) = HEAD.unpack_from(buffer)
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes is too long, the most is {LARGEST}")
    if len(buffer) < HEAD.size + size:
        return None
    body = json.loads(bytes(buffer[HEAD.size : HEAD.size + size]))
    del buffer[: HEAD.size + size]
    if not isinstance(body, dict):
        raise ValueError("it is not an object")
    return body


def prompt_to(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt to JSON. Raises TypeError for data that JSON cannot hold."""
    return {
        "id": prompt.id,
        "messages": [dict(message) for message in prompt.messages],
        "answer": prompt.answer,
        "task": prompt.task,
        "data": dict(prompt.data),
        "tools": prompt.tools,
    }


def prompt_from(found: Mapping[str, Any]) -> Prompt:
    messages = tuple(Message(role=m["role"], content=m["content"]) for m in found["messages"])
    return Prompt(found["id"], messages, found["answer"], found["task"], found["data"], found["tools"])


def turn_to(turn: Turn) -> dict[str, Any]:
    return {
        "observation": [dict(message) for message in turn.observation],
        "reward": turn.reward,
        "done": turn.done,
        "answer": turn.answer,
        "metrics": dict(turn.metrics),
        "extracted": turn.extracted,
        "error": turn.error,
    }


def turn_from(found: Mapping[str, Any]) -> Turn:
    messages = tuple(Message(role=m["role"], content=m["content"]) for m in found["observation"])
    rest = {name: found[name] for name in ("reward", "done", "answer", "metrics", "extracted", "error")}
    return Turn(messages, **rest)


def fault_of(turn: object) -> str:
    """Return why an environment's result is not a usable Turn; empty if it is one."""
    if not isinstance(turn, Turn):
        return f"it returned {type(turn).__name__}, not a lockstep.types.Turn"
    for message in turn.observation:
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            return f"a turn of its observation is {message!r}, not a role and a content of text"
        if message["role"] not in ("user", "tool"):
            return f"its observation has the role {message['role']}, not user or tool"
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            return "its observation is not valid Unicode"
    if turn.reward is None and not turn.error:
        return "it gave no reward and no error"
    numbers = {"reward": turn.reward, **turn.metrics}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            return f"its {name} is {value!r}, not a finite number"
    return ""
