"""Each rule on series of metrics: when it speaks, what it says, and that a single bad step never does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from lockstep.config.health import Health
from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError
from lockstep.health.judge import Alarm, HealthJudge, replay
from lockstep.health.rules import RULES, health_lines
from lockstep.track.catalogue import find

DEFAULTS = Recipe()
STOPPING = ["clipping", "leap", "mismatch", "unscored", "reward_flat", "disk"]


def said(
    rows: Sequence[Mapping[str, float]], *overrides: str, checkpoint_gib: float = 0.0
) -> list[tuple[int, str, str]]:
    """Step, rule and tier of each alarm over rows of steps 1, 2, …, up to the first that stops."""
    alarms = alarms_of(rows, *overrides, checkpoint_gib=checkpoint_gib)
    return [(alarm.seen[-1].step, alarm.rule.name, alarm.setting.tier) for alarm in alarms]


def alarms_of(rows: Sequence[Mapping[str, float]], *overrides: str, checkpoint_gib: float = 0.0) -> list[Alarm]:
    return replay(load(["smoke", *overrides]), list(enumerate(rows, 1)), checkpoint_gib)


def series(name: str, values: Sequence[float], **others: float) -> list[dict[str, float]]:
    return [{name: value, **others} for value in values]


def test_every_rule_has_its_settings_and_its_metric() -> None:
    assert sorted(DEFAULTS.health.rules) == sorted(rule.name for rule in RULES)
    for rule in RULES:
        for name in (rule.metric, *rule.shown, *filter(None, [rule.needs])):
            assert find(name) is not None, (rule.name, name)
        assert rule.meaning
        assert rule.advice
        assert rule.source


def test_only_unambiguous_rules_stop_and_none_at_a_single_step() -> None:
    stopping = [name for name, setting in DEFAULTS.health.rules.items() if setting.tier == "stop"]
    assert stopping == STOPPING
    assert all(setting.steps >= 2 for setting in DEFAULTS.health.rules.values())


HEALTHY = {
    "grad/norm": 0.8, "sync/probe_shift": 0.07,
    "mismatch/mean_abs_dlogp": 0.012, "mismatch/k3": 4e-4, "mismatch/ess_tokens": 0.99,
    "reward/unscored": 0.0, "reward/std": 0.4, "reward/zero_std_groups": 0.3, "length/truncated": 0.02, "length/mean": 200.0,
    "entropy/sampled": 0.6, "advantage/nonzero": 0.7, "ratio/clip_share": 0.01, "kl/ref": 0.01, "weights/changed_tensors": 28.0,
    "memory/disk_free_gib": 90.0,
}  # fmt: skip
CASES = [
    # rule, metric, bad value, good steps before, bad steps until it speaks
    ("clipping", "grad/norm", 400.0, 6, 10),
    ("grad_spike", "grad/norm", 9.0, 30, 3),
    ("leap", "sync/probe_shift", 1.6, 6, 2),
    ("mismatch", "mismatch/mean_abs_dlogp", 0.201, 6, 5),
    ("mismatch_kl", "mismatch/k3", 0.02, 6, 5),
    ("ess", "mismatch/ess_tokens", 0.4, 6, 3),
    ("unscored", "reward/unscored", 0.06, 6, 3),
    ("reward_flat", "advantage/nonzero", 0.0, 6, 10),
    ("zero_variance", "reward/zero_std_groups", 0.96, 6, 10),
    ("truncation", "length/truncated", 0.81, 6, 10),
    ("length_collapse", "length/mean", 49.0, 6, 5),
    ("entropy_collapse", "entropy/sampled", 0.059, 6, 10),
    ("entropy_explosion", "entropy/sampled", 1.81, 6, 5),
    ("clip_share", "ratio/clip_share", 0.41, 6, 3),
    ("kl_reference", "kl/ref", 1.01, 6, 5),
    ("unmoved", "weights/changed_tensors", 0.0, 6, 5),
    ("disk", "memory/disk_free_gib", 1.2, 6, 2),
]


def test_the_cases_below_are_all_rules() -> None:
    assert [case[0] for case in CASES] == [rule.name for rule in RULES]


@pytest.mark.parametrize(("rule", "metric", "bad", "good", "steps"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_speaks_at_its_step_and_not_before(rule: str, metric: str, bad: float, good: int, steps: int) -> None:
    rows = [dict(HEALTHY) for _ in range(good)] + [HEALTHY | {metric: bad} for _ in range(steps)]
    tier = DEFAULTS.health.rules[rule].tier
    alone = ["health.grad_spike=off"] if rule == "clipping" else []  # such norms are a spike, too
    assert said(rows[:-1], *alone, checkpoint_gib=1.0) == []
    assert said(rows, *alone, checkpoint_gib=1.0) == [(good + steps, rule, tier)]
    assert said(rows, *alone, f"health.{rule}=off", checkpoint_gib=1.0) == []
    other = "warn" if tier == "stop" else "stop"
    assert said(rows, *alone, f"health.{rule}={other}", checkpoint_gib=1.0) == [(good + steps, rule, other)]
    rows[good + steps // 2] = dict(HEALTHY)  # a good step in between
    if rule != "clipping":  # which allows for some
        assert said(rows, checkpoint_gib=1.0) == []


@pytest.mark.parametrize(("rule", "metric", "bad", "good", "steps"), CASES, ids=[case[0] for case in CASES])
def test_a_single_bad_step_is_never_more_than_a_mark(rule: str, metric: str, bad: float, good: int, steps: int) -> None:
    rows = [HEALTHY | ({metric: bad} if step % 20 == 19 else {}) for step in range(80)]
    assert said(rows, checkpoint_gib=1.0) == []
    del rule, good, steps


def test_a_healthy_run_hears_nothing() -> None:
    assert said([HEALTHY] * 200, checkpoint_gib=1.0) == []


# --- the 400-fold clip ----------------------------------------------------------------------------------------------
FOURFOLD = [
    2.1,
    3.0,
    1.8,
    390.0,
    412.0,
    405.0,
    61.0,
    398.0,
    377.0,
    1590.0,
    420.0,
    88.0,
    399.0,
    361.0,
    415.0,
    402.0,
    407.0,
]
"""Two good steps, then norms around 400 with a few better ones between, as in the run that nobody stopped."""


def test_a_run_whose_gradients_are_clipped_400_fold_stops_within_fifteen_steps() -> None:
    (alarm,) = alarms_of([{"grad/norm": norm, "grad/clipped": 1.0, "reward/mean": 0.31} for norm in FOURFOLD])
    assert alarm.seen[-1].step == 15  # the tenth above 100 of the last fifteen
    assert alarm.what == (
        "clipping: grad/norm was above 100 (100 times optimizer.max_grad_norm = 1) in 10 of the last 15 measured steps "
        "(405, 61, 398, 377, 1590, 420, 88, 399, 361, 415 at steps 6 to 15; grad/clipped 1, reward/mean 0.31): the update "
        "keeps the gradient's direction and throws its size away: a few extreme tokens decide what is learnt"
    )


def test_what_counts_is_the_clip_norm_of_the_recipe() -> None:
    rows = series("grad/norm", FOURFOLD)
    assert said(rows, "optimizer.max_grad_norm=10") == []
    assert said(series("grad/norm", [5.0] * 10), "optimizer.max_grad_norm=0.01") == [(10, "clipping", "stop")]
    assert said(rows, "health.clipping={limit: 50, steps: 4, within: 4}") == [(7, "clipping", "stop")]


SHORT = "health.clipping={tier: stop, steps: 3, within: 5, limit: 100}"


def test_a_run_without_measured_steps_in_between_is_judged_by_those_that_were_measured() -> None:
    """A step without an update has no norm: it neither counts nor lets the others be forgotten."""
    rows = series("grad/norm", [400.0, 400.0]) + [{"reward/std": 0.3}] * 7 + series("grad/norm", [400.0])
    assert said(rows, SHORT) == [(10, "clipping", "stop")]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_outside(value: float) -> None:
    assert said(series("grad/norm", [value] * 3), SHORT) == [(3, "clipping", "stop")]


# --- a collapse that was recorded -----------------------------------------------------------------------------------
COLLAPSED = [
    (0.0312, 0.1740), (0.0430, 0.2028), (0.0508, 0.2196), (0.0469, 0.2114), (0.0508, 0.2196), (0.0156, 0.1240), (0.0313, 0.1740),
    *[(0.0, 0.0)] * 93,
]  # fmt: skip
"""reward/mean and reward/std of a LoRA run at a learning rate of 1e-3 on an H200: 93 of its 100 steps taught nothing."""


def test_a_recorded_collapse_stops_83_steps_early() -> None:
    rows = [{"reward/mean": mean, "reward/std": std, "advantage/nonzero": float(std > 0)} for mean, std in COLLAPSED]
    (alarm,) = alarms_of(rows)
    assert (alarm.rule.name, alarm.seen[-1].step) == ("reward_flat", 17)
    assert "reward/mean 0)" in alarm.what
    (at_most,) = alarms_of([{"reward/mean": 1.0, "advantage/nonzero": 0.0}] * 10)
    assert "reward/mean 1)" in at_most.what


# --- limits that depend on the recipe or on the run itself ----------------------------------------------------------
def test_quantised_or_noisy_rollouts_may_differ_four_times_as_much() -> None:
    rows = series("mismatch/mean_abs_dlogp", [0.3] * 5)
    assert said(rows) == [(5, "mismatch", "stop")]
    assert said(rows, "numerics.rollout=mxfp4-w4a16") == []
    assert said(rows, "noise={stages: 3}", "steps=30") == []
    assert said(rows, "numerics.train=mxfp4-w4a16") == [(5, "mismatch", "stop")]  # rollouts compute as updates do
    more = series("mismatch/mean_abs_dlogp", [0.41] * 5)
    assert said(more, "numerics.rollout=mxfp4-w4a16") == [(5, "mismatch", "stop")]


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_activations_in_four_bits_are_no_reason_to_stop(phase: str) -> None:
    """0.41 nats is what learner and engine differ by on an H200, where each is right."""
    numerics = f"numerics.{phase}=mxfp4-w4a4"
    assert said(series("mismatch/mean_abs_dlogp", [0.41] * 9), numerics) == []
    assert said(series("mismatch/mean_abs_dlogp", [1.1] * 5), numerics) == [(5, "mismatch", "stop")]


def test_gspo_may_clip_half_of_its_replies() -> None:
    rows = series("ratio/clip_share", [0.6] * 5)
    assert said(rows) == [(3, "clip_share", "warn")]
    assert said(rows, "algorithm.kind=gspo") == []


def test_the_own_past_is_waited_for_and_a_past_of_zeros_is_none() -> None:
    assert said(series("grad/norm", [0.1] * 4 + [50.0] * 3)) == []
    assert said(series("grad/norm", [0.1] * 5 + [50.0] * 3)) == [(8, "grad_spike", "warn")]
    assert said(series("grad/norm", [0.0] * 40 + [0.5] * 3)) == []
    sparse = [0.0, 0.1] * 5 + [50.0, 0.0] * 3  # steps without a gradient are no past to compare with
    assert said(series("grad/norm", sparse)) == [(15, "grad_spike", "warn")]
    assert said(series("entropy/sampled", [0.6] * 4 + [5.0] * 3)) == []


def test_the_disk_must_take_a_checkpoint_more() -> None:
    rows = series("memory/disk_free_gib", [14.0, 13.0, 12.0])
    assert said(rows, checkpoint_gib=12.5) == []  # below 12.75 for one step only
    assert said(rows, checkpoint_gib=13.0) == [(3, "disk", "stop")]
    assert said(rows, "health.disk.limit=2", checkpoint_gib=7.0) == [(2, "disk", "stop")]
    assert said(rows) == []  # of a model whose sizes cannot be told


def test_a_step_without_a_gradient_may_leave_the_weights_as_they_are() -> None:
    rows = series("weights/changed_tensors", [0.0] * 6)
    assert said(rows) == []
    assert said([row | {"grad/norm": 0.0} for row in rows]) == []
    assert said([row | {"grad/norm": 0.7} for row in rows]) == [(5, "unmoved", "warn")]


# --- tiers ----------------------------------------------------------------------------------------------------------
def test_a_warning_comes_once_and_again_after_it_was_over() -> None:
    rows = series("ratio/clip_share", [0.5] * 8 + [0.1] + [0.5] * 4)
    assert said(rows) == [(3, "clip_share", "warn"), (12, "clip_share", "warn")]


def test_a_rule_that_stops_speaks_at_every_step_that_breaks_it() -> None:
    """A run that is resumed with the rule still on stops again, instead of training on because it was said before."""
    judge = HealthJudge(DEFAULTS)
    spoke = [bool(judge.step(step, {"reward/unscored": 0.2})) for step in range(1, 7)]
    assert spoke == [False, False, True, True, True, True]
    assert not judge.step(7, {"reward/unscored": 0.0})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("health.clipping.steps=1", "one bad step must not stop a run; set steps to 2 or more"),
        ("health.grad_spike.within=2", "steps = 3 cannot be reached within 2 steps"),
        ("health.cliping=off", "did you mean health.clipping?"),
        ("health.clipping=of", "did you mean off?"),
        ("health.clipping.limit=-1", "must be at least 0"),
    ],
)
def test_mistakes_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(["smoke", override])


def test_which_rules_are_in_force_is_said() -> None:
    (line,) = health_lines(load(["smoke", "health.disk=off", "health.ess=stop"]))
    assert line.startswith(
        "health: the run stops itself by clipping, leap, mismatch, ess, unscored, reward_flat; warns of grad_spike, "
    )
    assert line.endswith("; does not look at disk")
    assert "off" not in health_lines(DEFAULTS)[0]


def test_a_tier_alone_keeps_the_rest_of_the_rule() -> None:
    of_place = Health().clipping
    assert load(["smoke", "health.clipping=warn"]).health.clipping == of_place.model_copy(update={"tier": "warn"})
    both = load(["smoke", "health.clipping.limit=7", "health.clipping=off"]).health.clipping
    assert (both.tier, both.limit, both.within) == ("off", 7, 15)
