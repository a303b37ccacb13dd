"""After a failure, an engine has nothing of what it was doing: no half samples, no keys of others, no old replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from lockstep.errors import EngineError
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.types import Completion, Forward, NormNoise, Request, Sampling
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import engine_over, spelled

Engine: TypeAlias = NativeEngine | PagedEngine


def native(model: nn.Module) -> NativeEngine:
    return engine_over(model, 4)


def paged(model: nn.Module) -> PagedEngine:
    engine = PagedEngine(model, slots=4, stop_ids=frozenset(), decode=spelled)
    engine.load(iter(()), 0)
    return engine


BOTH = pytest.mark.parametrize("make", [native, paged])


def asked(tag: str, first: int, count: int = 3) -> list[Request]:
    return [Request(f"{tag}{i}", tokens(10, first + i), f"{tag}{i}", first + i, Sampling(6), 0) for i in range(count)]


def answers(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    return {completion.request.id: completion for completion in engine.completed()}


def failing_once(owner: Any, name: str, after: int = 0) -> None:
    """The next call of owner.name but `after` runs out of memory."""
    real, calls = getattr(owner, name), [0]

    def run(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] <= after:
            return real(*given)
        setattr(owner, name, real)
        raise torch.OutOfMemoryError("made up")

    setattr(owner, name, run)


@BOTH
def test_a_prompt_that_found_no_memory_is_answered_with_nothing_of_an_earlier_rollout(
    make: Callable[[nn.Module], Engine],
) -> None:
    model = twin(plain("llama"))
    engine, right = make(model), answers(make(model), asked("new", 50))
    answers(engine, asked("old", 10))
    failing_once(*((engine._prefill, "_stream") if isinstance(engine, PagedEngine) else (engine, "_forward")))
    engine.submit(asked("new", 50))
    with pytest.raises(torch.OutOfMemoryError):
        list(engine.completed())
    assert list(engine.completed()) == []  # forgotten, not half done
    assert answers(engine, asked("new", 50)) == right


def test_a_score_that_failed_leaves_no_row_at_work() -> None:
    """Its rows would write their keys into the pages of the next rollout."""
    model = twin(plain("llama"))
    engine, right = paged(model), answers(paged(model), asked("new", 50, 2))
    failing_once(engine._step, "forward", after=1)
    with pytest.raises(torch.OutOfMemoryError):
        engine.score([tokens(30, i) for i in range(4)])
    assert answers(engine, asked("new", 50, 2)) == right


def test_a_reservation_that_failed_takes_its_requests_with_it() -> None:
    engine = paged(twin(plain("llama")))
    failing_once(engine._cache, "allocate")
    with pytest.raises(torch.OutOfMemoryError):
        engine.submit(asked("new", 50))
    engine.load(iter(()), 0)  # nothing is queued
    assert len(answers(engine, asked("new", 50))) == 3


@BOTH
def test_replies_that_nobody_took_hold_up_new_weights(make: Callable[[nn.Module], Engine]) -> None:
    engine = make(twin(plain("llama")))
    engine.submit(asked("old", 10))
    next(engine.completed())
    with pytest.raises(EngineError, match="cannot be loaded while 2 requests run"):
        engine.load(iter(()), 1)
    engine.close()
    engine.load(iter(()), 1)


def test_noise_that_is_refused_leaves_no_prefix_of_the_noise_before() -> None:
    prompt = Request("a", tokens(30, 1), "a", 5, Sampling(8), 0, 20)
    right = answers(native(twin(plain("llama"))), [prompt])
    engine = native(twin(plain("llama")))
    norms = tuple(name for name, _ in engine.weights() if "norm" in name)
    engine.set_forward(Forward("", NormNoise(0.5, 1, norms, (1.0,) * len(norms))))
    assert answers(engine, [prompt]) != right
    with pytest.raises(EngineError):
        engine.set_forward(Forward("", NormNoise(0.5, 1, ("no.such.norm",), (1.0,))))
    assert engine.forward == Forward()
    assert answers(engine, [prompt]) == right


@BOTH
def test_a_sequence_that_is_no_number_does_not_live_on_in_its_place(make: Callable[[nn.Module], Engine]) -> None:
    model = twin(plain("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[299] = torch.nan  # type: ignore[operator, union-attr]
    good = [Request("g", tokens(20, 1, high=299), "g", 5, Sampling(12), 0)]
    right = answers(make(model), good)
    engine = make(model)
    bad = (*tokens(20, 2, high=298)[:-1], 299)
    answers(engine, [Request("bad", bad, "bad", 5, Sampling(12), 0)])
    assert answers(engine, good) == right
