"""The task `reasoning_gym`: questions that reasoning-gym (https://github.com/open-thought/reasoning-gym) generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.tasks.base import VerifiedTask, check_references, draw_batch, no_such_role
from lockstep.tasks.generator import QuestionDraw, Side, check_source, draw
from lockstep.types import Prompt
from lockstep.verifiers.base import Verifier, notes_of
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.gym_scores import GymScores
from lockstep.verifiers.selftest import self_test

_FIRST = 20
"""Number of questions made when the task is built, to find mistakes in its settings immediately."""


class ReasoningGym(VerifiedTask):
    """Training questions are one half of all questions, held-out questions the other; see generator.py.

    The held-out questions are the same for every seed, so scores of all runs with these settings can be compared.
    """

    def __init__(self, settings: schema.ReasoningGymTask, seed: int) -> None:
        """Build the generator. Raises TaskError if its settings are wrong or the verifier cannot grade its answers."""
        self.name = settings.dataset
        self._settings = settings
        self._seed = seed
        self._where = f"task.dataset={settings.dataset}"
        self._source = check_source(settings)
        self._first = draw(self._source, "heldout", Side.HELDOUT, _FIRST).prompts
        self.verifier, self._graded_by = self._grader(self._first)
        check_references(self.verifier, self._first, self._where)

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self._drawn.prompts, step, size, self._seed, self._where)

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return `size` held-out questions of the role id_probe, each once.

        Raises TaskError if there are fewer different ones, unless task.repeat_heldout is on: then they are repeated, as evenly
        as possible, with ids that end in #2, #3 … and `repeats` in their data.
        """
        if role != "id_probe":
            no_such_role(role, ["id_probe"], self._where)
        found = draw(self._source, "heldout", Side.HELDOUT, size).prompts
        check_references(self.verifier, found, self._where)
        if len(found) < size and not (found and self._settings.repeat_heldout):
            raise TaskError(
                f"{size} held-out questions were requested, but these settings give only {len(found)} different ones",
                where=self._where,
                fix=f"set eval.items={len(found)} (in `lockstep eval`: --items {len(found)}), or task.settings that allow more, "
                "or task.repeat_heldout=true",
            )
        return tuple(_again(found[i % len(found)], i // len(found)) for i in range(size))

    @property
    def notes(self) -> tuple[str, ...]:
        drawn = self._drawn
        return (
            f"{self.name}: graded by {self._graded_by}",
            *notes_of(self.verifier),
            f"{self.name}: {len(drawn.prompts)} different training questions of {self._settings.size} asked for, from "
            f"{drawn.draws} draws; {drawn.repeats} repeats dropped, {drawn.other_side} on the held-out side"
            + (f", {drawn.no_answer} without an answer" if drawn.no_answer else ""),
        )

    def _grader(self, first: Sequence[Prompt]) -> tuple[Verifier, str]:
        """Return the grader and its name. `first` are some questions: a verifier that fails them cannot grade this data set."""
        s, own = self._settings, GymScores(self.name, self._source.settings, partial=self._settings.partial)
        if s.scoring == "data_set":
            return own, "its own score function"
        verifier = build_verifier(s.verifier)
        # A verifier chosen in the recipe is never replaced: if it does not fit, the self-test stops the run at its start.
        undecided = s.scoring == "auto" and s.verifier == schema.NumericVerifier()
        if undecided and any(self_test(verifier, prompt) for prompt in first):
            return own, f"its own score function: {s.verifier.kind} does not fit its answers"
        return verifier, f"verifier {s.verifier.kind}"

    @cached_property
    def _drawn(self) -> QuestionDraw:
        drawn = draw(self._source, f"train {self._settings.seed}", Side.TRAIN, self._settings.size)
        check_references(self.verifier, drawn.prompts, self._where)
        return drawn


def _again(prompt: Prompt, times: int) -> Prompt:
    if times == 0:
        return prompt
    return replace(prompt, id=f"{prompt.id}#{times + 1}", data={**prompt.data, "repeats": prompt.id})
