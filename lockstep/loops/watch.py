"""What a run concludes from its evaluations: whether to stop, and whether training and evaluation have parted."""

from __future__ import annotations

from lockstep.config.evaluate import DECIDING, NONDET
from lockstep.config.schema import Drops, NoStop, Plateau, Recipe
from lockstep.evaluate.stopping import Point, diverges, should_stop
from lockstep.loops.journal import Journal
from lockstep.track.writer import read_metrics
from lockstep.types import Metrics

REWARD = "reward/mean"


class Watch:
    """Remembers the run's rewards and scores, those of earlier attempts included."""

    def __init__(self, recipe: Recipe, journal: Journal, start: int) -> None:
        self._recipe, self._journal = recipe, journal
        self._values: dict[str, dict[int, float]] = {}
        self.over = ""
        """Why the run is to stop; "" while it goes on."""
        for row in read_metrics(journal.run):
            if row.step <= start:  # later rows are of an attempt that this one does not continue
                self._remember(row.step, row.metrics)

    def note(self, step: int, metrics: Metrics) -> None:
        """Take in what was measured after `step`; says why the run is over, and warns if a probe parts from the reward."""
        self._remember(step, metrics)
        if not any(name.startswith("eval/") for name in metrics):
            return
        for name in self._probes():
            if name in metrics and (why := diverges(self._points(REWARD), self._points(name))):
                self._journal.warn(f"{name}: {why}", step=step)
        match self._recipe.eval.stop:
            case Drops() | Plateau() as rule if rule.metric in metrics and step < self._recipe.steps:
                self.over = should_stop(rule, self._points(rule.metric))
            case Drops() | Plateau() | NoStop():
                pass
        if self.over:
            self._journal.event("early_stop", self.over, step=step)
            self._journal.say(f"stopping after step {step} of {self._recipe.steps}: {self.over}")

    def _probes(self) -> list[str]:
        settings = self._recipe.eval
        roles = [one.role for one in settings.sets if one.role in DECIDING]
        modes = [mode.name for mode in settings.modes if not mode.name.startswith(NONDET)]
        return [f"eval/{settings.score_name(role, mode)}/accuracy" for role in roles for mode in modes]

    def _remember(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name == REWARD or name.startswith("eval/"):
                self._values.setdefault(name, {})[step] = value

    def _points(self, name: str) -> list[Point]:
        return [Point(step, value) for step, value in sorted(self._values.get(name, {}).items())]


def last_evaluated(recipe: Recipe, journal: Journal) -> int:
    """The newest step whose evaluation is recorded: the run's last one, unless a rule stopped it before."""
    rows = [row.step for row in read_metrics(journal.run) if any(name.startswith("eval/") for name in row.metrics)]
    return max(rows, default=recipe.steps)
