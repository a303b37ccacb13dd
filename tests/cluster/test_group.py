"""The engines of several workers as one: what becomes of requests that nobody waits for any more, and of results that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.build.parts import Meanwhile
from lockstep.cluster.group import GroupLearner
from lockstep.cluster.group_engine import GroupEngine
from lockstep.cluster.process_workers import LOST, Workers
from lockstep.errors import EngineError, StaleWeightsError
from lockstep.learner.packing import as_sequence
from lockstep.learner.protocol import Share
from lockstep.rollout.beside import Found, GradedReply, SampledReply
from lockstep.types import Batch, FinishReason, Grade, LearnerFacts, Request, Sampling
from tests.loops.runs import recipe


class Stub:
    """Two workers that answer each call at once, both together. A grade comes with the answer after that with the reply, and
    worker r waited r + 1 seconds for it.
    """

    size = 2
    processes = SimpleNamespace(gpu=False)

    def __init__(self) -> None:
        self.calls: list[list[list[Request]]] = [[], []]
        self.dropped = 0
        self.sent: list[list[Request]] = []
        self.rank_of: dict[str, int] = {}
        self.methods: list[list[str]] = [[], []]
        """Those of the calls under way."""
        self.asked: list[list[str]] = [[], []]
        self.grades: list[list[GradedReply]] = [[], []]
        self.lost: set[int] = set()
        """Workers whose next answer is that they are lost."""
        self.withdraw: Callable[[], None] | None = None

    def start(self, ranks: list[int], method: str, requests: Sequence[Request] = (), seconds: float = 0.0) -> None:
        (rank,) = ranks
        self.calls[rank].append([*requests])
        self.sent += [[*requests]] if requests else []
        self.rank_of |= {request.id: rank for request in requests}
        self.methods[rank].append(method)
        self.asked[rank].append(method)

    begin = start

    def take_early(self) -> None:
        pass

    def results(self, seconds: float) -> dict[int, Any]:
        found = {rank: calls.pop(0) for rank, calls in enumerate(self.calls) if calls}
        assert found, "no call is under way"
        return {rank: self.answer(rank, requests) for rank, requests in found.items()}

    def answer(self, rank: int, requests: Sequence[Request]) -> Any:
        if rank in self.lost:
            self.calls[rank].clear()
            self.grades[rank].clear()
            return LOST
        if self.methods[rank].pop(0) == "prepare_grader":
            return None
        grades, graded = self.grades[rank], (Grade(1.0), 0.5, rank + 1.0)
        self.grades[rank] = [GradedReply(one.id, graded) for one in requests if one.graded]
        return Found([_reply(one) for one in requests], grades)

    def revive(self, rank: int) -> None:
        self.lost.discard(rank)
        self.methods[rank].clear()

    def call(self, method: str) -> list[None]:
        self.dropped += 1
        self.grades = [[], []]
        return [None, None]


def _reply(request: Request) -> SampledReply:
    return SampledReply(request.id, (1,), (-0.5,), FinishReason.STOP, 0, ("a", "a"), b"route")


def test_an_engine_can_be_closed_between_two_completions(tmp_path: Path, tiny_model_dir: Path) -> None:
    stub: Any = Stub()
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir))
    engine.load(iter(()), 0)
    requests = [Request(f"task/{i}#0", (3, i), f"task/{i}", i, Sampling(4), 0) for i in range(4)]
    engine.submit(requests)
    first = next(engine.completed())
    assert (first.request, first.routes) == (requests[0], b"route")
    engine.close()
    assert stub.dropped == 1
    engine.submit(requests)
    assert sorted(one.request.id for one in engine.completed()) == [one.id for one in requests]


def test_a_later_turn_goes_where_the_first_went(tmp_path: Path, tiny_model_dir: Path) -> None:
    """That worker has the keys and values, also when all episodes have waited for their environments at the same time."""
    stub: Any = Stub()
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir))
    engine.load(iter(()), 0)
    for turn in ("", "/1", "/2"):
        for number in (2, 1, 0) if turn else (0, 1, 2):  # environments answer in another order, one by one
            engine.submit([Request(f"task/{number}#0{turn}", (3,), "", 0, Sampling(4), 0, keep=True)])
            assert len(list(engine.completed())) == 1
    assert [stub.rank_of[f"task/{number}#0{turn}"] for turn in ("", "/1", "/2") for number in range(3)] == [0, 1, 0] * 3


def test_what_grading_adds_is_what_the_slowest_worker_waits(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A worker's grader is built by a call of its own, once: it may take longer than any other call."""
    stub: Any = Stub()
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir))
    engine.load(iter(()), 0)
    asked = Request("", (3,), "", 0, Sampling(4), 0, graded="question")
    for step in range(2):
        engine.submit([replace(asked, id=f"task/{step}{i}#0") for i in range(4)])
        found = [one.graded for one in engine.completed()]
        assert [one[:2] for one in found if one] == [(Grade(1.0), 0.5)] * 4
        assert sum(one[2] for one in found if one) == 4.0
    assert [one.count("prepare_grader") for one in stub.asked] == [1, 1]
    assert [one[0] for one in stub.asked] == ["prepare_grader"] * 2


def test_replies_without_a_grade_are_sampled_again_if_their_worker_is_lost(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    stub: Any = Stub()
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir))
    engine.load(iter(()), 0)
    requests = [Request(f"task/{i}#0", (3,), f"task/{i}", i, Sampling(4), 0, graded="question") for i in range(4)]
    engine.submit(requests)
    losses: list[int] = []

    def lose() -> None:
        if stub.grades[1] and not losses:
            losses.append(1)
            stub.lost.add(1)

    ended = [*engine.completed(lose)]
    assert sorted(one.request.id for one in ended) == [one.id for one in requests]
    assert all(one.graded and one.read == ("a", "a") for one in ended)
    assert [sum(one.id == f"task/{i}#0" for sent in stub.sent for one in sent) for i in range(4)] == [1, 2, 1, 2]
    assert stub.asked[1].count("prepare_grader") == 2


@pytest.mark.parametrize("then", ["the same", "others", "another call first"])
def test_workers_sample_what_was_begun_and_drop_it_if_something_else_comes(
    then: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    stub: Any = Stub()
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir))
    engine.load(iter(()), 0)
    requests = [Request(f"task/{i}#0", (3,), f"task/{i}", i, Sampling(4), 1, graded="question") for i in range(4)]
    engine.begin([replace(one) for one in requests])
    assert [[one.id for one in sent] for sent in stub.sent] == [["task/0#0", "task/2#0"], ["task/1#0", "task/3#0"]]
    with pytest.raises(StaleWeightsError):  # the weights are not there yet
        engine.submit(requests)
    engine.load(iter(()), 1)
    if then == "another call first":
        stub.withdraw()
    if then == "others":
        requests = [replace(one, seed=one.seed + 9) for one in requests]
    assert (stub.withdraw is None) == (then == "another call first")
    engine.submit(requests)
    assert stub.withdraw is None
    found = list(engine.completed())
    assert {one.request.id: one.request for one in found} == {one.id: one for one in requests}
    assert len(found) == 4
    assert stub.dropped == (0 if then == "the same" else 1)


def test_the_driver_works_while_workers_update() -> None:
    order: list[str] = []

    class Busy:
        size = 2

        def start(self, ranks: range, method: str, *arguments: object) -> None:
            order.append(f"start {method}")

        def collect(self, ranks: range, method: str, *arguments: object) -> list[Any]:
            raise EngineError("the worker stops here", fix="nothing")

    meanwhile, workers = Meanwhile(), Busy()
    learner = GroupLearner(cast(Any, workers), LearnerFacts("cpu", (), "", 1, 16, False), meanwhile)
    results = [meanwhile.later(lambda name=name: order.append(name) or name) for name in ("first", "second")]
    for _ in range(2):  # of several updates in a step
        with pytest.raises(EngineError, match="stops here"):
            learner.update(Batch(()), cast(Any, None))
    assert [result() for result in results] == ["first", "second"]
    started = ["start learner.begin_update", "start learner.finish_update"]
    assert order == [*started, "first", "second", *started]
    third, unread = (meanwhile.later(lambda name=name: order.append(name) or name) for name in ("third", "unread"))
    meanwhile.drop()
    meanwhile.do()
    assert [third(), order[6:]] == ["third", ["third"]]
    assert unread() == "unread"


def test_each_worker_gets_the_sequences_of_its_own_microbatches() -> None:
    calls: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(4)}

    class Training:
        size = 4

        def start(self, ranks: Sequence[int], method: str, *arguments: Any) -> None:
            for rank in ranks:
                calls[rank].append((method, *arguments))

        def collect(self, ranks: range, method: str, *arguments: object) -> list[Any]:
            assert [calls[rank].pop(0)[0] for rank in ranks] == [method] * 4
            return [Share((), 1.0, False, 0, 0.1, 0) for _ in ranks]

    sequences = tuple(as_sequence((1, 2, 3, 4, number), number) for number in range(11))
    learner = GroupLearner(cast(Any, Training()), LearnerFacts("cpu", (), "", 1, 9, False), Meanwhile())
    sent: list[list[tuple[Any, ...]]] = []
    learner._meanwhile.later(lambda: sent.extend(map(list, calls.values())))
    learner.update(Batch(sequences, 0.5), cast(Any, None))
    assert not any(calls.values())  # all were answered
    places: list[int] = []
    for rank, (begun, *rounds, finished) in enumerate(sent):
        assert [begun, finished] == [("learner.begin_update",), ("learner.finish_update",)]
        for turn, (method, batch, own, number, dealt) in enumerate(rounds):
            assert [method, number, batch.temperature] == ["train", 4 * turn + rank, 0.5]
            assert [one.ids for one in batch.sequences] == [sequences[place].ids for place in own]
            assert dealt == (2 if turn == 1 else 4)
            places += own
    assert sorted(places) == list(range(11))
    assert {len(one) for one in sent} == {2 + 2}  # two sequences fit a micro-batch
    assert [bool(one[-2][2]) for one in sent] == [True, True, False, False]  # the last round


def test_a_worker_that_has_room_gets_more_than_it_has_rows(tmp_path: Path, tiny_model_dir: Path) -> None:
    stub: Any = Stub()
    words = ("rollout.deal=queue", "rollout.slots=4", "prompts_per_step=8", "samples_per_prompt=2")
    engine = GroupEngine(stub, recipe(tmp_path, tiny_model_dir, *words))
    engine.load(iter(()), 0)
    engine.submit(
        [Request(f"task/{i // 2}#{i % 2}", (3, i // 2), f"task/{i // 2}", i, Sampling(4), 0) for i in range(16)]
    )
    first = next(engine.completed())
    assert first.request.id == "task/0#0"
    assert [len(sent) for sent in stub.sent[:2]] == [6, 6]  # whole prompts, up to a quarter more


def test_a_worker_that_is_ahead_keeps_its_next_result_for_the_next_call() -> None:
    ready: dict[int, list[str]] = {0: ["first of 0", "second of 0"], 1: []}

    def results(seconds: float, ranks: list[int]) -> dict[int, str]:
        found = {rank: ready[rank].pop(0) for rank in ranks if ready[rank]}
        ready[1] = ready[1] or ["first of 1", "second of 1"]  # it is slow
        return found

    processes: Any = SimpleNamespace(results=results, timeout=1.0, folder=Path())
    workers = Workers(processes, range(2))
    assert workers.collect(range(2), "train") == ["first of 0", "first of 1"]
    assert workers.collect(range(2), "learner.finish_update") == ["second of 0", "second of 1"]


def test_a_call_that_was_made_ahead_is_not_made_again() -> None:
    under_way: list[list[str]] = [[], []]
    started: list[str] = []

    def start(ranks: range, method: str, *arguments: object) -> None:
        started.append(method)
        for rank in ranks:
            under_way[rank].append(f"{method} {len(started)} of {rank}")

    def results(seconds: float, ranks: list[int]) -> dict[int, str]:
        return {rank: under_way[rank].pop(0) for rank in ranks}

    processes: Any = SimpleNamespace(start=start, results=results, timeout=1.0, folder=Path())
    workers = Workers(processes, range(2))
    workers.call_ahead("push")
    assert workers.call("push") == ["push 1 of 0", "push 1 of 1"]
    assert workers.call("push") == ["push 2 of 0", "push 2 of 1"]
    workers.call_ahead("push")
    assert workers.call_one(1, "held") == "held 4 of 1"
    assert workers.call("verify") == ["verify 5 of 0", "verify 5 of 1"]
    assert workers.call("push") == ["push 3 of 0", "push 3 of 1"]
    assert started == ["push", "push", "push", "held", "verify"]
    for first in (6, 9):  # nobody asks for the second of these
        for method in ("push", "refresh"):
            workers.call_ahead(method)
        assert workers.call("push") == [f"push {first} of 0", f"push {first} of 1"]
        assert workers.call_one(0, "held") == f"held {first + 2} of 0"
    assert under_way == [[], []]
