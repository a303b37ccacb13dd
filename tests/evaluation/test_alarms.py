from __future__ import annotations

import dataclasses

from lockstep.evaluation.alarms import ceiling, identity_alarms, reading, reply_alarms, still_reason, untrained_alarm
from lockstep.evaluation.estimates import estimate
from lockstep.types import Score
from tests.evaluation.scores import score

A, B = "a" * 16, "b" * 16


def with_replies(base: Score, **changes: list[object]) -> Score:
    """The score with a field of its first results set to the values given."""
    results = list(base.results)
    for name, values in changes.items():
        for i, value in enumerate(values):
            results[i] = dataclasses.replace(results[i], **{name: value})
    return dataclasses.replace(
        base, results=tuple(results), truncated=sum(r.truncated for r in results) / len(results),
        unscored=sum(r.correct is None for r in results),
    )  # fmt: skip


def sound(marks: list[bool]) -> Score:
    base = score(marks)
    n = len(marks)
    return with_replies(base, extracted=["7"] * n, method=["boxed"] * n, boxed=[True] * n)


def test_a_sound_score_raises_nothing() -> None:
    assert reply_alarms(sound([True, False] * 20)) == []


def test_cut_off_replies_are_counted_among_the_wrong_ones() -> None:
    cut = with_replies(sound([True] * 20 + [False] * 20), truncated=[False] * 20 + [True] * 8)
    (alarm,) = reply_alarms(cut)
    assert alarm.startswith("8 of 40 replies (20%) were cut off at 16 tokens, 8 of the 20 wrong ones among them")
    assert reply_alarms(with_replies(sound([False] * 40), truncated=[True] * 2)) == []  # 5 % is not above 5 %


def test_replies_without_an_answer_set_a_ceiling() -> None:
    blind = with_replies(sound([False] * 10 + [True] * 30), extracted=[None] * 6, truncated=[True])
    (alarm,) = reply_alarms(blind)
    assert alarm.startswith(
        "no answer was found in 6 of 40 replies (15%, 1 of them cut off), so the score cannot exceed 85.0%"
    )
    r = reading(blind.results)
    assert (r.unparsed, r.unparsed_truncated, ceiling(blind)) == (6, 1, 0.85)
    nothing = with_replies(sound([False] * 4), extracted=[None] * 4, method=["none"] * 4)
    assert ceiling(nothing) == 0.0  # a model that is never understood is the worst case, not an unknown one
    silent = score([True, False, False])
    assert reading(silent.results).unparsed_rate is None  # a verifier that never says what it read


def test_the_ceiling_is_of_the_estimate_that_the_score_is() -> None:
    """One readable reply of two is enough for pass@2, and has the only vote of a majority."""
    half = with_replies(score([[False, False]] * 4), extracted=["7", None] * 4, method=["boxed", "none"] * 4)
    assert half.accuracy == 0.0
    assert "the score cannot exceed 50.0%" in reply_alarms(half)[0]
    for name in ("pass@2", "maj@2"):
        named = estimate(half.results, name, half.samples)
        assert "the score cannot exceed 100.0%" in reply_alarms(dataclasses.replace(half, estimates=(named,)))[0]


def test_the_ceiling_is_not_rounded_below_what_can_be_reached() -> None:
    one = with_replies(sound([True, *[False] * 7]), extracted=["7", *[None] * 7])
    assert one.accuracy == 0.125
    assert "the score cannot exceed 12.5%" in reply_alarms(one)[0]


def test_an_environment_has_no_answer_to_find() -> None:
    moves = with_replies(score([False] * 8), method=["environment"] * 8, extracted=[None] * 8)
    assert reply_alarms(moves) == []
    assert reading(moves.results).unparsed_rate is None
    some = with_replies(score([False] * 8), method=["environment"] * 8, extracted=["7", *[None] * 7])
    assert "no answer was found in 7 of 8 replies" in reply_alarms(some)[0]  # it hands answers in, and these did not


def test_a_mix_counts_only_the_replies_in_which_an_answer_is_looked_for() -> None:
    """Those that a user's grader marks, or an environment, have none to find, and may all be right."""
    for silent in ("", "environment"):
        mixed = with_replies(
            score([False] * 8), method=[silent] * 6 + ["boxed", "none"], extracted=[None] * 6 + ["7", None]
        )
        (alarm,) = reply_alarms(mixed)
        assert alarm.startswith("no answer was found in 1 of 8 replies (12%, 0 of them cut off)")
        assert "the score cannot exceed 87.5%" in alarm


def test_the_boxed_rate_has_its_interval() -> None:
    unboxed = with_replies(sound([True] * 40), boxed=[False] * 4)
    (alarm,) = reply_alarms(unboxed)
    assert alarm.startswith("boxed rate 90% [77%, 96%] is below 95%")


def test_unscored_replies_are_named() -> None:
    alarms = reply_alarms(with_replies(score([True, None, True]), error=[None, "the judge is not at home"]))
    assert alarms == ["1 replies could not be scored and are left out, the first: item/1 (the judge is not at home)"]


def twin(base: Score, **conditions: object) -> Score:
    changed = dataclasses.replace(base.conditions, **conditions)  # type: ignore[arg-type]
    return dataclasses.replace(base, conditions=changed)


def test_identical_replies_name_the_cause() -> None:
    base = score([True, False, True] * 7)
    (weights,) = identity_alarms([("base", base), ("step 20", twin(base, weights=B))])
    assert weights.startswith(
        "base and step 20, greedy: weights not loaded? All 21 replies are the same, word for word"
    )
    (few,) = identity_alarms([("base", score([True])), ("step 20", twin(score([True]), weights=B))])
    assert "not loaded" not in few
    assert "so few replies often are" in few
    (numerics,) = identity_alarms([("w4a4", twin(base, numerics="mxfp4-w4a4")), ("bf16", twin(base, numerics="bf16"))])
    assert "numerics not applied?" in numerics
    assert "mxfp4-w4a4 and one in bf16" in numerics


def test_what_may_be_identical_is_no_alarm() -> None:
    base = score([True, False, True])
    assert identity_alarms([("one", base), ("again", base)]) == []
    assert identity_alarms([("greedy", base), ("sampled", twin(base, weights=B, mode="sampled(T=1)"))]) == []
    other = dataclasses.replace(base.results[0], text="something else")
    assert (
        identity_alarms(
            [("a", base), ("b", dataclasses.replace(twin(base, weights=B), results=(other, *base.results[1:])))]
        )
        == []
    )


def test_trained_weights_that_are_the_bases_are_an_alarm() -> None:
    base = score([True])
    assert "after 20 steps the weights are still those of the base" in untrained_alarm(
        base, dataclasses.replace(base, step=20)
    )
    late = dataclasses.replace(base, step=20)
    equal = untrained_alarm(base, late, still_reason([{"reward/zero_std_groups": 1.0, "grad/norm": 0.0, "lr": 1e-6}]))
    assert "within every group all rewards were equal" in equal
    assert "loaded in place" not in equal
    moved = still_reason(
        [{"reward/zero_std_groups": 1.0}, {"reward/zero_std_groups": 0.5, "grad/norm": 1.0, "lr": 1e-6}]
    )
    assert "although some steps had a gradient: was the base loaded" in untrained_alarm(base, late, moved)
    assert untrained_alarm(base, base) == ""
    assert untrained_alarm(base, score([True], weights=B, step=20)) == ""
    assert untrained_alarm(late, late) == ""  # the first of the two is no base


def test_a_cause_that_the_metrics_show_is_not_taken_for_wrong_weights() -> None:
    """A critic's warm-up, replies of which none carries loss, and a control with a learning rate of 0 leave weights alone."""
    differ = {"reward/zero_std_groups": 0.0, "batch/optimizer_steps": 1.0, "lr": 1e-6}
    assert "only the critic was trained" in str(still_reason([{"batch/optimizer_steps": 0.0, "critic/lr": 1e-5}] * 2))
    assert "no reply could carry loss" in str(still_reason([differ | {"grad/norm": 0.0}] * 2))
    assert still_reason([differ | {"grad/norm": 1.0, "lr": 0.0}] * 2) == "the learning rate was 0 at every step"
    assert still_reason([{"grad/norm": 2.0, "lr": 1e-5}]) == ""  # supervised: there are no groups
    assert still_reason([{"reward/zero_std_groups": 1.0, "grad/norm": 0.1}]) == ""  # of the KL term
    assert still_reason([]) is None
