"""Stopping rules and the divergence alarm, on hand-made curves and on that of attempt 26."""

from __future__ import annotations

from lockstep.config.evaluate import Drops, NoStop, Plateau
from lockstep.evaluation.stopping import Point, best, diverges, should_stop, smoothed

STEPS = range(0, 61, 10)
ATTEMPT_26_OOD = [Point(s, v) for s, v in zip(STEPS, (0.333, 0.340, 0.354, 0.361, 0.312, 0.271, 0.260), strict=True)]
"""Notes S3-92: 35.4 % at step 20, best at 30, 27.1 % at step 50, below base; what lies between is drawn through those."""
ATTEMPT_26_REWARD = [Point(s, 0.51 + 0.05 * s / 60) for s in range(61)]
"""While the training reward rose from 0.51 to 0.56."""
ATTEMPT_26_ID = [Point(s, 0.70 + 0.0002 * s) for s in STEPS]
"""A probe of the training distribution, flat: it misses what happens."""
TWO_DROPS = Drops(metric="eval/ood_probe.greedy/accuracy", in_a_row=2)


def first_stop(rule: Drops | Plateau, points: list[Point]) -> int | None:
    return next((points[i].step for i in range(len(points)) if should_stop(rule, points[: i + 1])), None)


def curve(*values: float) -> list[Point]:
    return [Point(10 * i, v) for i, v in enumerate(values)]


def test_attempt_26_is_stopped_at_step_50_by_two_drops_of_the_ood_probe() -> None:
    assert first_stop(TWO_DROPS, ATTEMPT_26_OOD) == 50
    why = should_stop(TWO_DROPS, ATTEMPT_26_OOD[:6])
    assert why == (
        "eval/ood_probe.greedy/accuracy fell 2 evaluations in a row (36.1, 31.2, 27.1 % at steps 30 to 50); it was highest at "
        "step 30 (36.1 %)"
    )
    assert best(ATTEMPT_26_OOD) == Point(30, 0.361)
    assert first_stop(TWO_DROPS, ATTEMPT_26_ID) is None  # the ID probe alone would have let it run


def test_attempt_26_raises_the_divergence_alarm_and_only_with_the_ood_probe() -> None:
    alarms = [
        p.step for i, p in enumerate(ATTEMPT_26_OOD) if diverges(ATTEMPT_26_REWARD, ATTEMPT_26_OOD[: i + 1], least=0.01)
    ]
    assert alarms == [40, 50, 60] or alarms == [50, 60]
    text = diverges(ATTEMPT_26_REWARD, ATTEMPT_26_OOD[:6], least=0.015)
    assert "since step 30" in text
    assert "from 36.1 to 27.1 %" in text
    assert diverges(ATTEMPT_26_REWARD, ATTEMPT_26_ID) == ""


def test_no_alarm_while_both_rise_or_the_reward_falls_too() -> None:
    rising = [Point(s, 0.3 + 0.002 * s) for s in STEPS]
    falling_reward = [Point(s, 0.6 - 0.002 * s) for s in range(61)]
    assert diverges(ATTEMPT_26_REWARD, rising) == ""
    assert diverges(falling_reward, ATTEMPT_26_OOD) == ""
    assert diverges(ATTEMPT_26_REWARD, ATTEMPT_26_OOD[:2]) == ""
    assert diverges([], ATTEMPT_26_OOD) == ""


def test_training_that_hurts_from_its_first_step_parts_from_the_base() -> None:
    reward = [Point(step, 0.3 + step / 80) for step in range(1, 41)]
    held_out = [Point(10 * i, value) for i, value in enumerate((0.5, 0.45, 0.4, 0.33, 0.25))]
    text = diverges(reward, held_out)
    assert text.startswith("training and evaluation diverge: since step 0 the training reward went from 0.325 to")
    assert "the held-out score from 50.0 to 25.0 %" in text


def test_drops_must_be_one_after_the_other() -> None:
    assert first_stop(TWO_DROPS, curve(0.5, 0.4, 0.45, 0.4, 0.42)) is None
    assert first_stop(TWO_DROPS, curve(0.5, 0.4, 0.4, 0.3)) is None  # equal is no drop
    assert first_stop(TWO_DROPS, curve(0.5, 0.6, 0.5, 0.4)) == 30
    assert first_stop(TWO_DROPS, curve(0.5, 0.4)) is None
    assert first_stop(Drops(metric="eval/greedy/accuracy", in_a_row=1), curve(0.5, 0.4)) == 10
    noisy = Drops(metric="eval/greedy/accuracy", in_a_row=2, min_delta=0.02)
    assert first_stop(noisy, curve(0.5, 0.49, 0.48, 0.47)) is None
    assert first_stop(noisy, curve(0.5, 0.47, 0.44)) == 20


def test_a_plateau_waits_for_its_patience_on_the_smoothed_curve() -> None:
    rule = Plateau(metric="eval/greedy/accuracy", smooth=3, patience=2, min_delta=0.01)
    points = curve(0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    # Means of three: 0.40, 0.467, 0.50 (step 40), 0.50, 0.50: two without a rise of a point at step 60.
    assert [round(p.value, 3) for p in smoothed(points, 3)] == [0.4, 0.467, 0.5, 0.5, 0.5, 0.5]
    assert first_stop(rule, points) == 60
    assert "for 2 evaluations (50.0 % at step 40, now 50.0 %)" in should_stop(rule, points[:7])
    assert first_stop(rule, curve(0.3, 0.4)) is None
    slow = Plateau(metric="eval/greedy/accuracy", smooth=1, patience=2, min_delta=0.01)
    assert "(50.0 % at step 0, now 50.9 %)" in should_stop(slow, curve(0.5, 0.505, 0.509)), "not called the best"


def test_one_bad_evaluation_does_not_end_a_smoothed_run() -> None:
    rising = [0.30 + 0.02 * i for i in range(12)]
    rising[6] -= 0.05
    assert first_stop(Plateau(metric="eval/greedy/accuracy"), curve(*rising)) is None
    assert should_stop(NoStop(), curve(0.9, 0.1, 0.0)) == ""
