"""An endpoint over the tiny model, and requests as bytes."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.chat.chat import ChatFormat
from lockstep.loopback import HOST
from lockstep.serve.endpoint import Endpoint
from lockstep.serve.thread import EngineThread
from lockstep.types import ClientRequest, Completion, FinishReason, Request
from tests.envs.played import chat_of, engine_of

TOKEN, KEY, MODEL = "a-token-of-some-length", "client", "tiny"


@contextmanager
def served(folder: Path, *, running: int = 64, waiting: int = 1024, slots: int = 16) -> Iterator[Endpoint]:
    engine = engine_of(folder, slots)
    with (
        EngineThread(engine, running=running, waiting=waiting) as sampler,
        Endpoint(sampler, chat_of(folder), model=MODEL, context=512, max_tokens=16) as endpoint,
    ):
        endpoint.admit(TOKEN, KEY)
        yield endpoint
        until(lambda: idle(endpoint))


def idle(endpoint: Endpoint) -> bool:
    """Nothing is open: no request, row, page, or connection that sends."""
    assert isinstance(endpoint.sampler, EngineThread)
    return not any(endpoint.sampler.counts().values()) and not endpoint._open


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def post(
    endpoint: Endpoint, path: str, body: object, token: str = TOKEN, method: str = "POST", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Return status, answer and headers."""
    connection = http.client.HTTPConnection(HOST, endpoint.server_port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"Authorization": f"Bearer {token}", **headers})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text), dict(answer.getheaders())
    finally:
        connection.close()


def raw(endpoint: Endpoint, data: bytes) -> bytes:
    """Return everything that the server answers to these bytes."""
    with socket.create_connection((HOST, endpoint.server_port), timeout=30) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        found = b""
        try:
            while piece := connection.recv(2**16):
                found += piece
        except ConnectionResetError:
            pass
        return found


class Held:
    """Holds an engine between two steps: a test sees what was sent before the reply is done."""

    def __init__(self, thread: EngineThread) -> None:
        self.go, self.steps = threading.Event(), 0
        between = thread._between

        def held() -> None:
            self.steps += 1
            if self.steps > 6 and not thread._closed:
                self.go.wait(20)
            between()

        thread._between = held  # type: ignore[method-assign]


class Scripted:
    """A Sampler whose replies are given as text: what a model that was trained for it would sample."""

    def __init__(self, chat: ChatFormat, replies: Sequence[str]) -> None:
        self.chat, self.replies, self.asks = chat, list(replies), list[ClientRequest]()

    def sample(self, ask: ClientRequest) -> Future[Completion]:
        self.asks.append(ask)
        ids = (*self.chat.tokenizer(self.replies.pop(0), add_special_tokens=False)["input_ids"], self.chat.stop_ids[0])
        request = Request(ask.id, ask.prompt_ids, ask.id, 0, ask.sampling, 0)
        future: Future[Completion] = Future()
        future.set_result(Completion(request, ids, (-0.5,) * len(ids), FinishReason.STOP, 0))
        return future

    def cancel(self, id: str) -> None:
        """Nothing runs."""
