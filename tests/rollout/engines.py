"""Engines over tiny models, and shorthand for what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from lockstep.rollout.native import NativeEngine
from lockstep.types import Completion, Request, Sampling, TokenIds


def spelled(ids: Sequence[int]) -> str:
    """A text of which each token is a part: 7, 12 → "007,012,"."""
    return "".join(f"{token:03d}," for token in ids)


def engine_over(
    model: nn.Module,
    slots: int = 4,
    stop_ids: Iterable[int] = (),
    decode: Callable[[Sequence[int]], str] = spelled,
) -> NativeEngine:
    """An engine of version 0."""
    engine = NativeEngine(model, slots=slots, stop_ids=frozenset(stop_ids), decode=decode)
    engine.load(iter(()), 0)
    return engine


def request(
    id: str,
    prompt: TokenIds,
    sampling: Sampling,
    *,
    group: str | None = None,
    seed: int = 0,
    version: int = 0,
    prefix: int = 0,
) -> Request:
    return Request(id, prompt, group or id, seed, sampling, version, prefix)


def finish(engine: NativeEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    """Submit everything and read to the end; every request must be answered once."""
    engine.submit(requests)
    done = list(engine.completed())
    by_id = {completion.request.id: completion for completion in done}
    assert len(by_id) == len(done)
    assert set(by_id) == {r.id for r in requests}
    return by_id
