"""Each rule on series of metrics: when it speaks, what it says, and that a single bad step never does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.config.health import HealthRule
from lockstep.config.load import load, load_mapping
from lockstep.config.metric import built_in_rules
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError
from lockstep.health.judge import Alarm, HealthJudge
from lockstep.health.rules import health_lines
from lockstep.health.smoke import SmokeGate, smoke_rows
from lockstep.track.catalogue import Judge, find
from tests.health.replay import replay

DEFAULTS = Recipe()
SETTINGS = {rule.name: setting for rule, setting in DEFAULTS.health.in_force()}
STOPPING = {
    "clipping", "leap", "mismatch", "unscored", "reward_flat", "disk",
    "flat_start", "no_format", "zero_gradient", "unmoved", "reward_hacking", "divergence",
}  # fmt: skip


def said(
    rows: Sequence[Mapping[str, float]], *overrides: str, checkpoint_gib: float = 0.0
) -> list[tuple[int, str, str]]:
    """Step, rule and tier of each alarm over rows of steps 1, 2, …, up to the first that stops."""
    alarms = alarms_of(rows, *overrides, checkpoint_gib=checkpoint_gib)
    return [(alarm.seen[-1].step, alarm.rule.name, alarm.setting.tier) for alarm in alarms]


def alarms_of(rows: Sequence[Mapping[str, float]], *overrides: str, checkpoint_gib: float = 0.0) -> list[Alarm]:
    return replay(load(["smoke", "optimizer.lr=1.0e-5", *overrides]), list(enumerate(rows, 1)), checkpoint_gib)


def series(name: str, values: Sequence[float], **others: float) -> list[dict[str, float]]:
    return [{name: value, **others} for value in values]


def test_every_rule_has_its_settings_and_its_metric() -> None:
    assert sorted(SETTINGS) == sorted(rule.name for rule in built_in_rules().values())
    for rule in built_in_rules().values():
        for name in (rule.metric, *rule.shown, *rule.needs):
            assert find(name) is not None, (rule.name, name)
        assert rule.meaning
        assert rule.advice
        assert rule.source


def test_only_unambiguous_rules_stop_and_none_at_a_single_step() -> None:
    stopping = {name for name, setting in SETTINGS.items() if setting.tier == "stop"}
    assert stopping == STOPPING
    assert all(setting.steps >= 2 for setting in SETTINGS.values() if setting.tier == "stop")


HEALTHY = {
    "grad/norm": 0.8, "sync/probe_shift": 0.07,
    "mismatch/mean_abs_dlogp": 0.012, "mismatch/k3": 4e-4, "mismatch/ess_tokens": 0.99,
    "reward/unscored": 0.0, "reward/std": 0.4, "reward/zero_std_groups": 0.3, "length/truncated": 0.02, "length/mean": 200.0,
    "entropy/sampled": 0.6, "advantage/nonzero": 0.7, "ratio/clip_share": 0.01, "kl/ref": 0.01, "weights/changed_tensors": 28.0,
    "memory/disk_free_gib": 90.0, "reward/high_but_wrong": 0.0, "ratio/log_abs_max": 0.1, "answer/has_answer": 1.0, "lr": 1e-5,
    "time/grade_share": 0.02, "memory/gpu_share": 0.8, "gpu/seen": 1.0, "routes/differ": 0.03,
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
    ("zero_variance", "reward/zero_std_groups", 0.96, 6, 8),
    ("truncation", "length/truncated", 0.81, 6, 5),
    ("length_collapse", "length/mean", 49.0, 6, 2),
    ("entropy_collapse", "entropy/sampled", 0.059, 6, 4),
    ("entropy_explosion", "entropy/sampled", 1.81, 6, 5),
    ("clip_share", "ratio/clip_share", 0.41, 6, 3),
    ("kl_reference", "kl/ref", 1.01, 6, 5),
    ("unmoved", "weights/changed_tensors", 0.0, 6, 5),
    ("disk", "memory/disk_free_gib", 1.2, 6, 2),
    ("headroom", "memory/gpu_share", 0.96, 6, 2),
    ("zero_gradient", "grad/norm", 0.0, 6, 3),
    ("reward_hacking", "reward/high_but_wrong", 0.16, 6, 4),
    ("ratio_tail", "ratio/log_abs_max", 5.1, 6, 2),
    ("kl_dead", "kl/ref", 0.0, 6, 5),
    ("flat_start", "advantage/nonzero", 0.0, 0, 6),
    ("no_format", "answer/has_answer", 0.0, 0, 6),
    ("cold", "lr", 9e-7, 0, 8),
    ("idle_gpu", "time/grade_share", 0.31, 6, 5),
]
OTHERS = {"reward_falls", "spike_escalation", "divergence", "routes"}
"""Rules over what many steps show, and one that warns at its first bad step; they have tests of their own."""


def test_the_cases_above_are_all_rules() -> None:
    assert {case[0] for case in CASES} == built_in_rules().keys() - OTHERS


@pytest.mark.parametrize(("rule", "metric", "bad", "good", "steps"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_speaks_at_its_step_and_not_before(rule: str, metric: str, bad: float, good: int, steps: int) -> None:
    rows = [dict(HEALTHY) for _ in range(good)] + [HEALTHY | {metric: bad} for _ in range(steps)]
    tier = SETTINGS[rule].tier
    alone = ["health.grad_spike=off"] if rule == "clipping" else []  # such norms are a spike, too
    assert said(rows[:-1], *alone, checkpoint_gib=1.0) == []
    assert said(rows, *alone, checkpoint_gib=1.0) == [(good + steps, rule, tier)]
    assert said(rows, *alone, f"health.{rule}=off", checkpoint_gib=1.0) == []
    other = "warn" if tier == "stop" else "stop"
    assert said(rows, *alone, f"health.{rule}={other}", checkpoint_gib=1.0) == [(good + steps, rule, other)]
    rows[good + steps // 2] = dict(HEALTHY)  # a good step in between
    if SETTINGS[rule].within is None:  # the others allow for some
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
    *earlier, alarm = alarms_of(rows)
    assert [(one.rule.name, one.seen[-1].step) for one in earlier] == [("reward_falls", 10)]
    assert (alarm.rule.name, alarm.seen[-1].step) == ("reward_flat", 17)
    assert "reward/mean 0)" in alarm.what
    (at_most,) = alarms_of([{"reward/mean": 1.0, "advantage/nonzero": 0.0}] * 6)
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
    assert said(rows, "allow=[disk]", checkpoint_gib=13.0) == [(3, "disk", "warn")]
    assert said(rows, "allow=[disk]", "health.disk=off", checkpoint_gib=13.0) == []


def test_a_step_without_a_gradient_may_leave_the_weights_as_they_are() -> None:
    rows = series("weights/changed_tensors", [0.0] * 6)
    assert said(rows) == []
    assert said([row | {"grad/norm": 0.0} for row in rows]) == []
    assert said([row | {"grad/norm": 0.7} for row in rows]) == [(5, "unmoved", "stop")]


def test_a_grader_that_takes_the_time_is_named_where_there_is_a_gpu_to_idle() -> None:
    rows = series("time/grade_share", [0.5] * 9)
    assert said(rows) == []
    assert said([row | {"gpu/seen": 0.0} for row in rows]) == []
    assert said([row | {"gpu/seen": 1.0} for row in rows]) == [(5, "idle_gpu", "warn")]


def test_routes_that_differ_are_named_at_their_first_step_and_once() -> None:
    rows = series("routes/differ", [0.03, 0.3, 0.31, 0.4, 0.03])
    assert said(rows) == [(3, "routes", "warn")]
    assert said(rows, "health.routes=off") == []


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
        ("health.grad_spike.within=2", "steps=3 cannot be reached within 2 steps"),
        ("health.cliping=off", "did you mean health.clipping?"),
        ("health.clipping=of", "did you mean off?"),
        ("health.clipping.limit=-1", "must be at least 0"),
        ("health.rules.mine={metric: answer/cites, when: {tier: stop}, meaning: none}", "give either above or below"),
        ("health.rules.clipping={metric: lr, when: {below: 1}, meaning: none}", "change it by health.clipping"),
        ("health.rules.mine={when: {below: 1}, meaning: none}", "set its metric"),
    ],
)
def test_mistakes_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(["smoke", override])


def test_which_rules_are_in_force_is_said() -> None:
    (line,) = health_lines(load(["smoke", "health.disk=off", "health.ess=stop"]))
    assert line.startswith("health: the run stops itself by unscored, reward_hacking, no_format, ")
    assert "; warns of zero_variance, " in line
    assert line.endswith("; does not look at disk")
    assert "off" not in health_lines(DEFAULTS)[0]
    own = {"metric": "validation/loss", "when": {"above": 2.0, "tier": "stop", "steps": 2}, "meaning": "it forgets"}
    given = {"loop": "sft", "sft": {"data": "rows.jsonl"}, "health": {"rules": {"forgets": own | {"advice": "stop"}}}}
    (line,) = health_lines(load_mapping(given))
    assert line == "health: the run stops itself by clipping, zero_gradient, unmoved, leap, disk, forgets; " + (
        "warns of grad_spike, spike_escalation, cold, headroom"
    )


def clipping(*overrides: str) -> HealthRule:
    return next(setting for rule, setting in load(["smoke", *overrides]).health.in_force() if rule.name == "clipping")


def test_a_tier_alone_keeps_the_rest_of_the_rule() -> None:
    of_place = SETTINGS["clipping"]
    assert clipping("health.clipping=warn") == of_place.model_copy(update={"tier": "warn"})
    both = clipping("health.clipping.limit=7", "health.clipping=off")
    assert (both.tier, both.limit, both.within) == ("off", 7, 15)


# --- rules and ranges of a recipe, or of a user's file put after it ---------------------------------------------------
def test_a_users_file_adds_rules_and_changes_ranges(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "health:\n  ranges: {answer/correct: {low: 0.01}}\n  rules:\n    cites:\n      metric: answer/cites\n"
        "      when: {below: 0.2, tier: stop, steps: 3}\n      meaning: no source is named\n      advice: ask for sources\n"
    )
    (alarm,) = alarms_of(series("answer/cites", [0.9, 0.1, 0.1, 0.1]), str(own))
    assert (alarm.rule.name, alarm.rule.advice, alarm.seen[-1].step) == ("cites", "ask for sources", 4)
    assert (alarm.advice, alarm.off) == ("ask for sources", "health.rules.cites.when.tier=off")
    load(["smoke", str(own), alarm.off])
    assert "cites: answer/cites was below 0.2 in 3 of the last 3 measured steps" in alarm.what
    assert said(series("answer/cites", [0.1] * 3), str(own), "health.rules.cites.when.steps=9") == []
    recipe = load(["smoke", str(own)])
    assert "by unscored" in health_lines(recipe)[0]
    assert ", cites;" in health_lines(recipe)[0]
    assert load_mapping(recipe.model_dump(mode="json")) == recipe
    assert Judge(recipe.health.ranges).step(1, {"answer/correct": 0.05}) == []
    assert Judge().step(1, {"answer/correct": 0.05}) == ["answer/correct"]


# --- trends -----------------------------------------------------------------------------------------------------------
def test_the_published_curve_stops_at_its_second_evaluation_below_the_best() -> None:
    """Reward 0.51 to 0.56 while AIME went from 35.4 % at step 20 to 27.1 % at step 50; what lies between is drawn through."""
    scores = {10: 0.338, 20: 0.354, 30: 0.361, 40: 0.312, 50: 0.271, 60: 0.27}
    rows = [{"reward/mean": 0.51 + 0.001 * step} for step in range(1, 61)]
    for step, score in scores.items():
        rows[step - 1]["eval/greedy/accuracy"] = score
    (alarm,) = alarms_of(rows)
    assert (alarm.rule.name, alarm.seen[-1].step, alarm.setting.tier) == ("divergence", 50, "stop")
    flat = [row | {"reward/mean": 0.51} for row in rows]
    assert said(flat) == []  # the reward did not rise: a poorer score alone is no proof
    noisy = [row | ({"eval/greedy/se": 0.08} if "eval/greedy/accuracy" in row else {}) for row in rows]
    assert said(noisy) == []  # of 35 questions: the fall is within two standard errors


def test_a_falling_reward_is_named_within_ten_steps_and_chance_is_not() -> None:
    falling = [0.6, 0.62, 0.58, 0.55, 0.5, 0.4, 0.3, 0.2, 0.12, 0.1, 0.08]
    assert said(series("reward/mean", falling)) == [(10, "reward_falls", "warn")]
    chance = [0.5, 0.3, 0.6, 0.45, 0.4, 0.35, 0.5, 0.3, 0.45, 0.4, 0.3, 0.42]
    assert said(series("reward/mean", chance)) == []
    assert said(series("reward/mean", [0.001] * 5 + [0.0] * 9)) == []


def test_spikes_that_grow_by_decade_are_named() -> None:
    quiet = ["health.grad_spike=off", "health.clipping=off"]
    growing = [3.0 * 4 ** (step // 10) if step % 10 == 4 else 1.0 for step in range(30)]
    assert said(series("grad/norm", growing), *quiet) == [(30, "spike_escalation", "warn")]
    steady = [12.0 if step % 10 == 4 else 1.0 for step in range(40)]
    assert said(series("grad/norm", steady), *quiet) == []


# --- the smoke gate ---------------------------------------------------------------------------------------------------
def gate(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    recipe = load(["smoke"])
    judge, table = HealthJudge(recipe), SmokeGate(recipe)
    for step, row in enumerate(rows, 1):
        table.take(step, row, judge.step(step, row))
    return {row[1]: row[-1] for row in table.due(len(rows))}


def test_the_table_of_the_first_steps_has_a_verdict_for_each_check() -> None:
    assert set(gate([HEALTHY] * 6).values()) == {"ok"}
    assert gate([HEALTHY] * 5) == {}
    dead = gate([HEALTHY | {"grad/norm": 0.0, "weights/changed_tensors": 0.0, "length/truncated": 0.7}] * 6)
    assert dead["grad/norm"] == "stop: zero_gradient"
    assert dead["length/truncated"] == dead["weights/changed_tensors"] == "warn"  # without a gradient nothing need move
    frozen = gate([HEALTHY | {"weights/changed_tensors": 0.0}] * 6)
    assert frozen["weights/changed_tensors"] == "stop: unmoved"
    mute = gate([HEALTHY | {"answer/has_answer": 0.0}] * 6)
    assert mute["answer/has_answer"] == "stop: no_format"
    assert gate([HEALTHY | {"advantage/std": 0.0}] * 6)["advantage/std"] == "warn"
    solved = gate([HEALTHY | {"advantage/std": 0.0, "answer/correct": 1.0}] * 6)
    assert solved["advantage/std"] == "ok"  # as on the console: most replies are right, so they are the same


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_table_of_the_first_steps_shows_what_is_no_number(bad: int) -> None:
    rows = [(step, {"grad/norm": math.nan if step == bad else 0.5}) for step in range(3)]
    ((_, _, low, high, *_),) = smoke_rows(DEFAULTS, rows, [])
    assert (low, high) == ("nan", "nan")
