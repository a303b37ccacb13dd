"""Checks before an expensive run: how many replies have the answer format, and how many groups have right and wrong replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import EvaluationError
from lockstep.evaluation.alarms import BOXED
from lockstep.evaluation.estimates import by_item, estimate
from lockstep.evaluation.intervals import Interval, wilson
from lockstep.types import Estimate, ItemResult

HARD, EASY = 0.05, 0.9
"""Solve rates below which groups hardly ever have a right reply, and above which hardly ever a wrong one."""
MIXED = 0.5
"""Share of mixed groups that is worth its cost: other groups carry no gradient if rewards are compared within a group."""


@dataclass(frozen=True, slots=True)
class FormatProbe:
    """Counts of replies that have the answer where the verifier looks for it."""

    what: str
    """The property: "boxed", or "answer found" if the verifier does not look for boxes."""
    good: int
    replies: int
    interval: Interval
    complete: int
    """Number of replies that were not cut off."""
    good_complete: int
    right: int
    """Number of right replies among those with the format: reasoning, apart from format."""

    @property
    def rate(self) -> float:
        return self.good / self.replies

    @property
    def passed(self) -> bool:
        """True if the rate is at least 95 %. `sure` tells whether the number of replies is large enough."""
        return self.rate >= BOXED

    @property
    def sure(self) -> bool:
        """True if the rule holds, or fails, for every rate in the 95 % interval."""
        return self.interval.low >= BOXED or self.interval.high < BOXED


def probe_format(results: Sequence[ItemResult]) -> FormatProbe:
    """Measure the format. Raises EvaluationError without replies, or for a verifier that does not report what it read."""
    if not results:
        raise EvaluationError(
            "there are no replies whose format could be measured", where="probe format", fix="set --items to 1 or more"
        )
    boxes = any(r.boxed is not None for r in results)
    if not boxes and not any(r.method or r.extracted is not None for r in results):
        raise EvaluationError(
            "the verifier reports neither boxes nor the answer that it read, so there is no format to measure",
            where="probe format",
            fix="let the verifier return Grade.extracted or the metric `boxed`, or use a built-in verifier",
        )
    good = [r for r in results if (r.boxed if boxes else r.extracted is not None)]
    complete = [r for r in results if not r.truncated]
    return FormatProbe(
        what="boxed" if boxes else "answer found",
        good=len(good),
        replies=len(results),
        interval=wilson(len(good), len(results)),
        complete=len(complete),
        good_complete=sum(not r.truncated for r in good),
        right=sum(bool(r.correct) for r in good),
    )


def format_lines(probe: FormatProbe) -> list[str]:
    """Return the verdict of the rule, its certainty, and conclusions from the other numbers."""
    low, high = probe.interval.low, probe.interval.high
    lines = [
        f"{probe.what}: {probe.good} of {probe.replies} replies, {probe.rate:.1%} [{low:.1%}, {high:.1%}]",
        f"of the {probe.complete} replies that were not cut off: {probe.good_complete} {probe.what}",
        f"right, of those with the format: {probe.right} of {probe.good}",
    ]
    word = "go" if probe.passed else "no-go"
    if probe.sure:
        lines.append(
            f"{word}: the rate is {'at least' if probe.passed else 'below'} {BOXED:.0%}, and so is the whole interval"
        )
    else:
        lines.append(
            f"{word} by the rule (at least {BOXED:.0%}), but {probe.replies} replies cannot tell: rates from {low:.0%} to "
            f"{high:.0%} would fit. {items_to_be_sure()} replies without a miss would"
        )
    if not probe.passed:
        missing = probe.replies - probe.good
        cut = (probe.replies - probe.complete) - (probe.good - probe.good_complete)
        lines.append(
            f"{cut} of the {missing} replies without it were cut off: raise max_tokens and probe again before anything else"
            if 2 * cut > missing
            else "show the format first: chat.suffix, chat.examples, or a short SFT"
        )
    return lines


def items_to_be_sure() -> int:
    """Return the number of replies, all good, whose interval is above the rule."""
    n = 1
    while wilson(n, n).low < BOXED:
        n += 1
    return n


@dataclass(frozen=True, slots=True)
class Headroom:
    """Statistics of groups of a task's questions for a model."""

    samples: int
    passes: tuple[Estimate, ...]
    """Estimates pass@1, pass@2, pass@4 … pass@n, and of the recipe's group size."""
    mixed: tuple[tuple[int, float], ...]
    """By group size, the share of groups with both right and wrong replies; unbiased, from n samples of each item."""
    never: float
    """Share of items that no sample solved."""
    always: float

    @property
    def solve_rate(self) -> float:
        return self.passes[0].value


def probe_headroom(results: Sequence[ItemResult], samples: int, group: int = 1) -> Headroom:
    """Measure the headroom, also of groups of `group` if there are as many samples.

    Raises EvaluationError below two samples per item, or if no item has all samples scored.
    """
    if samples < 2:
        raise EvaluationError(
            "headroom needs at least 2 samples of each question",
            where="probe headroom",
            fix="set --samples to 8 or more",
        )
    marks = [[bool(r.correct) for r in replies if r.correct is not None] for replies in by_item(results).values()]
    full = [one for one in marks if len(one) == samples]
    if not full:
        raise EvaluationError(
            "each question has a sample that the verifier could not score",
            where="probe headroom",
            fix="correct the verifier, so that it scores all replies",
        )
    sizes = sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), min(group, samples), samples})
    return Headroom(
        samples=samples,
        passes=tuple(estimate(results, f"pass@{k}", samples) for k in sizes),
        mixed=tuple((k, sum(mixed_chance(samples, sum(one), k) for one in full) / len(full)) for k in sizes if k > 1),
        never=sum(not any(one) for one in full) / len(full),
        always=sum(all(one) for one in full) / len(full),
    )


def mixed_chance(n: int, right: int, group: int) -> float:
    """Return the unbiased chance that a group has both right and wrong replies, from n samples of which `right` are right."""
    total = math.comb(n, group)
    return 1 - math.comb(right, group) / total - math.comb(n - right, group) / total


def headroom_lines(probe: Headroom, group: int) -> list[str]:
    """Return the numbers, and advice for a recipe that takes `group` samples of a prompt."""
    from lockstep.evaluation.table import estimate_line

    top = probe.passes[-1]
    lines = [
        *(estimate_line(one) for one in probe.passes),
        f"headroom: {100 * (top.value - probe.solve_rate):.1f} points from {probe.passes[0].name} to {top.name}",
        "mixed groups: " + ", ".join(f"{share:.0%} of groups of {size}" for size, share in probe.mixed),
        f"items that no sample solved {probe.never:.0%}, that every sample solved {probe.always:.0%}",
    ]
    return [*lines, *(f"advice: {advice}" for advice in advise(probe, group))]


def advise(probe: Headroom, group: int) -> list[str]:
    """Return advice on group size and difficulty, at least one sentence."""
    rate, mixed = probe.solve_rate, dict(probe.mixed)
    if group == 1:
        return [_advise_alone(rate)]
    if rate < HARD:
        return [
            f"the solve rate is {rate:.1%}, below {HARD:.0%}: most groups have nothing right in them. Take easier questions or a "
            "curriculum, warm up by SFT, or draw larger groups"
        ]
    if rate > EASY:
        return [
            f"the solve rate is {rate:.1%}, above {EASY:.0%}: most groups have nothing wrong in them. Take harder questions"
        ]
    enough = next((size for size, share in probe.mixed if share >= MIXED), None)
    now = mixed.get(group)
    if enough is None:
        return [
            f"even of groups of {probe.samples} fewer than {MIXED:.0%} are mixed: leave out what every or no sample solves "
            f"(never solved {probe.never:.0%}, always {probe.always:.0%}), or turn on algorithm.dynamic_sampling"
        ]
    if now is not None and now < MIXED:
        return [f"samples_per_prompt={group} gives {now:.0%} mixed groups; {enough} would give {mixed[enough]:.0%}"]
    share = f" ({now:.0%} mixed)" if now is not None else ""
    return [
        f"the difficulty fits: samples_per_prompt={group}{share} is enough, {enough} is the smallest measured that is"
    ]


def _advise_alone(rate: float) -> str:
    if rate < HARD:
        then = "hardly any reply is right: take easier questions or a curriculum, or warm up by SFT"
    else:
        then = "hardly any reply is wrong: take harder questions" if rate > EASY else "the difficulty fits"
    return f"mixed groups are not applicable to samples_per_prompt=1; the solve rate is {rate:.1%}, {then}"
