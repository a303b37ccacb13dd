"""From graded replies to sequences, by hand: what is penalised, what is left out, and what still counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe
from lockstep.loops.advantages import (
    advantage_rows,
    kl_estimates,
    make_batch,
    mean_kl,
    shaped_reward,
    with_advantages,
)
from lockstep.loops.logprob_passes import carries_gradient
from lockstep.loops.step_metrics import credit_metrics, rollout_metrics
from lockstep.loops.update import make_batches, merged
from lockstep.types import Batch, Branch, FinishReason, Grade, Group, Prompt, Rollout, TrainSequence

PROMPT = Prompt("p", (), "")


def reply(reward: float | None, tokens: int, *, cut: bool = False, prefix: int = 2) -> Rollout:
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    grade = Grade(reward) if reward is not None else Grade(None, error="no judge")
    logprobs = tuple(-0.5 * (place + 1) for place in range(tokens))
    return Rollout(
        PROMPT, (1, 2, 3), tuple(range(tokens)), logprobs, (True,) * tokens, "", finish, 0, grade, prefix=prefix
    )


def recipe(algorithm: dict[str, Any], **settings: Any) -> Recipe:
    rollout = {"max_tokens": 10}
    return Recipe.model_validate(
        {"prompts_per_step": 1, "samples_per_prompt": 4, "rollout": rollout, "algorithm": algorithm, **settings}
    )


DR_GRPO = {"kind": "dr_grpo", "aggregation": "token-mean"}


def credited(settings: Recipe, *replies: Rollout) -> Batch:
    groups = [Group(PROMPT, replies)]
    return with_advantages(build_objective(settings), settings, make_batch(groups, settings, 0.0))


def test_a_long_reply_is_penalised_where_credit_sees_it_and_its_grade_stays() -> None:
    """Over the last 4 of 10 tokens the penalty grows to 2: 6 → 0, 8 → 1, 10 → 2."""
    settings = recipe({**DR_GRPO, "overlong": {"buffer": 4, "penalty": 2.0}})
    replies = [reply(1.0, 6), reply(1.0, 8), reply(1.0, 10, cut=True), reply(None, 10)]
    assert [shaped_reward(one, settings) for one in replies] == [1.0, 0.0, -1.0, None]
    samples = credited(settings, *replies)
    assert [set(s.advantages) for s in samples.sequences] == [{1.0}, {0.0}, {-1.0}, {0.0}]
    metrics = rollout_metrics([Group(PROMPT, tuple(replies))], settings)
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/shaped_mean"] == 0.0
    assert "reward/shaped_mean" not in rollout_metrics([Group(PROMPT, tuple(replies))], recipe(DR_GRPO))


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        ({"kind": "grpo"}, 0.5),
        ({"kind": "reinforce_pp_baseline"}, 0.5),
        ({"kind": "reinforce_pp"}, None),
        ({"kind": "reinforce"}, None),
    ],
)
def test_groups_of_equal_rewards_count_only_where_a_group_is_compared(algorithm: dict[str, Any], share: float) -> None:
    """A lone sample has no other to differ from."""
    equal, unlike, alone = (1.0, 1.0), (1.0, 0.0), (1.0,)
    groups = [Group(PROMPT, tuple(reply(reward, 2) for reward in rewards)) for rewards in (equal, unlike, alone)]
    assert rollout_metrics(groups, recipe(algorithm)).get("reward/zero_std_groups") == share
    assert "reward/zero_std_groups" not in rollout_metrics(groups[2:], recipe(algorithm))


def test_an_episode_is_as_long_as_what_counts_towards_its_budget() -> None:
    """An environment's episode pays for all its tokens; a program's for those sampled in all its rows (here 4 + 3 of 9 + 3)."""
    settings = recipe({**DR_GRPO, "overlong": {"buffer": 4, "penalty": 2.0}})
    played = replace(reply(1.0, 9), trained=(True,) * 4 + (False,) * 5)
    program = replace(played, branches=(Branch((1,), (1, 2, 3), (-1.0,) * 3, (True,) * 3),), spent=7)
    assert [shaped_reward(one, settings) for one in (played, program)] == [-0.5, 0.5]


def test_advantages_that_add_up_to_0_within_a_reply_are_not_taken_for_none(tmp_path: Path) -> None:
    """The estimator gives the halves of a reply +1 and -1 times its reward: the mean is 0, and the reply is trained."""
    own = tmp_path / "own.py"
    halves = "[(one.reward or 0.0) * (1.0 if 2 * t < len(one.ids) else -1.0) for t in range(len(one.ids))]"
    own.write_text(f"def centred(replies):\n    return [{halves} for one in replies]\n")
    settings = recipe({"kind": "reinforce", "advantage": f"{own}:centred"})
    replies = [reply(1.0, 4), reply(1.0, 2), reply(0.0, 6), reply(1.0, 8)]
    groups = [Group(PROMPT, tuple(replies))]
    samples = credited(settings, *replies)
    rows = advantage_rows(groups, samples)
    assert rows == [(0.0,) * 4]
    assert credit_metrics(groups, rows, samples, settings)["advantage/nonzero"] == 0.75


def test_a_truncated_reply_that_is_left_out_counts_in_the_mean_and_in_no_denominator() -> None:
    replies = [reply(1.0, 2), reply(0.0, 10, cut=True), reply(0.0, 3), reply(None, 5)]
    kept, dropped = recipe(DR_GRPO), recipe({**DR_GRPO, "overlong": {"drop_truncated": True}})
    third = pytest.approx(-1 / 3)
    rows = advantage_rows([Group(PROMPT, tuple(replies))], credited(kept, *replies))
    assert rows == [(pytest.approx(2 / 3), third, third, 0.0)]
    samples = credited(dropped, *replies)
    rows = advantage_rows([Group(PROMPT, tuple(replies))], samples)
    assert rows == [(pytest.approx(2 / 3), 0.0, third, 0.0)], "its 0 is still in the mean of 1/3"
    assert [any(s.trained) for s in samples.sequences] == [True, False, True, False]
    (batch,) = batches(dropped, samples)
    assert [(len(s.ids), s.weight) for s in batch.sequences] == [(2, 1 / 5), (3, 1 / 5)], "of 2 + 3 tokens"
    (batch,) = batches(kept, credited(kept, *replies))
    assert [s.weight for s in batch.sequences] == [1 / 15] * 3
    groups = [Group(PROMPT, tuple(replies))]
    assert credit_metrics(groups, rows, samples, dropped)["length/dropped"] == 1.0
    assert "length/dropped" not in credit_metrics(groups, rows, samples, kept)


def test_whitening_does_not_see_what_is_left_out() -> None:
    settings = recipe({"kind": "reinforce_pp", "overlong": {"drop_truncated": True}})
    with_cut = credited(settings, reply(1.0, 2), reply(0.0, 3), reply(1.0, 2), reply(0.0, 10, cut=True))
    without = credited(settings, reply(1.0, 2), reply(0.0, 3), reply(1.0, 2))
    assert [s.advantages for s in with_cut.sequences[:3]] == [s.advantages for s in without.sequences]


def test_the_shared_prefix_is_what_all_replies_have() -> None:
    groups = [Group(PROMPT, (reply(1.0, 2, prefix=3), reply(1.0, 2, prefix=2)))]
    assert make_batch(groups, recipe(DR_GRPO), 0.0).prefix == 2
    assert make_batch([], recipe(DR_GRPO), 0.0).sequences == ()


# --- KL in the reward -------------------------------------------------------------------------------------------------
IN_REWARD = {
    "kind": "reinforce_pp",
    "advantage": {"kind": "whitened"},
    "kl": {"coef": 0.1, "placement": "reward", "estimator": "k1"},
}


def compared(sequence: TrainSequence, *ref: float, old: tuple[float, ...] | None = None) -> TrainSequence:
    return replace(sequence, ref_logprobs=ref, old_logprobs=old)


def test_the_penalty_in_the_reward_is_by_token_and_by_the_present_coefficient() -> None:
    """Rollout log-probabilities are -0.5, -1, -1.5 …; returns are then whitened, which keeps their differences' ratios."""
    settings = recipe(IN_REWARD)
    groups = [Group(PROMPT, (reply(1.0, 2), reply(0.0, 1), reply(None, 1)))]
    plain = make_batch(groups, settings, 0.5)  # the controller has moved on from 0.1
    first, second, third = plain.sequences
    # penalties: 0.5 · ((-0.5 + 0.7), (-1 + 1.4)) = 0.1, 0.2 and 0.5 · (-0.5 + 0.1) = -0.2
    samples = replace(plain, sequences=(compared(first, -0.7, -1.4), compared(second, -0.1), third))
    found = with_advantages(build_objective(settings), settings, samples)
    returns = (-0.1 - 0.2 + 1, -0.2 + 1, 0.2)
    a, b, c = *found.sequences[0].advantages, *found.sequences[1].advantages
    assert (a - c) / (b - c) == pytest.approx((returns[0] - returns[2]) / (returns[1] - returns[2]))
    assert a + b + c == pytest.approx(0, abs=1e-12)
    assert found.sequences[2].advantages == (0.0,)
    metrics = credit_metrics(groups, [(0.0, 0.0, 0.0)], samples, settings)
    assert metrics["kl/ref"] == pytest.approx((0.2 + 0.4 - 0.4) / 3)
    assert metrics["kl/coef"] == 0.5
    (batch,) = batches(settings, found)
    assert batch.kl_coef == 0, "the penalty is in the advantages; the loss adds none"


def test_the_learners_own_log_probabilities_go_before_the_engines() -> None:
    settings = recipe(IN_REWARD)
    (sequence,) = make_batch([Group(PROMPT, (reply(1.0, 2),))], settings, 0.1).sequences
    both = compared(sequence, -1.0, -1.0, old=(-0.25, -0.5))
    assert kl_estimates(both, "k1") == (0.75, 0.5)
    assert kl_estimates(replace(both, old_logprobs=None), "k2", 2.0) == (0.25, 0.0)
    assert kl_estimates(sequence, "k1") == ()
    observed = replace(both, trained=(False, True))
    assert kl_estimates(observed, "k1") == (0.0, 0.5)
    assert mean_kl(Batch((both, observed, sequence))) == pytest.approx((0.75 + 0.5 + 0.5) / 3)
    assert mean_kl(Batch((sequence,))) is None


def test_a_penalty_in_the_loss_travels_with_the_batch() -> None:
    settings = recipe({"kind": "grpo", "kl": {"coef": 0.1}})
    groups = [Group(PROMPT, (reply(1.0, 2), reply(0.0, 1)))]
    (batch,) = batches(settings, make_batch(groups, settings, 0.25))
    assert batch.kl_coef == 0.25


# --- batches ----------------------------------------------------------------------------------------------------------
def batches(settings: Recipe, samples: Batch, epoch_step: int = 0) -> list[Any]:
    objective = build_objective(settings)
    return make_batches(objective, settings, samples, carries_gradient(objective, settings, samples), epoch_step)


def test_a_zero_advantage_is_left_out_where_it_has_no_gradient() -> None:
    replies = [reply(1.0, 2), reply(0.5, 3), reply(0.0, 1)]  # the second is the mean
    settings = recipe(DR_GRPO)
    (batch,) = batches(settings, credited(settings, *replies))
    assert [(len(s.ids), s.weight) for s in batch.sequences] == [(2, 1 / 6), (1, 1 / 6)]
    for keeps in (recipe(DR_GRPO, update={"drop_zero_advantage": False}), recipe({**DR_GRPO, "entropy_coef": 0.1})):
        (batch,) = batches(keeps, credited(keeps, *replies))
        assert [len(s.ids) for s in batch.sequences] == [2, 3, 1]


def test_every_sample_is_dealt_once_a_pass_and_otherwise_in_the_next() -> None:
    settings = recipe(DR_GRPO, prompts_per_step=2, update={"samples_per_update": 2, "epochs": 2})
    replies = [reply(float(number % 2), number + 1) for number in range(8)]
    groups = [Group(PROMPT, tuple(replies[:4])), Group(PROMPT, tuple(replies[4:]))]
    samples = with_advantages(build_objective(settings), settings, make_batch(groups, settings, 0.0))
    passes = [[[len(s.ids) for s in batch.sequences] for batch in batches(settings, samples, at)] for at in (0, 1)]
    for dealt in passes:
        assert [len(batch) for batch in dealt] == [2, 2, 2, 2]
        assert sorted(length for batch in dealt for length in batch) == list(range(1, 9))
    assert passes[0] != passes[1]
    assert passes[0] == [[len(s.ids) for s in batch.sequences] for batch in batches(settings, samples, 0)]
    fewer = replace(samples, sequences=samples.sequences[:5])
    assert [len(batch.sequences) for batch in batches(settings, fewer)] == [2, 2, 1]
    assert batches(settings, replace(samples, sequences=())) == []


def test_metrics_of_several_updates_are_merged() -> None:
    first = {"batch/microbatches": 2.0, "ratio/max": 1.5, "grad/norm": 1.0, "mismatch/k3": 0.1, "loss/policy": 3.0}
    second = {"batch/microbatches": 1.0, "ratio/max": 1.25, "grad/norm": 2.0, "mismatch/k3": 0.7, "loss/policy": 4.0}
    assert merged({}, first) == first
    assert merged(first, {**second, "lr": 0.5}) == {
        "batch/microbatches": 3.0,
        "ratio/max": 1.5,
        "grad/norm": 2.0,
        "mismatch/k3": 0.1,
        "loss/policy": 4.0,
        "lr": 0.5,
    }


def test_a_tail_that_is_no_number_in_any_update_is_none_in_the_step() -> None:
    good = {"ratio/max": 1.5, "grad/norm": 1.0, "ratio/log_min": -1.0}
    bad = dict.fromkeys(good, math.nan)
    for updates in ((good, bad), (bad, good)):
        assert all(math.isnan(value) for value in merged(*updates).values())
