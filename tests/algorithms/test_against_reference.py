"""Each piece against the loops of `reference.py` on 50 random ragged batches, 200 in make test-all: values to 1e-10, gradients by
differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.algorithms.build import Objective, build_objective
from tests.algorithms import reference as ref
from tests.algorithms.ragged import MAX_TOKENS, Ragged, batches, loss_input, moved, recipe
from tests.algorithms.reference import PolicyLoss, Row, Token

STEP = 1e-5
Weights = Callable[[Sequence[Token]], Row]
random_batches = settings(max_examples=2 * settings().max_examples, suppress_health_check=list(HealthCheck))

REINFORCE: dict[str, Any] = {"kind": "reinforce"}
LOSSES: dict[str, tuple[dict[str, Any], PolicyLoss]] = {
    "clip": ({"kind": "clip", "clip_low": 0.2, "clip_high": 0.2}, partial(ref.clip_loss, low=0.2, high=0.2)),
    "clip higher": ({"kind": "clip", "clip_low": 0.2, "clip_high": 0.28}, partial(ref.clip_loss, low=0.2, high=0.28)),
    "dual clip": (
        {"kind": "clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
        partial(ref.clip_loss, low=0.1, high=0.3, dual=3.0),
    ),
    "tight dual clip": ({"kind": "clip", "dual_clip": 1.1}, partial(ref.clip_loss, low=0.2, high=0.2, dual=1.1)),
    "gspo": ({"kind": "gspo"}, partial(ref.gspo_loss, low=3e-4, high=4e-4)),
    "wide gspo": ({"kind": "gspo", "clip_low": 0.3, "clip_high": 0.6}, partial(ref.gspo_loss, low=0.3, high=0.6)),
    "cispo": ({"kind": "cispo"}, partial(ref.cispo_loss, floor=0.0, cap=5.0)),
    "cispo with a floor": (
        {"kind": "cispo", "weight_floor": 0.8, "weight_cap": 1.2},
        partial(ref.cispo_loss, floor=0.8, cap=1.2),
    ),
    "reinforce": (REINFORCE, ref.reinforce_loss),
}
CORRECTIONS: dict[str, tuple[dict[str, Any], Weights | None]] = {
    "none": ({"kind": "none"}, None),
    **{
        f"tis {level} {cap:g}": (
            {"kind": "tis", "level": level, "cap": cap},
            partial(ref.truncated, level=level, cap=cap),
        )
        for level, cap in [("token", 2.0), ("sequence", 2.0), ("sequence", 1.0), ("geometric", 1.05)]
    },
    **{
        f"mis {level}{'' if weigh else ' mask only'}": (
            {"kind": "mis", "level": level, "low": low, "high": high, "weigh": weigh},
            partial(ref.masked, level=level, low=low, high=high, weigh=weigh),
        )
        for level, low, high in [("token", 0.5, 5.0), ("sequence", 0.2, 4.0), ("geometric", 0.95, 1.1)]
        for weigh in (True, False)
    },
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")


@cache
def _objective(parts: tuple[tuple[str, Any], ...]) -> Objective:
    return build_objective(recipe({key: dict(value) if isinstance(value, tuple) else value for key, value in parts}))


def objective(**parts: Any) -> Objective:
    """Built once for each set of parts: a loss has no state."""
    frozen = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in parts.items()}
    return _objective(tuple(frozen.items()))


def close(expected: Sequence[float], tolerance: float) -> Any:
    return pytest.approx(list(expected), rel=tolerance, abs=tolerance)


def agree(found: Objective, batch: Ragged, expected: Callable[[Sequence[Token]], Row], kl_coef: float = 0.0) -> None:
    """Per-token losses to 1e-10; their gradients to 1e-6 and the rounding of a difference of such losses.

    Where the loss has a kink, within a step of the token, its gradient must lie between both slopes.
    """
    inputs = loss_input(batch.rows, kl_coef)
    loss_T = found.loss(inputs).loss_T
    assert loss_T.detach().tolist() == close([x for row in batch.rows for x in expected(row)], 1e-10)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), inputs.logprobs_T)
    slopes = [slope for row in batch.rows for slope in differences(row, expected)]
    for gradient, value, (down, central, up) in zip(gradient_T.tolist(), loss_T.tolist(), slopes, strict=True):
        rounding = 1e-10 * abs(value)
        if abs(up - down) < 1e-6 + 1e-4 * abs(central) + rounding:
            assert gradient == pytest.approx(central, rel=1e-6, abs=1e-6 + rounding)
        else:
            slack = 1e-6 + 1e-4 * max(abs(down), abs(up)) + rounding
            assert min(down, up) - slack <= gradient <= max(down, up) + slack


def differences(row: Sequence[Token], loss: Callable[[Sequence[Token]], Row]) -> list[tuple[float, float, float]]:
    """Backward, central and forward difference of each token's loss in its own log π_θ."""
    here, found = loss(row), []
    for place in range(len(row)):
        low, high = (loss(moved(row, place, step))[place] for step in (-STEP, STEP))
        found.append(((here[place] - low) / STEP, (high - low) / (2 * STEP), (high - here[place]) / STEP))
    return found


# --- losses and corrections -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LOSSES)
@given(batch=batches())
@random_batches
def test_every_loss(name: str, batch: Ragged):
    given_loss, expected = LOSSES[name]
    agree(objective(loss=given_loss), batch, expected)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
@given(batch=batches())
@random_batches
def test_every_correction(name: str, batch: Ragged):
    correction, weights = CORRECTIONS[name]
    agree(
        objective(loss=REINFORCE, correction=correction),
        batch,
        partial(ref.total_loss, policy=ref.reinforce_loss, weights=weights),
    )


@given(batch=batches())
@random_batches
def test_two_policies_take_the_ratio_to_the_engine(batch: Ragged):
    def against_rollout(row: Sequence[Token]) -> Row:
        return ref.clip_loss([ref.Token(**{**_fields(t), "old": t.rollout}) for t in row], low=0.2, high=0.2)

    agree(objective(old_logprobs="rollout", loss={"kind": "clip"}), batch, against_rollout)


def _fields(token: Token) -> dict[str, float]:
    return {name: getattr(token, name) for name in token.__dataclass_fields__}


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(batch=batches(), coef=st.sampled_from([0.001, 0.3]))
@random_batches
def test_every_divergence_in_the_loss(estimator: str, batch: Ragged, coef: float):
    found = objective(loss=REINFORCE, kl={"coef": 0.05, "estimator": estimator})
    expected = partial(ref.total_loss, policy=ref.reinforce_loss, weights=None, kl_coef=coef, estimator=estimator)
    agree(found, batch, expected, coef)


@given(
    batch=batches(),
    loss=st.sampled_from(sorted(LOSSES)),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    estimator=st.sampled_from(["k2", "k3"]),
    mode=st.sampled_from(MODES),
)
@random_batches
def test_everything_together(batch: Ragged, loss: str, correction: str, estimator: str, mode: str):
    """Any loss with any correction, a penalty, an entropy bonus and any mean."""
    (given_loss, policy), (given_correction, weights) = LOSSES[loss], CORRECTIONS[correction]
    kl = {"coef": 0.1, "estimator": estimator}
    found = objective(loss=given_loss, correction=given_correction, kl=kl, entropy_coef=0.01, aggregation=mode)
    expected = partial(
        ref.total_loss, policy=policy, weights=weights, kl_coef=0.1, estimator=estimator, entropy_coef=0.01
    )
    agree(found, batch, expected, 0.1)
    weight_N = found.weights(batch.lengths, batch.prompts)
    loss_T = found.loss(loss_input(batch.rows, 0.1)).loss_T.tolist()
    each = [weight for weight, row in zip(weight_N, batch.rows, strict=True) for _ in row]
    total = math.fsum(weight * value for weight, value in zip(each, loss_T, strict=True))
    whole = ref.aggregate([expected(row) for row in batch.rows], batch.prompts, mode, MAX_TOKENS)
    assert total == pytest.approx(whole, rel=1e-10, abs=1e-10)


@given(batch=batches())
@random_batches
def test_the_token_form_of_gspo_has_the_gradient_of_its_sequence_form(batch: Ragged):
    """Equation 5's gradient by differences, no stop-gradient in it, against token means of ours. Ratios below exp(±19)."""
    rows = [[ref.Token(**{**_fields(t), "advantage": row[0].advantage}) for t in row] for row in batch.rows]
    inputs = loss_input(rows)
    loss_T = objective(loss=LOSSES["wide gspo"][0]).loss(inputs).loss_T
    weight_T = torch.tensor([1 / len(row) for row in rows for _ in row], dtype=torch.float64)
    (gradient_T,) = torch.autograd.grad((weight_T * loss_T).sum(), inputs.logprobs_T)
    whole = partial(ref.gspo_sequence_objective, low=0.3, high=0.6)
    place = 0
    for row in rows:
        if row and abs(sum(t.logp - t.old for t in row)) > 19 * len(row):
            place += len(row)
            continue
        for number in range(len(row)):
            low, here, high = (whole(moved(row, number, step)) for step in (-STEP, 0.0, STEP))
            if abs((high - here) - (here - low)) < 1e-9 * (1 + abs(here)):
                assert float(gradient_T[place]) == pytest.approx(-(high - low) / (2 * STEP), rel=1e-6, abs=1e-6)
            place += 1
