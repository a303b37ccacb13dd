"""Combines several verifiers so that no wrong reply gets a higher reward than a right one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lockstep.types import Grade, Prompt, ReplyText
from lockstep.verifiers.base import (
    Reads,
    Verifier,
    grade_replies,
    keep_in,
    notes_of,
    reads_of,
    shown,
    unscored,
    workers_of,
)


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """A verifier with its name and its share of the reward."""

    name: str
    verifier: Verifier
    weight: float


@dataclass(frozen=True, slots=True)
class Composite:
    """Settings: config.schema.CompositeVerifier, which also says what holds for any parts and weights:

    - a reply that one part cannot score is unscored;
    - rewards are in [0, 1], and 1 exactly if every part scores 1;
    - a reply that is wrong by the first part scores less than any that is right by it (weights: the first exceeds the rest);
    - a higher score of a part never lowers the reward.
    """

    parts: Sequence[WeightedPart]
    combine: Literal["all", "weighted"]

    @property
    def workers(self) -> int:
        """Any part that grades in this process makes no use of them, and does no harm: it is pure."""
        return max(workers_of(part.verifier) for part in self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.parts for note in notes_of(part.verifier))

    def keep_in(self, folder: Path) -> None:
        for part in self.parts:
            keep_in(part.verifier, folder)

    @property
    def reads(self) -> Reads:
        return max((reads_of(part.verifier) for part in self.parts), key=get_args(Reads).index)

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return self._combined(prompt, (part.verifier.grade(prompt, reply) for part in self.parts))

    def grade_replies(self, prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        columns = [grade_replies(part.verifier, prompt, replies) for part in self.parts]
        return [self._combined(prompt, row) for row in zip(*columns, strict=True)]

    def _combined(self, prompt: Prompt, found: Iterable[Grade]) -> Grade:
        """Combine the parts' grades of one reply; the first that is unscored ends it."""
        grades: list[Grade] = []
        scores: dict[str, float] = {}
        for part, grade in zip(self.parts, found, strict=True):
            if grade.reward is None:
                return unscored(f"part {part.name}: {grade.error}")
            if self.combine == "weighted" and not 0 <= grade.reward <= 1:
                return unscored(f"part {part.name} gave {grade.reward:g} to {shown(prompt.id)}, which is not in [0, 1]")
            grades.append(grade)
            scores[f"part_{part.name}"] = grade.reward
        first = grades[0]
        reward, correct = self._reward(list(scores.values()), bool(first.right))
        metrics = {name: value for name, value in first.metrics.items() if name != "correct"} | scores
        return Grade(reward, {"correct": float(correct), **metrics}, first.extracted, first.method)

    def _reward(self, scores: Sequence[float], right: bool) -> tuple[float, bool]:
        if self.combine == "all":
            every = all(reward >= 1 for reward in scores)
            return float(every), every
        weights = [part.weight for part in self.parts]
        total = weights[0] * right + sum(w * r for w, r in zip(weights[1:], scores[1:], strict=True))
        return total / sum(weights), right
