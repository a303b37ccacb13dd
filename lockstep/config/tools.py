"""Settings of episodes: limits of turns, tokens and time, and the tools that replies may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from lockstep.config.section import Command, Json, Section


class Turns(Section):
    """Limits of an episode. All its tokens after the first prompt, sampled and observed, share rollout.max_tokens."""

    limit: int = Field(default=8, ge=1, le=1000)
    """Replies of an episode; after the last it ends with what it has earned."""
    reply_tokens: int | None = Field(default=None, ge=1)
    """Longest single reply, in tokens; none is whatever rollout.max_tokens leaves."""
    step_seconds: float = Field(default=30.0, gt=0)
    """Time for one step of an environment in a process of its own; a slower one is ended, and its sample is not scored."""
    memory_gib: float = Field(default=8.0, gt=0)
    """Address space of an environment's process."""
    credit: Literal["end", "turn"] = "end"
    """end: what the turns earned counts as one reward at the last token; turn: each reply's reward stands at its own last token
    (advantages of kind gae and whitened; others compare totals)."""


class Tool(Section):
    """A function that replies may call."""

    path: str = Field(pattern=r"(.+\.py:\w+|calculator)$")
    """file.py:function, or calculator."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Tool name shown to the model; none takes the function's name."""
    description: str | None = None
    """Description shown to the model; none takes the function's docstring."""
    parameters: dict[str, Json] | None = None
    """JSON schema of its arguments, an object; none is made from the function's signature."""


class McpServer(Section):
    """The tools of an MCP server. Needs pip install 'lockstep-rl[mcp]'."""

    mcp: Command
    """Its command, which speaks MCP on standard input and output; or the http address of one that runs on this machine. A command
    is started for each episode that calls it; `python` is the one that runs Lockstep. Example: python shop_server.py"""
    only: list[str] | None = None
    """Tools to offer; none offers all that it has."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, beside PATH, HOME and the like."""
    start_seconds: float = Field(default=30.0, gt=0)
    """Time to start and to list its tools, before the run. A call has turns.step_seconds."""

    @model_validator(mode="after")
    def _here(self) -> Self:
        if re.match(r"https?:", self.mcp) and not re.match(r"http://(127\.0\.0\.1|localhost|\[::1\])[:/]", self.mcp):
            raise ValueError(f"mcp={self.mcp} is not on this machine: run the server here, http://127.0.0.1:PORT/mcp")
        return self


def _which(entry: object) -> str:
    """Return the tag of what an entry of task.tools means to be, so that only mistakes in that are reported."""
    server = McpServer.model_fields.keys()
    is_server = isinstance(entry, Mapping) and "path" not in entry and any(key in server for key in entry)
    return "mcp" if is_server or isinstance(entry, McpServer) else "tool"


AnyTool: TypeAlias = Annotated[Annotated[Tool, Tag("tool")] | Annotated[McpServer, Tag("mcp")], Discriminator(_which)]
"""An entry of task.tools; it has no `kind`, as its settings tell which it is."""
