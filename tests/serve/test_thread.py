"""The engine thread: many askers, seeds by key, cancelled requests, a bounded queue, failures and a clean end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from lockstep.errors import BusyError, EngineError
from lockstep.rollout.native import NativeEngine
from lockstep.seeds import seed_for
from lockstep.serve.thread import EngineThread
from lockstep.types import ClientRequest, Request, Sampling
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import engine_over, finish

SHORT, LONG_ENOUGH = Sampling(6), Sampling(110, ignore_eos=True)


def ask(id: str, key: str = "k", length: int = 9, sampling: Sampling = SHORT, seed: int | None = None) -> ClientRequest:
    return ClientRequest(id, key, tokens(length, length), sampling, seed)


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return engine_over(twin(plain("llama")))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_replies_are_those_of_the_engine_alone(engine: NativeEngine):
    asks = [ask(f"{i}", f"key{i % 3}", 5 + i, seed=i if i % 2 else None) for i in range(12)]
    with EngineThread(engine, seed=("s",)) as sampler:
        futures = [sampler.sample(one) for one in asks]
        done = [future.result(30) for future in futures]
        assert sampler.counts() == {"open": 0, "waiting": 0, "running": 0, "held": 0}
    counted: dict[str, int] = {}
    for one, completion in zip(asks, done, strict=True):
        place = counted.get(one.key, 0)
        seed = one.seed if one.seed is not None else seed_for("s", one.key, place)
        counted[one.key] = place + (one.seed is None)
        alone = finish(engine, [Request(one.id, one.prompt_ids, "g", seed, one.sampling, 0)])[one.id]
        assert (completion.ids, completion.logprobs, completion.request.seed) == (alone.ids, alone.logprobs, seed)


def test_new_requests_join_those_that_run(engine: NativeEngine):
    with EngineThread(engine) as sampler:
        long = sampler.sample(ask("long", sampling=Sampling(100, ignore_eos=True)))
        until(lambda: sampler.counts()["running"] == 1)
        short = sampler.sample(ask("short", sampling=Sampling(1)))
        short.result(30)
        assert not long.done()
        long.result(30)


def test_what_is_cancelled_frees_its_row(engine: NativeEngine):
    with EngineThread(engine, running=2) as sampler:
        futures = {f"{i}": sampler.sample(ask(f"{i}", sampling=Sampling(100, ignore_eos=True))) for i in range(5)}
        until(lambda: sampler.counts()["running"] == 2)
        for id in ("0", "4", "unknown"):
            sampler.cancel(id)
        with pytest.raises(CancelledError):
            futures["0"].result(30)
        assert futures["4"].cancelled()
        assert [len(futures[id].result(60).ids) for id in "123"] == [100] * 3
        sampler.cancel("1")
        assert sampler.counts() == {"open": 0, "waiting": 0, "running": 0, "held": 0}


def test_keys_take_turns(engine: NativeEngine):
    ended: list[str] = []
    with EngineThread(engine, running=1) as sampler:
        first = [sampler.sample(ask(f"a{i}", "a", sampling=Sampling(8, ignore_eos=True))) for i in range(8)]
        other = sampler.sample(ask("b", "b"))
        for future in (*first, other):
            future.add_done_callback(lambda done: ended.append(done.result().request.id))
        for future in (*first, other):
            future.result(30)
    assert ended.index("b") <= 3, ended


def test_a_full_queue_refuses(engine: NativeEngine):
    with EngineThread(engine, running=1, waiting=2) as sampler:
        running = sampler.sample(ask("0", sampling=LONG_ENOUGH))
        until(lambda: sampler.counts()["running"] == 1)
        waiting = [sampler.sample(ask(id)) for id in "12"]
        with pytest.raises(BusyError):
            sampler.sample(ask("3"))
        with pytest.raises(EngineError, match="id is still running"):
            EngineThread.sample(sampler, ask("1"))
        sampler.cancel("0")
        for future in waiting:
            future.result(30)
        assert running.cancelled()


def test_a_request_that_the_engine_refuses_leaves_the_others_alone(engine: NativeEngine):
    with EngineThread(engine) as sampler:
        good = sampler.sample(ask("good"))
        with pytest.raises(EngineError, match="context"):
            sampler.sample(ask("bad", sampling=Sampling(100_000))).result(30)
        good.result(30)


def test_a_failure_reaches_everyone_and_later_requests_are_served(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
):
    with EngineThread(engine, running=2) as sampler:
        monkeypatch.setattr(engine, "_step", lambda: 1 / 0)
        futures = [sampler.sample(ask(f"{i}")) for i in range(2)]
        for future in futures:
            with pytest.raises(EngineError, match="division by zero"):
                future.result(30)
        monkeypatch.undo()
        sampler.sample(ask("again")).result(30)
        assert sampler.counts()["held"] == 0


def test_closing_ends_what_is_open_and_leaves_an_idle_engine(engine: NativeEngine):
    sampler = EngineThread(engine, running=1)
    futures = [sampler.sample(ask(f"{i}", sampling=LONG_ENOUGH)) for i in range(3)]
    until(lambda: sampler.counts()["running"] == 1)
    sampler.close()
    for future in futures:
        with pytest.raises(EngineError, match="closed"):
            future.result(0)
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(ask("late"))
    assert engine.held == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-engine"]
    engine.load(iter(()), 0)  # refused if anything ran
