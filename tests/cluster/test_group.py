"""The engines of several workers as one: what becomes of requests that nobody waits for any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.cluster.group import GroupEngine
from lockstep.cluster.sampler import SampledReply
from lockstep.types import FinishReason, Request, Sampling
from tests.loops.runs import recipe


class Stub:
    """Two workers that answer each call at once, both together."""

    size = 2
    processes = SimpleNamespace(gpu=False)

    def __init__(self) -> None:
        self.calls: list[list[list[Request]]] = [[], []]
        self.dropped = 0

    def start(self, ranks: list[int], method: str, requests: list[Request], seconds: float) -> None:
        (rank,) = ranks
        self.calls[rank].append(requests)

    def results(self, seconds: float) -> dict[int, Any]:
        found = {rank: calls.pop(0) for rank, calls in enumerate(self.calls) if calls}
        assert found, "no call is under way"
        return {rank: [_reply(one) for one in requests] for rank, requests in found.items()}

    def call(self, method: str) -> list[None]:
        self.dropped += 1
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
