"""Tools of an MCP server (https://modelcontextprotocol.io), called through the official client, the optional package `mcp`.

Each process that calls a tool starts its own server at its first call. So a server keeps the state of one episode, has the
episode's limits of time and memory, and ends with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import tools as schema
from lockstep.config.section import command_words
from lockstep.errors import TaskError
from lockstep.text import reason_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as Described

_ENDED_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""Program that runs a command which the kernel kills when its owner ends, however it ends (PR_SET_PDEATHSIG, SIGKILL)."""
_PAGES = 100


class McpServer:
    """A server, started when first needed."""

    def __init__(self, settings: schema.McpServer) -> None:
        self._settings = settings
        self._where = f"task.tools, mcp: {settings.mcp}"
        self._portal: BlockingPortal | None = None
        self._client: Client | None = None
        self._open = ExitStack()
        """Never left: the server ends with this process."""

    def listed(self) -> list[Described]:
        """Start a server, return its tools and end it. Raises TaskError if it does not start, answer, or have those named."""
        try:
            with _portal(self._where) as portal:
                tools = portal.call(self._list)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(
                f"the MCP server did not list its tools: {_cause(error)}",
                where=self._where,
                fix="start the server by hand to see why; it must speak MCP on its standard output and print nothing else there",
            ) from error
        wanted = self._settings.only
        if missing := sorted(set(wanted or ()) - {tool.name for tool in tools}):
            names = ", ".join(tool.name for tool in tools) or "none"
            raise TaskError(
                f"the MCP server has no tool {missing[0]}; its tools are: {names}",
                where=self._where,
                fix="correct the names of tools in `only`",
            )
        return [tool for tool in tools if wanted is None or tool.name in wanted]

    def caller(self, name: str) -> Callable[..., str]:
        """Return the function that calls a tool with its arguments, and raises ValueError with what the server says is wrong."""

        def call(**arguments: object) -> str:
            if self._client is None:
                self._portal = self._open.enter_context(_portal(self._where))
                self._client = self._open.enter_context(self._portal.wrap_async_context_manager(self._connected()))
            assert self._portal is not None
            return _text(self._portal.call(self._client.call_tool, name, arguments))

        return call

    async def _list(self) -> list[Described]:
        import anyio

        with anyio.fail_after(self._settings.start_seconds):
            async with self._connected() as client:
                found: list[Described] = []
                cursor: str | None = None
                for _ in range(_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found, cursor = [*found, *page.tools], page.next_cursor
                    if cursor is None:
                        break
                return found

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        command = self._settings.mcp
        if command.startswith("http://"):
            async with Client(command) as client:
                yield client
            return
        started = ["-P", "-c", _ENDED_WITH_US, *command_words(command)]
        server = StdioServerParameters(command=sys.executable, args=started, env=dict(self._settings.env))
        with Path(os.devnull).open("w") as silence:
            async with Client(stdio_client(server, errlog=silence)) as client:
                yield client


def _portal(where: str) -> AbstractContextManager[BlockingPortal]:
    """Return the context of an event loop in a thread of its own. Raises TaskError if the package is missing."""
    try:
        import mcp  # noqa: F401
        from anyio.from_thread import start_blocking_portal
    except ImportError as error:
        raise TaskError(
            f"tools of an MCP server need the package mcp, which cannot be imported: {error}",
            where=where,
            fix="pip install 'lockstep-rl[mcp]'",
        ) from error
    return start_blocking_portal()


def _text(result: CallToolResult) -> str:
    """Return a result as the model reads it: its text, and what else there is by its type. Raises ValueError for an error."""
    parts = [getattr(block, "text", None) or f"[{block.type}]" for block in result.content]
    text = "\n".join(parts)
    if result.is_error:
        raise ValueError(text or "the tool failed")
    return text


def _cause(error: BaseException) -> str:
    """Return the first reason inside groups of exceptions, which event loops make of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return reason_of(error)
