"""Nothing is left open after thousands of requests of 64 clients, of which many are cancelled, broken off or wrong.

The whole of it: pytest tests/serve/test_leaks.py -s -m slow
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.loopback import HOST
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.serve.conversations import MOST_IDS
from lockstep.serve.endpoint import CHAT, GENERATE, MESSAGES, Endpoint
from lockstep.serve.thread import EngineThread
from tests.envs.played import chat_of, engine_of
from tests.rollout.paged.test_turns import check_pages
from tests.serve.served import KEY, MODEL, TOKEN, idle, post, raw, until

CLIENTS = 64


class Client:
    """One client, which does one thing after another, drawn by chance."""

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self.endpoint, self.chance, self.seen = endpoint, random.Random(number), Counter[str]()
        self.token = f"token-of-client-{number % 8}"
        endpoint.admit(self.token, f"client{number % 8}")
        self.chat: list[dict[str, str]] = []

    def play(self, requests: int) -> Counter[str]:
        for _ in range(requests):
            kinds = (self.goes_on, self.ids, self.leaves, self.half, self.wrong, self.stream, self.episode)
            kind = self.chance.choices(kinds, (30, 20, 20, 5, 15, 5, 5))[0]
            self.seen[f"{kind.__name__}: {kind()}"] += 1
        return self.seen

    def body(self, **more: Any) -> dict[str, Any]:
        if len(self.chat) > 7 or not self.chat:
            self.chat = [{"role": "user", "content": f"{self.chance.random()}"}]
        return {"model": MODEL, "messages": self.chat, "max_tokens": self.chance.randint(1, 8), **more}

    def goes_on(self) -> object:
        status, answer, _ = post(self.endpoint, CHAT, self.body(n=self.chance.choice([1, 1, 2])), self.token)
        if status == 200:
            said = answer["choices"][0]["message"]["content"]
            assert (answer["prompt_ids_reused"] > 0) == (len(self.chat) > 1)
            self.chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        return status

    def ids(self) -> object:
        ids = [self.chance.randrange(3, 300) for _ in range(self.chance.randint(1, 40))]
        return post(self.endpoint, GENERATE, {"token_ids": ids, "sampling_params": {"max_tokens": 4}}, self.token)[0]

    def stream(self) -> object:
        data = json.dumps(self.body(stream=True)).encode()
        head = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {self.token}\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((HOST, self.endpoint.server_port), timeout=60) as connection:
            connection.sendall(head.encode() + data)
            found = b"".join(iter(lambda: connection.recv(2**16), b""))
        return "whole" if found.rstrip().endswith(b'{"type": "message_stop"}') else found[-200:]

    def leaves(self) -> object:
        """Ask for a long reply and go away while it is sampled, or before it begins."""
        connection = http.client.HTTPConnection(HOST, self.endpoint.server_port, timeout=60)
        body = self.body(ignore_eos=True, stream=self.chance.random() < 0.5) | {"max_tokens": 300}
        connection.request("POST", CHAT, json.dumps(body), {"x-api-key": self.token})
        threading.Event().wait(self.chance.random() * 0.05)
        connection.close()
        return "gone"

    def half(self) -> object:
        raw(self.endpoint, f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\nhalf".encode())
        return "broken off"

    def wrong(self) -> object:
        match self.chance.randrange(3):
            case 0:
                return post(self.endpoint, CHAT, self.body(), "a-wrong-token")[0]
            case 1:
                return post(self.endpoint, CHAT, self.body(temperature=-1), self.token)[0]
            case _:
                return post(self.endpoint, GENERATE, {"token_ids": [10**9]}, self.token)[0]

    def episode(self) -> object:
        """A token of its own that is withdrawn while its request runs."""
        token = f"{self.chance.random()}"
        self.endpoint.admit(token, token)
        timer = threading.Timer(0.02, self.endpoint.withdraw, [token])
        timer.start()
        status = post(self.endpoint, CHAT, self.body(ignore_eos=True) | {"max_tokens": 200}, token)[0]
        timer.join()
        return status


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        (NativeEngine, 320),
        pytest.param(NativeEngine, 4_000, marks=pytest.mark.slow),
        pytest.param(PagedEngine, 640, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_open(tiny_model_dir: Path, kind: type, requests: int):
    engine, process = engine_of(tiny_model_dir, 32, kind), psutil.Process()
    before = threading.active_count(), process.num_fds()
    with (
        EngineThread(engine, running=32, waiting=256) as sampler,
        Endpoint(sampler, chat_of(tiny_model_dir), model=MODEL, context=400) as endpoint,
    ):
        endpoint.admit(TOKEN, KEY)
        clients = [Client(endpoint, number) for number in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            seen = sum(pool.map(lambda client: client.play(requests // CLIENTS), clients), Counter())
        until(lambda: idle(endpoint) and not endpoint.due)
        counts = sampler.counts()
        held = {key: known.total for key, known in endpoint.conversations._known.items()}
        print(f"\n{seen.total()} requests of {CLIENTS} clients: {dict(sorted(seen.items()))}")
        print(f"left open: {counts}; ids remembered for {len(held)} keys: {sum(held.values())}")
        assert not any(counts.values())
        assert set(held) <= {f"client{i}" for i in range(8)}
        assert all(total <= MOST_IDS for total in held.values())
        if isinstance(engine, PagedEngine):
            check_pages(engine)
            print(
                f"kept histories: {len(engine._pool.kept)}; tokens processed: {engine.processed}, reused: {engine.reused}"
            )
        else:
            print(f"kept prompts: {len(engine._kept)} of {engine._kept.bytes / 2**20:.1f} MiB")
            print(f"tokens processed: {engine.processed}, reused: {engine.reused}")
        for client in clients:
            endpoint.withdraw(client.token)
        assert not endpoint.conversations._known
        assert (
            post(endpoint, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1})[0]
            == 200
        )
    until(lambda: threading.active_count() <= before[0] and process.num_fds() <= before[1])
    answered = {key.partition(": ")[2] for key in seen}
    assert answered <= {"200", "whole", "gone", "broken off", "400", "401"}, seen
    assert not engine.held
    assert not len(engine._pool.kept if isinstance(engine, PagedEngine) else engine._kept)
