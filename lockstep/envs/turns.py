"""Checks what an environment returns, before a reply's turn is used."""

from __future__ import annotations

import math

from lockstep.types import Turn


def fault_of(turn: object) -> str:
    """Return why an environment's result is not a usable Turn; empty if it is one."""
    if not isinstance(turn, Turn):
        return f"the environment returned {type(turn).__name__}, not a lockstep.types.Turn"
    for message in turn.observation:
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            return f"a turn of the observation is {message!r}, not a role and a content of text"
        if message["role"] not in ("user", "tool"):
            return f"the observation has the role {message['role']}, not user or tool"
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            return "the observation is not valid Unicode"
    texts: dict[str, object] = {"extracted": turn.extracted, "error": turn.error}
    for name, text in texts.items():
        if not isinstance(text, str | None):
            return f"the field {name} is {text!r}, not a text"
    if turn.reward is None and not turn.error:
        return "the environment gave no reward and no error"
    numbers = {"reward": turn.reward, **turn.metrics}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            return f"the {name} is {value!r}, not a finite number"
    return ""
