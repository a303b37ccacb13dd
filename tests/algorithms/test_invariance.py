"""However a batch is split, packed, ordered and spread over ranks: the gradient of the whole update is the same within 1e-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.algorithms.build import Objective, build_objective
from lockstep.config.schema import Recipe
from lockstep.types import Batch, TrainSequence
from tests.algorithms.ragged import recipe
from tests.learner.batches import learner_gradients, make_batch, plain_gradients, plain_inputs
from tests.learner.models import tokens, twin, wide

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"kind": "clip"},
    "gspo": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"kind": "cispo", "weight_cap": 1.2},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "tis sequence": {"kind": "tis", "level": "sequence", "cap": 2.0},
    "mis geometric": {"kind": "mis", "level": "geometric", "low": 0.9, "high": 1.1},
}
KL_COEF = 0.05


def recipe_of(mode: str, loss: str, correction: str, **update: Any) -> Recipe:
    parts = {"loss": LOSSES[loss], "correction": CORRECTIONS[correction], "aggregation": mode}
    return recipe(
        parts | {"kl": {"coef": KL_COEF}, "entropy_coef": 0.01}, update=update, optimizer={"kind": "adamw", "lr": 0.0}
    )


@cache
def llama() -> nn.Module:
    return wide("llama")


@cache
def sequences() -> tuple[TrainSequence, ...]:
    """Ten sequences in four groups near the model's own probabilities, one without a trained token, and a group without any."""
    generator = torch.Generator().manual_seed(1)

    def near(sequence: TrainSequence, spread: float) -> TrainSequence:
        everything = replace(sequence, trained=(True,) * len(sequence.ids), old_logprobs=None, ref_logprobs=None)
        own = plain_inputs(llama(), everything, 1.0).logprobs_T.detach()

        def noisy(center: Tensor) -> Tensor:
            return center + spread * torch.randn(len(center), generator=generator, dtype=torch.float64)

        old, ref = noisy(own), noisy(own)
        columns = (tuple(column.tolist()) for column in (noisy(old), old, ref))
        rollout_logprobs, old_logprobs, ref_logprobs = columns
        return replace(
            sequence, rollout_logprobs=rollout_logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs
        )

    live = [near(sequence, 0.2) for sequence in make_batch().sequences]
    silent = [replace(s, trained=(False,) * len(s.ids)) for s in (live[1], replace(live[4], group=9))]
    return (*live[:1], silent[0], *live[2:], replace(silent[1], prompt_ids=tokens(7, 300)))


def weighed(order: Sequence[TrainSequence], objective: Objective) -> tuple[TrainSequence, ...]:
    """Weights are those of the whole batch, whatever it is split into later."""
    weights = objective.weights([sum(s.trained) for s in order], [s.group for s in order])
    return tuple(replace(s, weight=weight) for s, weight in zip(order, weights, strict=True))


@cache
def expected(mode: str, loss: str, correction: str) -> dict[str, Tensor]:
    """One sequence at a time through transformers and autograd: no packing, no micro-batches, no ranks."""
    objective = build_objective(recipe_of(mode, loss, correction))
    batch = Batch(weighed(sequences(), objective), kl_coef=KL_COEF)
    return plain_gradients(llama(), batch, objective.loss)[1]


@given(
    mode=st.sampled_from(MODES),
    loss=st.sampled_from(sorted(LOSSES)),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    order=st.permutations(range(len(make_batch().sequences) + 1)),
    cuts=st.lists(st.integers(0, 11), max_size=3),
    budget=st.sampled_from([1, 9, 30, 60, 10_000]),
    share=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_gradient_does_not_depend_on_the_split(
    mode: str, loss: str, correction: str, order: list[int], cuts: list[int], budget: int, share: bool
):
    """`cuts` part the batch among up to four ranks, some of which may have nothing; their gradients are added."""
    given_recipe = recipe_of(mode, loss, correction, tokens_per_microbatch=budget, share_prompts=share)
    objective = build_objective(given_recipe)
    whole = weighed([sequences()[i] for i in order], objective)
    bounds = [0, *sorted(cuts), len(whole)]
    total: dict[str, Tensor] = {}
    for start, end in pairwise(bounds):
        if start == end:
            continue
        part = Batch(whole[start:end], kl_coef=KL_COEF)
        _, gradients = learner_gradients(twin(llama()), part, objective.loss, given_recipe)
        total = {name: total[name] + grad if total else grad for name, grad in gradients.items()}
    theirs = expected(mode, loss, correction)
    assert total.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        assert scale > 0
        assert float((total[name] - gradient).abs().max()) < 1e-10 * max(1.0, scale), name


@pytest.mark.parametrize("mode", MODES)
def test_dividing_each_part_by_its_own_counts_would_be_seen(mode: str):
    """The mistake that the test above is for: weights of the parts instead of the whole give another gradient."""
    given_recipe = recipe_of(mode, "clip", "none", tokens_per_microbatch=10_000)
    objective = build_objective(given_recipe)
    total: dict[str, Tensor] = {}
    for part in (sequences()[:3], sequences()[3:]):
        batch = Batch(weighed(part, objective), kl_coef=KL_COEF)
        _, gradients = learner_gradients(twin(llama()), batch, objective.loss, given_recipe)
        total = {name: total[name] + grad / 2 if total else grad / 2 for name, grad in gradients.items()}
    theirs = expected(mode, "clip", "none")
    assert max(float((total[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items()) > 1e-2
