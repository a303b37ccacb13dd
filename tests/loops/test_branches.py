"""Training on episodes of several rows: weights, credit and gradient are those of one sample per episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe
from lockstep.health.spikes import _rollout_of
from lockstep.loops.advantages import advantage_rows, make_batch, with_advantages
from lockstep.loops.step_metrics import rollout_metrics
from lockstep.loops.update import make_batches
from lockstep.types import Batch, Branch, FinishReason, Grade, Group, Prompt, Rollout
from tests.learner.batches import learner_gradients
from tests.learner.models import tokens, twin, wide

PROMPT = Prompt("p", (), "")
OPENING = tokens(6, 1)


def row(prompt: tuple[int, ...], count: int, seed: int, observed: int = 0) -> Branch:
    trained = tuple(observed == 0 or place % 4 != 1 for place in range(count))
    logprobs = tuple((-4.0 - 0.01 * place) * own for place, own in enumerate(trained))
    return Branch(prompt, tokens(count, seed), logprobs, trained)


def rollout(reward: float, sample: int, *rows: Branch) -> Rollout:
    first, *rest = rows
    return Rollout(
        PROMPT, first.prompt_ids, first.ids, first.logprobs, first.trained, "", FinishReason.STOP, 0, Grade(reward),
        sample, prefix=3, branches=tuple(rest),
    )  # fmt: skip


def episode(reward: float, sample: int, seed: int) -> Rollout:
    """A conversation, a fork of it, and a summary that shares two tokens with it."""
    first = row(OPENING, 9, seed, observed=1)
    fork = row((*OPENING, *first.ids[:3], *tokens(2, seed + 1)), 4, seed + 2)
    summary = row((*OPENING[:3], *tokens(4, seed + 3)), 7, seed + 4, observed=1)
    return rollout(reward, sample, first, fork, summary)


GROUPS = [
    Group(PROMPT, (episode(1.0, 0, 10), rollout(0.0, 1, row(OPENING, 5, 20)), episode(0.0, 2, 30))),
    Group(PROMPT, (rollout(1.0, 0, row(tokens(4, 40), 3, 41)), rollout(0.0, 1, row(tokens(4, 40), 6, 42)))),
]


def recipe(aggregation: str = "token-mean", **update: Any) -> Recipe:
    algorithm = {"kind": "grpo", "aggregation": aggregation, "kl": {"coef": 0.0}}
    settings = {"optimizer": {"kind": "adamw", "lr": 0.0}, "rollout": {"max_tokens": 40}, "update": update}
    return Recipe.model_validate({"algorithm": algorithm, "prompts_per_step": 1, "samples_per_prompt": 5, **settings})


def batch_of(settings: Recipe) -> Batch:
    objective = build_objective(settings)
    whole = with_advantages(objective, settings, make_batch(GROUPS, settings, 0.0))
    (batch,) = make_batches(objective, settings, whole, [True] * len(whole.sequences), 0)
    return batch


def test_rows_of_an_episode_share_its_advantage_and_it_counts_once_in_its_group() -> None:
    """Rewards 1, 0, 0: the mean is 1/3 whatever the number of rows (rows apart would give 3/7)."""
    batch = batch_of(recipe())
    first = [s for s in batch.sequences if s.sample == 0]
    assert len(first) == 3
    values = {value for s in first for value, own in zip(s.advantages, s.trained, strict=True) if own}
    (value,) = values
    assert value == pytest.approx((2 / 3) / (torch.tensor([1.0, 0.0, 0.0]).std(correction=1).item()), rel=1e-3)
    shown = advantage_rows(GROUPS, batch)
    assert [len(one) for one in shown] == [3, 2]
    assert shown[0][0] == value


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token-mean", lambda own, total: 1 / total),
        ("seq-mean-token-mean", lambda own, total: 1 / (5 * own)),
        ("seq-mean-token-sum", lambda own, total: 1 / 5),
        ("seq-mean-token-sum-norm", lambda own, total: 1 / (5 * 40)),
    ],
)
def test_an_episode_is_one_sample_in_every_aggregation(aggregation: str, weight: Any) -> None:
    batch = batch_of(recipe(aggregation))
    rollouts = [one for group in GROUPS for one in group.rollouts]
    total = sum(one.sampled for one in rollouts)
    for sequence in batch.sequences:
        assert sequence.sample is not None
        assert sequence.weight == pytest.approx(weight(rollouts[sequence.sample].sampled, total), rel=1e-12)


def test_rows_of_an_episode_are_in_one_update() -> None:
    settings = Recipe.model_validate(
        {"prompts_per_step": 1, "samples_per_prompt": 6, "update": {"samples_per_update": 2}}
    )
    objective = build_objective(settings)
    whole = with_advantages(objective, settings, make_batch(GROUPS, settings, 0.0))
    batches = make_batches(objective, settings, whole, [True] * len(whole.sequences), 0)
    updates = [{s.sample for s in batch.sequences} for batch in batches]
    assert sorted(map(len, updates)) == [1, 2, 2]
    assert set().union(*updates) == {0, 1, 2, 3, 4}
    assert sum(len(batch.sequences) for batch in batches) == 9


@pytest.mark.parametrize("budget", [1, 40, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_the_gradient_is_that_of_the_rows_trained_apart_and_added(share: bool, budget: int) -> None:
    """fp64. Apart: every row alone in a batch, its prompt as it was sampled, with the weight and the advantage of its episode."""
    settings = recipe(share_prompts=share, tokens_per_microbatch=budget)
    objective = build_objective(settings)
    together = batch_of(settings)
    metrics, ours = learner_gradients(twin(wide("llama")), together, objective.loss, settings)
    apart: dict[str, torch.Tensor] = {}
    rows = [(one, branch) for group in GROUPS for one in group.rollouts for branch in one.rows]
    assert len(rows) == len(together.sequences) == 9
    for (_, branch), sequence in zip(rows, together.sequences, strict=True):
        assert (*sequence.prompt_ids, *sequence.ids) == (*branch.prompt_ids, *branch.ids)
        cut = len(sequence.ids) - len(branch.ids)
        alone = replace(
            sequence,
            prompt_ids=branch.prompt_ids,
            ids=branch.ids,
            trained=branch.trained,
            rollout_logprobs=branch.logprobs,
            advantages=sequence.advantages[cut:],
        )
        _, found = learner_gradients(
            twin(wide("llama")), Batch((alone,), together.temperature), objective.loss, settings
        )
        for name, value in found.items():
            apart[name] = apart.get(name, torch.zeros_like(value)) + value
    assert max(float((ours[n] - apart[n]).abs().max() / apart[n].abs().max()) for n in ours) < 1e-12
    alone_tokens = sum(len(branch.prompt_ids) + len(branch.ids) - 1 for _, branch in rows)
    if share and budget == 10_000:
        assert metrics["batch/tokens_processed"] < alone_tokens - 3 * len(OPENING), (
            "openings and forks share their prefix"
        )
    if not share:
        assert metrics["batch/tokens_processed"] == alone_tokens


def test_metrics_count_the_tokens_of_all_rows() -> None:
    metrics = rollout_metrics(GROUPS, recipe())
    assert metrics["batch/samples"] == 5
    total = sum(sum(branch.trained) for group in GROUPS for one in group.rollouts for branch in one.rows)
    assert metrics["batch/tokens_generated"] == total


def test_a_row_leads_back_to_its_episode() -> None:
    batch = batch_of(recipe())
    flat = [one for group in GROUPS for one in group.rollouts]
    assert [_rollout_of(s, GROUPS) for s in batch.sequences] == [flat[s.sample or 0] for s in batch.sequences]
