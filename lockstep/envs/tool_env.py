"""The environment of episodes with tools: it answers tool calls with results; a reply without a call is the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lockstep.envs.calls import Format, read_calls
from lockstep.envs.tools import Tool, run_call
from lockstep.types import Message, Turn


class ToolEnv:
    """Episode with tools; it has no state between replies. Failed calls are reported to the model and counted."""

    def __init__(self, tools: Mapping[str, Tool], format: Format) -> None:
        self._tools, self._format = tools, format

    def start(self, seed: int) -> Turn:
        return Turn()

    def step(self, reply: str) -> Turn:
        calls = read_calls(reply, self._format, self._tools)
        if not calls:
            return Turn(done=True, answer=True)
        results = [run_call(self._tools, call) for call in calls]
        metrics = {"tool_calls": float(len(calls)), "tool_errors": float(sum(result.failed for result in results))}
        role = "tool" if self._format == "hermes" else "user"
        if role == "user":  # one turn: some templates refuse several user turns in a row
            return Turn((Message(role=role, content="\n".join(result.text for result in results)),), metrics=metrics)
        return Turn(tuple(Message(role=role, content=result.text) for result in results), metrics=metrics)


def explained(tools: Mapping[str, Tool]) -> str:
    """Return the tools in words, for a model without tool calls."""
    lines = []
    for tool in tools.values():
        settings = tool.properties
        names = ", ".join(
            f"{name}: {one['type']}" if isinstance(one.get("type"), str) else name for name, one in settings.items()
        )
        lines.append(f"{tool.name}({names}): {tool.description}")
        lines += [f"  {name}: {one['description']}" for name, one in settings.items() if one.get("description")]
    return (
        "You may call a tool by writing its name and arguments on a line of their own, and nothing else:\n"
        + "\n".join(lines)
    )


def schemas(tools: Mapping[str, Tool]) -> str:
    """Return the schemas in the form of Prompt.tools."""
    return json.dumps([tool.schema for tool in tools.values()])
