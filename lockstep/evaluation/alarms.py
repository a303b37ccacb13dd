"""Warnings about a score: replies cut off, replies without a readable answer, or the same replies as another score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from lockstep.evaluation.brief import Brief, brief_of
from lockstep.evaluation.compare import identical_warning
from lockstep.evaluation.estimates import item_values
from lockstep.evaluation.intervals import wilson
from lockstep.types import ItemResult, Metrics, Score

TRUNCATED = 0.05
"""Share of replies cut off above which an accuracy says as much about the token budget as about the model."""
UNPARSED = 0.05
"""Share of scored replies without a readable answer above which the parser must be checked first."""
ENVIRONMENT = "environment"
"""Method of replies that an environment graded."""
BOXED = 0.95
"""Boxed rate that a model should have before it is trained by rewards for boxed answers."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts of a score's replies by how they were read."""

    replies: int
    scored: int
    boxed: int
    says_boxed: int
    """Number of replies for which the verifier says whether they have a box."""
    unparsed: int
    """Scored, but no answer was found."""
    unparsed_truncated: int
    """Unparsed replies that were cut off at the token budget."""
    truncated: int
    wrong: int
    wrong_truncated: int
    extracts: bool
    """True if the verifier says for some reply how it was read."""

    @property
    def boxed_rate(self) -> float | None:
        return self.boxed / self.says_boxed if self.says_boxed else None

    @property
    def unparsed_rate(self) -> float | None:
        """None if the verifier never says what it read."""
        return self.unparsed / self.scored if self.scored and self.extracts else None


def reading(results: Sequence[ItemResult]) -> Reading:
    """Count the replies of a score by how they were read."""
    scored = [r for r in results if r.correct is not None]
    silent = _silent(results)
    unparsed = [r for r in scored if _unread(r, silent)]
    wrong = [r for r in scored if not r.correct]
    return Reading(
        replies=len(results),
        scored=len(scored),
        boxed=sum(bool(r.boxed) for r in results),
        says_boxed=sum(r.boxed is not None for r in results),
        unparsed=len(unparsed),
        unparsed_truncated=sum(r.truncated for r in unparsed),
        truncated=sum(r.truncated for r in results),
        wrong=len(wrong),
        wrong_truncated=sum(r.truncated for r in wrong),
        extracts=any(r.method not in silent for r in results),
    )


def _silent(results: Sequence[ItemResult]) -> set[str]:
    """Return the methods that never say what was read: there is no answer to find in their replies, alone or in a mix.

    A user's grader need not say it, and an episode ends with what its environment gave, unless it hands in answers.
    """
    return {"", ENVIRONMENT} - {r.method for r in results if r.extracted is not None}


def _unread(result: ItemResult, silent: set[str]) -> bool:
    """Return whether no answer was found. A user's verifier may find a reply right without saying what it read."""
    return result.extracted is None and not result.correct and result.method not in silent


def ceiling(score: Score) -> float:
    """Return the accuracy that would be reached if every reply with a readable answer were right, by the mode's own estimate.

    It is not the share of such replies: with several samples one readable reply is enough for an item's pass@k.
    """
    silent = _silent(score.results)
    best = [r if r.correct is None else replace(r, correct=not _unread(r, silent)) for r in score.results]
    name = score.estimates[0].name if score.estimates else "avg@1"
    values = [value for value in item_values(best, name).values() if value is not None]
    return sum(values) / len(values) if values else 0.0


def reply_alarms(score: Score) -> list[str]:
    """Return a sentence for each reason why a score may not be what it seems; empty if there is none."""
    r = reading(score.results)
    found = []
    if r.truncated / r.replies > TRUNCATED:
        lm_eval = score.conditions.task.startswith("lm_eval/")
        found.append(
            f"{r.truncated} of {r.replies} replies ({r.truncated / r.replies:.0%}) were cut off at {score.conditions.max_tokens} "
            f"tokens, {r.wrong_truncated} of the {r.wrong} wrong ones among them; "
            f"a larger {'max_gen_toks of the task' if lm_eval else 'eval.max_tokens'} may change the score"
        )
    if r.unparsed_rate is not None and r.unparsed_rate > UNPARSED:
        found.append(
            f"no answer was found in {r.unparsed} of {r.scored} replies ({r.unparsed_rate:.0%}, {r.unparsed_truncated} of them "
            f"cut off), so the score cannot exceed {ceiling(score):.1%}; see lockstep audit parser"
        )
    if r.boxed_rate is not None and r.boxed_rate < BOXED:
        interval = wilson(r.boxed, r.says_boxed)
        found.append(
            f"boxed rate {r.boxed_rate:.0%} [{interval.low:.0%}, {interval.high:.0%}] is below {BOXED:.0%}: the score measures "
            "the format too; see lockstep probe format"
        )
    if score.unscored:
        first = next(result for result in score.results if result.correct is None)
        found.append(
            f"{score.unscored} replies could not be scored and are left out, the first: {first.id} ({first.error or 'no reason'})"
        )
    return found


def identity_alarms(scores: Sequence[tuple[str, Score | Brief]]) -> list[str]:
    """Return a sentence for each pair of labelled scores whose replies should differ and are the same, word for word.

    Pairs are those of one task, data, template, mode and budget with other weights or numerics.
    """
    briefs = [(label, one if isinstance(one, Brief) else brief_of(one)) for label, one in scores]
    found = []
    for (left, a), (right, b) in combinations(briefs, 2):
        one, other = a.score.conditions, b.score.conditions
        same = all(
            getattr(one, name) == getattr(other, name)
            for name in ("task", "mode", "data_hash", "template_hash", "max_tokens", "seed")
        )
        if same and a.marks.ids == b.marks.ids and a.marks.digests == b.marks.digests:
            warning = identical_warning(one, other, a.score.items * a.score.samples)
            if warning:
                found.append(f"{left} and {right}, {one.mode}: {warning}")
    return found


def untrained_alarm(base: Score, trained: Score, reason: str | None = None) -> str:
    """Return why a trained score is the base's own; "" if it is not.

    `reason`: what left the run's weights as they were (`still_reason`); "" if its steps had a gradient, None if not known.
    """
    if not (trained.step > 0 == base.step and trained.conditions.weights == base.conditions.weights):
        return ""
    head = f"after {trained.step} steps the weights are still those of the base ({base.conditions.weights})"
    if reason:
        return f"{head}: {reason}"
    if reason is None:
        return f"{head}: either no step had a gradient, or the base was loaded in place of the trained weights"
    return f"{head}, although some steps had a gradient: was the base loaded in place of the trained weights?"


def still_reason(steps: Sequence[Metrics]) -> str | None:
    """Return why none of these trained steps can have changed the policy; "" if one can have, None if that is not known."""

    def always(name: str, value: float) -> bool:
        found = [metrics[name] for metrics in steps if name in metrics]
        return bool(found) and all(one == value for one in found)

    gradients = [metrics["grad/norm"] for metrics in steps if "grad/norm" in metrics]
    if always("batch/optimizer_steps", 0):
        return (
            "no step changed the policy (batch/optimizer_steps = 0): only the critic was trained, no prompt was left to train "
            "on, or the gradient was not finite"
        )
    if always("reward/zero_std_groups", 1) and not any(gradients):
        return (
            "within every group all rewards were equal (reward/zero_std_groups = 1), which gives no gradient; take easier or "
            "harder questions, or more samples per prompt; lockstep probe headroom shows the solve rate"
        )
    if always("grad/norm", 0):
        return (
            "no step had a gradient (grad/norm = 0): all advantages were 0, or no reply could carry loss "
            "(reward/unscored, length/dropped)"
        )
    if always("lr", 0):
        return "the learning rate was 0 at every step"
    return "" if gradients else None
