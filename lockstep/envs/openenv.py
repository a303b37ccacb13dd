"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv): each episode has its own WebSocket to the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from lockstep.config import schema
from lockstep.config.section import command_words
from lockstep.envs import die_with_parent
from lockstep.envs.packages import package
from lockstep.errors import TaskError
from lockstep.text import reason_of
from lockstep.types import Message, Turn

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

FREED_SECONDS = 10.0
"""Longest wait for a session: a server frees one some time after its episode has ended."""
LARGEST = 1 << 24
"""Most bytes of an answer."""
JSON = "json"
"""Setting `action` of a reply that is the whole action."""
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


class _BrokeError(TaskError):
    """The connection broke."""


class OpenEnv:
    """One session. It ends with the episode's process, which closes the connection."""

    def __init__(self, settings: schema.OpenEnvTask, address: str, field: str, opening: str) -> None:
        self._settings, self._address, self._field, self._opening = settings, address, field, opening
        self._socket: ClientConnection | None = None
        self._open = ExitStack()
        """Left only to connect again: the connection ends with this process."""
        self._total = 0.0

    def start(self, seed: int) -> Turn:
        data = self._opened({"type": "reset", "data": {**self._settings.reset, "seed": seed % 2**31}})
        text = "\n\n".join(part for part in (self._opening, self._said(data)) if part)
        return Turn((Message(role="user", content=text),), done=bool(data.get("done")))

    def step(self, reply: str) -> Turn:
        action = _object(reply) if self._field == JSON else {self._field: reply.strip()}
        if action is None:
            return _refused("it is not one JSON object")
        answer = self._asked({"type": "step", "data": action})
        if _code(answer) == "VALIDATION_ERROR":
            return _refused(_faults(answer["data"]))
        data = self._observed(answer)
        reward, done = float(data.get("reward") or 0.0), bool(data.get("done"))
        self._total += reward
        metrics = {"correct": float(self._total >= self._settings.solved)} if done else {}
        said = () if done else (Message(role="user", content=self._said(data)),)
        return Turn(said, reward, done, metrics=metrics, extracted=reply.strip()[-80:])

    def _opened(self, reset: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session and reset it. A connection that breaks is tried once more; a session that is not free is waited for."""
        until, broken = time.monotonic() + FREED_SECONDS, False
        while True:
            try:
                answer = self._asked(reset)
            except _BrokeError:
                if broken:
                    raise
                broken = True
            else:
                if _code(answer) != "CAPACITY_REACHED":
                    return self._observed(answer)
                if time.monotonic() > until:
                    raise TaskError(
                        f"the server had no free session for {FREED_SECONDS:g} s: {answer['data'].get('message')}",
                        where=self._address,
                        fix="lower task.sessions to the number that the server allows, or raise its max_concurrent_envs",
                    )
            self._open.close()
            self._socket = None
            time.sleep(0.05)

    def _asked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer. A server that has no session says so at once, and closes."""
        from websockets.exceptions import ConnectionClosed, WebSocketException
        from websockets.sync.client import connect

        try:
            if self._socket is None:
                connection = connect(
                    f"ws{self._address.removeprefix('http')}/ws", max_size=LARGEST, ping_interval=None,
                    close_timeout=1.0, compression=None, proxy=None if _here(self._address) else True,
                )  # fmt: skip
                self._socket = self._open.enter_context(connection)
            with suppress(ConnectionClosed):  # what it said before is read below
                self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv())
        except (OSError, WebSocketException) as error:
            what = f"the connection to the server broke: {reason_of(error)}"
            raise _BrokeError(what, where=self._address, fix="look for the cause in the server's own output") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise TaskError(
                "the server's answer has no field `data`, as OpenEnv's have",
                where=self._address,
                fix="give the address of an OpenEnv server",
            )
        return answer

    def _observed(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = answer["data"]
        if answer.get("type") != "observation" or not isinstance(data.get("observation"), dict):
            why = f"{_code(answer) or answer.get('type')}: {data.get('message', '')}"
            raise TaskError(
                f"the environment failed: {why}",
                where=self._address,
                fix="look for the cause in the server's own output",
            )
        return data

    def _said(self, data: Mapping[str, Any]) -> str:
        seen, field = dict(data["observation"]), self._settings.observation
        if field is not None:
            if field not in seen:
                raise TaskError(
                    f"the observation has no field {field}; its fields are: {', '.join(seen)}",
                    where="task.observation",
                    fix="set task.observation to one of these fields",
                )
            return _text(seen[field])
        for name in ("metadata", "reward", "done"):
            seen.pop(name, None)
        return _text(next(iter(seen.values())) if len(seen) == 1 else seen)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(reply: str) -> dict[str, Any] | None:
    """Return the JSON object that a reply is, alone or in a fence; None if it is none."""
    fenced = _FENCED.fullmatch(reply.strip())
    try:
        found = json.loads(fenced[1] if fenced else reply)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refused(why: str) -> Turn:
    """Tell the model that its reply was no action, which costs a turn."""
    return Turn((Message(role="user", content=f"That is no action: {why}"),), metrics={"tool_errors": 1.0})


def _code(answer: Mapping[str, Any]) -> str:
    return str(answer["data"].get("code", "")) if answer.get("type") == "error" else ""


def _faults(data: Mapping[str, Any]) -> str:
    errors = [one for one in data.get("errors") or () if isinstance(one, dict)]
    said = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors[:5]]
    return "; ".join(said) or str(data.get("message", ""))


# --- before the run -------------------------------------------------------------------------------------------------
def openenv_maker(settings: schema.OpenEnvTask) -> Callable[[], OpenEnv]:
    """Return the environment's maker. A server's command is started here, and ends with this process.

    Raises TaskError for a server that does not come up or answer, and for an action that a reply cannot be put into.
    """
    package("websockets.sync.client", "openenv", extra="openenv")  # here, so that no episode imports it again
    if settings.url is not None:
        address = settings.url.rstrip("/")
        action = _action_schema(address, settings.start_seconds)
    else:
        address, action = _started(settings)
    field = _field(settings.action, action, address)
    opening = settings.instructions
    if field == JSON and not opening:
        opening = f"Reply with a JSON object of this schema, and nothing else: {json.dumps(action)}"
    return lambda: OpenEnv(settings, address, field, opening)


def _field(named: str | None, action: Mapping[str, Any], address: str) -> str:
    """Return the field of the action that a reply is put into, all that the server requires; or `JSON`."""
    properties, required = dict(action.get("properties", {})), list(action.get("required", ()))
    texts = [name for name in required if properties.get(name, {}).get("type") == "string"]
    field = named or (texts[0] if len(texts) == 1 else "")
    if field == JSON or (field in properties and set(required) <= {field}):
        return field
    raise TaskError(
        f"a reply cannot be {f'the field {named} alone' if named else 'an action'}: an action has {', '.join(properties)} and "
        f"requires {', '.join(required) or 'nothing'}",
        where=f"task.action, {address}",
        fix="set task.action to the only field that the server requires, or to json: a reply is then the whole action",
    )


def _action_schema(address: str, seconds: float) -> dict[str, Any]:
    """Return the JSON schema of the server's actions. Raises TaskError if no server of OpenEnv answers."""
    try:
        answer = httpx.get(f"{address}/schema", timeout=seconds, trust_env=not _here(address))
        action = answer.raise_for_status().json()["action"]
        if isinstance(action, dict):
            return action
        why = "its action schema is not a JSON object"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        why = reason_of(error, 200)
    raise TaskError(
        f"no OpenEnv server answers at this address ({why})",
        where=f"task.url={address}",
        fix="start the server, or set task.command so that the run starts it",
    )


def _started(settings: schema.OpenEnvTask) -> tuple[str, dict[str, Any]]:
    """Start the command, and return its address and schema of actions when it answers."""
    assert settings.command is not None
    where = f"task.command={settings.command}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program, *arguments = [part.replace("{port}", str(port)) for part in command_words(settings.command)]
    found = shutil.which(Path(program).expanduser())
    if found is None:
        raise TaskError(f"there is no program {program}", where=where, fix="correct the program's path")
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", str(die_with_parent.__file__), found, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env=kept | {"PORT": str(port)} | settings.env,
    )  # fmt: skip
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + settings.start_seconds
    while True:
        left = until - time.monotonic()
        try:
            return address, _action_schema(address, max(0.1, left))
        except TaskError as error:
            ended = process.poll() is not None
            if ended or left <= 0:
                said = process.communicate()[0].decode("utf-8", "replace").strip()
                what = "ended" if ended else f"does not answer on port {port} after {settings.start_seconds:g} s"
                raise TaskError(
                    f"the server {what}; it printed: {said[-500:] or 'nothing'}",
                    where=where,
                    fix="start the server by hand to see why; it must listen on 127.0.0.1, at the port that replaces {port}",
                ) from error
        time.sleep(0.1)


def _here(address: str) -> bool:
    """Return whether an address is this machine's, which no proxy of the environment reaches."""
    return urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
