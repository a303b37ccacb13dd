"""Workers that sample: one that takes the place of a lost one, and is lost itself; how many replies a message has."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.cluster.process_workers import LOST, Failure, Workers
from lockstep.cluster.sampler import TOGETHER, Sampler
from lockstep.cluster.samplers import Samplers
from lockstep.cluster.wire import GIVEN, WEIGHTS, Place
from lockstep.rollout.beside import BesideEngine
from lockstep.sync.compare import RankProof
from lockstep.tasks.base import NoQuestions
from lockstep.types import Completion, FinishReason, Forward, Request, Sampling

PROOF: RankProof = RankProof(*[cast(Any, None)] * 4)


class Dying:
    """Processes of which the sampler's dies once, in one method; the trainer's part of a transfer then fails."""

    timeout = 1.0

    def __init__(self, folder: Path, dies_in: str) -> None:
        self.folder, self.dies_in = folder, dies_in
        self.calls: list[str] = []
        self.trainer_calls: list[str] = []
        self.replaced = 0
        self._asked: dict[int, deque[str]] = defaultdict(deque)

    def replace(self, rank: int) -> None:
        self.replaced += 1

    def start(self, ranks: Sequence[int], method: str, *arguments: object) -> None:
        for rank in ranks:
            self._asked[rank].append(method)

    def results(self, seconds: float, ranks: Collection[int], *, raises: bool = True) -> dict[int, Any]:
        return {rank: self._result(rank, self._asked[rank].popleft()) for rank in ranks}

    def _result(self, rank: int, method: str) -> object:
        if rank == 0:
            self.trainer_calls.append(method)
            if method == "write_weights":
                (self.folder / WEIGHTS).write_text("weights")
            if method == self.dies_in == "exchange":
                return Failure("", "the other end has closed", "", "", 0.0)
            found = {"push": PROOF, "join": "layout"}
            return found.get(method, "weights")
        self.calls.append(method)
        if method == self.dies_in:
            self.dies_in = ""
            self._asked[rank].clear()
            return LOST
        if method == "join":
            return "layout"
        if method == "take" and self.calls[-2:-1] == ["exchange"]:
            return "weights"
        return (self.folder / GIVEN).read_text() if method in ("build", "take") else None


@pytest.mark.parametrize("dies_in", ["build", "engine.set_forward", "take"])
def test_a_worker_that_dies_while_it_replaces_another_is_replaced_too(tmp_path: Path, dies_in: str) -> None:
    processes: Any = Dying(tmp_path, "")
    samplers = Samplers(processes, range(1, 2), Workers(processes, range(1)), "{}")
    samplers.call("engine.set_forward", Forward())
    processes.dies_in, processes.calls = dies_in, []
    samplers.revive(0)
    whole = ["build", "take", "engine.set_forward"]
    assert processes.calls == [*whole[: whole.index(dies_in) + 1], *whole]
    assert processes.replaced == 2
    assert not (tmp_path / GIVEN).exists()


@pytest.mark.parametrize(("dies_in", "sent"), [("", 1), ("join", 1), ("exchange", 2), ("take", 2)])
def test_weights_are_sent_again_if_a_sampler_dies_meanwhile_and_the_trainers_make_one_proof(
    tmp_path: Path, dies_in: str, sent: int
) -> None:
    processes: Any = Dying(tmp_path, dies_in)
    samplers = Samplers(processes, range(1, 2), Workers(processes, range(1)), "{}")
    assert samplers.feed(7) == ([PROOF], ["weights"])
    assert processes.replaced == bool(dies_in)
    assert [processes.trainer_calls.count(method) for method in ("push", "exchange")] == [1, sent]


class Finished:
    """An engine whose requests end at once, and the chat that reads them."""

    def __init__(self) -> None:
        self._done: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._done += [Completion(one, (1,), (-0.5,), FinishReason.LENGTH, 0) for one in requests]

    def completed(self) -> Iterator[Completion]:
        while self._done:
            yield self._done.pop(0)

    def read_many(self, replies: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
        return [("a", "a")] * len(replies)


def test_replies_that_finish_together_come_in_several_messages(tmp_path: Path) -> None:
    sampler: Any = Sampler(Place(0, 1, str(tmp_path), "", 1))
    sampler.engine = engine = Finished()
    sampler._beside = BesideEngine(NoQuestions, engine.read_many)
    requests = [Request(f"p#{n}", (1,), "p", n, Sampling(1), 0) for n in range(TOGETHER + 3)]
    messages = [sampler.sample(asked, 60.0).replies for asked in (requests, [], [])]
    assert [len(replies) for replies in messages] == [TOGETHER, 3, 0]
    assert [one.request_id for replies in messages for one in replies] == [one.id for one in requests]
