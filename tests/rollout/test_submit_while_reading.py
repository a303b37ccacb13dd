"""Requests that arrive while completions are being read, as episodes of several turns make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.rollout.paged.state import PAGE
from lockstep.types import Completion, Request, Sampling
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import request, spelled

Make = Callable[[nn.Module, int], NativeEngine | PagedEngine]


def make(kind: type) -> Make:
    def over(model: nn.Module, slots: int) -> NativeEngine | PagedEngine:
        engine: NativeEngine | PagedEngine = kind(model, slots=slots, stop_ids=frozenset(), decode=spelled)
        engine.load(iter(()), 0)
        return engine

    return over


def first(name: int, budget: int = 6) -> list[Request]:
    ids = tokens(10 + 7 * name, name)
    return [
        request(f"{name}/{i}", ids, Sampling(budget, ignore_eos=True), group=str(name), seed=10 * name + i)
        for i in range(3)
    ]


def after(done: Completion, budget: int) -> Request:
    """A longer prompt than any before: the completion, and more said after it."""
    ids = (*done.request.prompt_ids, *done.ids, *tokens(5 * PAGE, 99))
    return request(f"{done.request.id}+", ids, Sampling(budget, ignore_eos=True), seed=done.request.seed + 1)


def alone(over: Make, model: nn.Module, asked: Request) -> Completion:
    engine = over(model, 4)
    engine.submit([asked])
    (done,) = engine.completed()
    return done


@pytest.mark.parametrize("kind", [NativeEngine, PagedEngine])
@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize("between", [False, True])
def test_what_arrives_later_is_sampled_as_if_it_were_alone(kind: type, slots: int, between: bool) -> None:
    """With fewer slots than requests, a prompt that waits for its next samples loses its pages when larger ones are taken."""
    model, over = twin(plain("llama")), make(kind)
    engine = over(model, slots)
    done: dict[str, Completion] = {}
    later: list[Request] = []

    def submit_later() -> None:
        engine.submit([later.pop() for _ in range(len(later))])

    later += [one for name in range(3) for one in first(name)]
    while later:
        submit_later()
        for completion in engine.completed(submit_later if between else None):
            done[completion.request.id] = completion
            if "+" not in completion.request.id:
                later.append(after(completion, 20))
                if not between:
                    submit_later()
    assert len(done) == 18
    for completion in done.values():
        expected = alone(over, model, completion.request)
        assert completion.ids == expected.ids
        if kind is NativeEngine:
            assert completion.logprobs == expected.logprobs


def test_a_sequence_longer_than_the_rows_waits_for_larger_ones(tiny_model_dir: Path) -> None:
    """It comes while a short one runs, whose table of pages has no place for it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=NAME)
    over = make(PagedEngine)
    engine = over(model, 4)
    (short,) = first(0, budget=40)[:1]
    long = request("long", tokens(20 * PAGE, 5), Sampling(4, ignore_eos=True))
    arriving = [long]

    def arrive() -> None:
        if arriving:
            engine.submit([arriving.pop()])

    engine.submit([short])
    done = {completion.request.id: completion for completion in engine.completed(arrive)}
    assert done["long"].ids == alone(over, model, long).ids
    assert done[short.id].ids == alone(over, model, short).ids
