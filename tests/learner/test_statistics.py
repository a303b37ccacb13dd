"""What an update reports, by hand over two micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.learner.statistics import UpdateStatistics, combine, quantiles
from lockstep.types import LossInput, LossOutput, Scored


def inputs(logprobs: list[float], rollout: list[float], entropy: list[float]) -> LossInput:
    logprobs_T = torch.tensor(logprobs, requires_grad=True)
    count = len(logprobs)
    return LossInput(
        logprobs_T,
        logprobs_T.detach(),
        torch.tensor(rollout),
        torch.ones(count),
        torch.tensor(entropy),
        torch.zeros(count, dtype=torch.int64),
        1,
    )


def output(kl: list[float], ratio: list[float]) -> LossOutput:
    return LossOutput(torch.zeros(len(kl)), {"kl/ref": torch.tensor(kl)}, {"ratio/max": torch.tensor(ratio)})


def test_means_are_by_token_and_maxima_over_all():
    statistics = UpdateStatistics()
    statistics.add(inputs([-1.0], [-1.5], [4.0]), output([1.0], [3.0]), 0.25, processed=7)
    statistics.add(
        inputs([-1.0, -2.0, -3.0], [-1.0, -2.0, -2.75], [0.0, 1.0, 2.0]),
        output([2.0, 3.0, 6.0], [1.0, 1.5, 0.5]),
        -1.0,
        processed=5,
    )
    metrics = combine(statistics.pieces())
    assert metrics["kl/ref"] == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert metrics["ratio/max"] == 3.0
    assert metrics["entropy/mean"] == pytest.approx(7 / 4)
    assert metrics["entropy/p10"] == pytest.approx(0.3)  # of 0, 1, 2, 4
    assert metrics["entropy/p90"] == pytest.approx(3.4)
    assert metrics["mismatch/mean_abs_dlogp"] == pytest.approx((0.5 + 0.25) / 4)
    assert metrics["mismatch/max_abs_dlogp"] == pytest.approx(0.5)
    assert metrics["mismatch/k1"] == pytest.approx((-0.5 + 0.25) / 4)
    k3 = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.25) - 1 + 0.25)
    assert metrics["mismatch/k3"] == pytest.approx(k3 / 4)
    assert metrics["mismatch/token_mult_prob_error"] == pytest.approx((math.exp(0.5) + 1 + 1 + math.exp(0.25)) / 4)
    up, down = math.exp(0.5), math.exp(-0.25)
    assert metrics["mismatch/max_weight"] == pytest.approx(up)
    assert metrics["mismatch/ess_tokens"] == pytest.approx((up + 2 + down) ** 2 / (4 * (up**2 + 2 + down**2)))
    assert metrics["mismatch/ess_sequences"] == pytest.approx((up + down) ** 2 / (2 * (up**2 + down**2)))
    assert metrics["loss/policy"] == pytest.approx(-0.75), "already weighted: a sum"
    assert metrics["batch/tokens_trained"] == 4
    assert metrics["batch/tokens_processed"] == 12
    assert metrics["batch/microbatches"] == 2
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("order", [(math.nan, 0.5), (0.5, math.nan), (math.nan,)])
def test_a_maximum_with_a_number_that_is_none_is_none(order: tuple[float, ...]) -> None:
    statistics = UpdateStatistics()
    for value in order:
        statistics.add(inputs([-1.0], [value], [1.0]), output([0.0], [value]), 0.0, processed=1)
    metrics = combine(statistics.pieces())
    for name in ("ratio/max", "mismatch/max_abs_dlogp", "mismatch/max_weight"):
        assert math.isnan(metrics[name]), name


def test_the_mismatch_is_that_of_the_old_policy():
    """A later update of a rollout has moved away from it on purpose; that is the ratio's business."""
    statistics = UpdateStatistics()
    later = replace(inputs([-3.0], [-1.5], [1.0]), old_logprobs_T=torch.tensor([-1.0]))
    statistics.add(later, output([0.0], [1.0]), 0.0, processed=1)
    assert combine(statistics.pieces())["mismatch/mean_abs_dlogp"] == pytest.approx(0.5)


def test_without_tokens_there_are_only_counts():
    assert combine(UpdateStatistics().pieces()) == {
        "batch/tokens_trained": 0.0,
        "batch/tokens_processed": 0.0,
        "batch/microbatches": 0.0,
    }


def test_quantiles_are_torchs_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(count, generator=generator) * 5 for count in (1, 2, 3, 10, 11, 1000, 4097)]
    tied = [torch.randint(0, 3, (count,), generator=generator).float() for count in (7, 500)]
    odd = [torch.tensor([-math.inf, 1.0, 2.0]), torch.tensor([1.0, 2.0, math.inf]), torch.full((3,), math.inf)]
    for values_T in (*drawn, *tied, *odd, torch.tensor([1.0, math.nan, 2.0])):
        for shares in ((0.1, 0.9), (0.0, 0.5, 1.0)):
            found_Q = torch.tensor(quantiles(values_T, shares))
            torch.testing.assert_close(
                found_Q, torch.quantile(values_T, torch.tensor(shares)), rtol=0, atol=0, equal_nan=True
            )


def test_what_was_scored_is_stored_by_microbatch():
    statistics = UpdateStatistics()
    for number, values in ((3, [-1.0]), (0, [-2.0, -3.0])):
        statistics.begin(number)
        order = tuple(range(number, number + len(values)))
        one = replace(inputs(values, values, [0.5 - value for value in values]), order=order)
        statistics.add(one, output([0.0] * len(values), [1.0] * len(values)), 0.0, processed=1)
    assert [(piece.number, piece.tokens, piece.scored) for piece in statistics.pieces()] == [
        (3, 1, Scored((3,), floats(-1.0), floats(1.5))),
        (0, 2, Scored((0, 1), floats(-2.0, -3.0), floats(2.5, 3.5))),
    ]


def floats(*values: float) -> bytes:
    return torch.tensor(values).numpy().tobytes()
