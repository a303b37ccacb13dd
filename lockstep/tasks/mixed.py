"""The task `mixed`: several tasks in one run, with shares by weight, and curricula by solve rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from lockstep.config import schema
from lockstep.envs.programs import Programs
from lockstep.envs.runners import Runner
from lockstep.tasks.base import BuiltTask, NoQuestions, OfOthers
from lockstep.types import Group, Prompt

STEPS = 1000
"""Number of parts to which weights are rounded, so that the dealing repeats."""


@dataclass(slots=True)
class Progress:
    """Progress of a run in each task of its mix: saved with its checkpoints.

    Example: Progress({"sums": 40}, {"sums": 0.3}, {"sums": 0.2})
    """

    drawn: dict[str, int] = field(default_factory=dict)
    """Number of prompts asked so far, per task."""
    rates: dict[str, float] = field(default_factory=dict)
    """Solve rates, moving averages; a task that was not asked yet has none."""
    credit: dict[str, float] = field(default_factory=dict)
    """Prompts owed to each task, so that a small share is asked too, though not in every step."""


class MixedGrader(OfOthers, NoQuestions):
    """Grades replies to the prompts that `Mixed.apart` returns."""

    name = "grader"

    def __init__(self, graders: Mapping[str, BuiltTask]) -> None:
        self._graders, self.members = graders, tuple(graders.values())

    def own(self, prompt: Prompt) -> tuple[BuiltTask, Prompt]:
        name, _, id = prompt.id.partition("/")
        return self._graders[name], replace(prompt, id=id)


class Mixed(OfOthers):
    """Deals the prompts of a step to tasks in proportion to their weights, without randomness: every task has its share at any
    time.

    Within a task, prompts come in the order of a permutation that asks each once before any is asked again, whatever the other
    tasks do. Prompts are renamed to task/id, and their `task` is the name in the mix.
    """

    def __init__(self, settings: schema.MixedTask, tasks: Mapping[str, BuiltTask]) -> None:
        self.name = "+".join(tasks)
        self.curriculum = settings.curriculum
        self._tasks, self.members = tasks, tuple(tasks.values())
        self._weights = {name: share.weight for name, share in settings.tasks.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        total = sum(self._weights.values())
        shares = ", ".join(f"{name} {weight / total:.0%}" for name, weight in self._weights.items())
        return (*(note for task in self.members for note in task.notes), f"mix: {shares} of the prompts")

    # --- Task -----------------------------------------------------------------------------------------------------
    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """Return the prompts of a step by the weights alone, independent of what has been solved."""
        before, asked = Counter(self._dealt(step * size)), []
        for name in self._sequence(step * size, size):
            asked.append(self._prompt(name, before[name]))
            before[name] += 1
        return _distinct(asked)

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return held-out prompts of the tasks, in proportion to their weights."""
        counts = Counter(self._sequence(0, size))
        parts = {name: self._tasks[name].heldout(role, count) for name, count in counts.items()}
        return [self._named(name, prompt) for name, prompts in parts.items() for prompt in prompts]

    def own(self, prompt: Prompt) -> tuple[BuiltTask, Prompt]:
        task = self._tasks[prompt.task]
        return task, replace(prompt, id=prompt.id.partition("/")[2], task=task.name)

    def apart(self, prompt: Prompt) -> Prompt | None:
        task, own = self.own(prompt)
        graded = task.apart(own)
        return None if graded is None else replace(graded, id=f"{prompt.task}/{graded.id}")

    def programs(self, prompt: Prompt) -> Programs | None:
        task, own = self.own(prompt)
        return task.programs(own)

    def runner(self, prompt: Prompt) -> Runner | None:
        task, own = self.own(prompt)
        return task.runner(own)

    def limits(self, prompt: Prompt) -> schema.Turns:
        task, own = self.own(prompt)
        return task.limits(own)

    @property
    def plays(self) -> bool:
        """True if any of its tasks has episodes."""
        return any(task.plays for task in self.members)

    # --- curriculum -----------------------------------------------------------------------------------------------
    def deal(self, progress: Progress, size: int) -> Sequence[Prompt]:
        """Return the next `size` prompts by the shares that follow from the solve rates; counts them in `progress`."""
        weights = self.shares(progress)
        already = {name: progress.drawn.get(name, 0) for name in self._tasks}
        asked = []
        progress.credit = {name: progress.credit.get(name, 0.0) for name in self._tasks}
        for name in _smooth(weights, size, progress.credit):
            asked.append(self._prompt(name, already[name]))
            already[name] += 1
        progress.drawn = already
        return _distinct(asked)

    def learn(self, progress: Progress, groups: Iterable[Group]) -> None:
        """Update the solve rate of each task from a step's groups."""
        if self.curriculum is None:
            return
        marks: dict[str, list[float]] = {}
        for group in groups:
            for rollout in group.rollouts:
                if rollout.grade.right is not None:
                    marks.setdefault(group.prompt.task, []).append(float(rollout.grade.right))
        for name, found in marks.items():
            now, memory = sum(found) / len(found), self.curriculum.memory
            before = progress.rates.get(name, now)
            progress.rates[name] = memory * before + (1 - memory) * now

    def shares(self, progress: Progress) -> dict[str, float]:
        """Return each task's share of the prompts: its weight, less if its solve rate is outside the band. They sum to 1."""
        weights = dict(self._weights)
        band = self.curriculum
        for name, rate in progress.rates.items():
            if band is not None and not band.low <= rate <= band.high:
                weights[name] *= band.outside
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    # --- dealing --------------------------------------------------------------------------------------------------
    @cached_property
    def _period(self) -> tuple[str, ...]:
        """Return one round of the dealing by the weights, after which it repeats."""
        fractions = {name: Fraction(weight).limit_denominator(STEPS) for name, weight in self._weights.items()}
        fractions = {name: max(part, Fraction(1, STEPS)) for name, part in fractions.items()}
        total = sum(fractions.values())
        parts = {name: max(1, round(part / total * STEPS)) for name, part in fractions.items()}
        weights = {name: float(part) for name, part in parts.items()}
        return tuple(_smooth(weights, sum(parts.values()), dict.fromkeys(parts, 0.0)))

    def _sequence(self, start: int, size: int) -> list[str]:
        return [self._period[index % len(self._period)] for index in range(start, start + size)]

    def _dealt(self, count: int) -> dict[str, int]:
        """Return how many of the first `count` prompts each task has."""
        rounds, rest = divmod(count, len(self._period))
        whole, part = Counter(self._period), Counter(self._period[:rest])
        return {name: rounds * whole[name] + part[name] for name in self._tasks}

    def _prompt(self, name: str, number: int) -> Prompt:
        (prompt,) = self._tasks[name].batch(number, 1)  # batches of one: number k of the task's permutations
        return self._named(name, prompt)

    def _named(self, name: str, prompt: Prompt) -> Prompt:
        return replace(prompt, id=f"{name}/{prompt.id}", task=name)


def _smooth(weights: Mapping[str, float], size: int, credit: dict[str, float]) -> list[str]:
    """Return `size` names, each in proportion to its weight and spread as evenly as possible (smooth weighted round robin).

    `credit` holds the prompts owed to each, and is updated.
    """
    total = sum(weights.values())
    names = []
    for _ in range(size):
        for name, weight in weights.items():
            credit[name] += weight
        chosen = max(credit, key=lambda name: credit[name])
        credit[chosen] -= total
        names.append(chosen)
    return names


def _distinct(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts; repeated ones (where a task's permutation ends and the next begins) get new ids."""
    times: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        times[prompt.id] += 1
        again = times[prompt.id]
        id = prompt.id if again == 1 else prompt.id.replace("/", f"~{again}/", 1)
        found.append(replace(prompt, id=id))
    return found
