"""Judges a run by its own metrics: when to warn, when to stop, and when training and evaluation diverge."""

from __future__ import annotations

from collections.abc import Set
from copy import deepcopy
from pathlib import Path

from lockstep.build.disk import checkpoint_gib
from lockstep.config.schema import Drops, NoStop, Plateau, Recipe
from lockstep.errors import HealthStop, LearnerError
from lockstep.evaluation.stopping import Point, diverges, should_stop
from lockstep.health.judge import Alarm, HealthJudge
from lockstep.health.smoke import COLUMNS, SmokeGate
from lockstep.health.trends import REWARD, deciding
from lockstep.run.callbacks import call, load_callbacks
from lockstep.run.logger import RunLogger
from lockstep.track.writer import read_metrics
from lockstep.types import Metrics


class Monitor:
    """Record of the run's numbers, including earlier attempts. `model`: the folder that the run started from."""

    def __init__(self, recipe: Recipe, logger: RunLogger, start: int, model: Path) -> None:
        self._recipe, self._logger = recipe, logger
        self._judge = HealthJudge(recipe, checkpoint_gib(recipe, model))
        self._smoke = SmokeGate(recipe)
        self._broken: list[Alarm] = []
        self._step = start
        self._values: dict[str, dict[int, float]] = {}
        self._callbacks = load_callbacks(recipe.health.callbacks)
        self._history: list[tuple[int, Metrics]] = []
        self._failure: LearnerError | None = None
        self.over = ""
        """Reason why the run must stop; "" while it continues."""
        self._stored: Metrics = {}
        """The row of the step that the attempt begins with, which `begin` takes in."""
        for row in read_metrics(logger.run):
            if row.step < start:  # later rows belong to an attempt that this one does not continue
                self._take(row.step, row.metrics)  # its earlier warnings are not repeated
            elif row.step == start:
                self._stored = row.metrics

    def begin(self, metrics: Metrics) -> None:
        """Take in the step that the attempt begins with, once: its stored row, and the metrics measured for it at the start.

        What the row had already is judged silently, as an earlier attempt has told it.
        """
        step, stored = self._step, self._stored
        if not (stored or metrics):
            return
        known = {alarm.rule.name for alarm in deepcopy(self._judge).step(step, stored)}
        new = metrics.keys() - stored.keys()
        for alarm in self._take(step, stored | metrics):
            if new and alarm.rule.name not in known:
                self._report(alarm)
        if any(name.startswith("eval/") for name in metrics):
            self._note_scores(step, metrics, new)  # eval.stop ends a run that it has ended before again
        if new and self._callbacks and step:
            self._call_back(step)

    def note(self, step: int, metrics: Metrics) -> str:
        """Take in the metrics measured after `step`; warns of broken health rules, and of a held-out score that diverges
        from the reward.

        Returns the reason why the run must stop, "" if it continues.
        """
        self._step = step
        alarms = self._take(step, metrics)
        if table := self._smoke.due(step):
            self._logger.event("smoke", f"the first {step} steps", step=step, rows=table)
            self._logger.console.table(f"smoke gate: the first {step} steps", COLUMNS, table)
        for alarm in alarms:
            self._report(alarm)
        if any(name.startswith("eval/") for name in metrics):
            self._note_scores(step, metrics, metrics.keys())
        if self._callbacks and step:
            self._call_back(step)
        return self.over

    def _take(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Count a step and return its alarms, those that stop the run last."""
        if self._callbacks and step:
            self._history.append((step, dict(metrics)))
        for name, value in metrics.items():
            if name == REWARD or name.startswith("eval/"):
                self._values.setdefault(name, {})[step] = value
        alarms = sorted(self._judge.step(step, metrics), key=lambda alarm: alarm.setting.tier == "stop")
        self._smoke.take(step, metrics, alarms)
        return alarms

    def _call_back(self, step: int) -> None:
        """Call the user's functions; an error ends the run once this step is saved."""
        try:
            why = call(self._callbacks, self._history)
        except LearnerError as error:
            self._failure, why = error, str(error)
        if why and step < self._recipe.steps:
            self._end(step, self.over or why, why)

    def _note_scores(self, step: int, metrics: Metrics, new: Set[str]) -> None:
        for name in (f"{score}/accuracy" for score in deciding(self._recipe)):
            if name in new and (why := diverges(self._points(REWARD), self._points(name))):
                self._logger.warn(f"{name}: {why}", step=step)
        match self._recipe.eval.stop:
            case Drops() | Plateau() as rule if rule.metric in metrics and step < self._recipe.steps:
                if why := should_stop(rule, self._points(rule.metric)):
                    self._end(step, why, why)
            case Drops() | Plateau() | NoStop():
                pass

    def _end(self, step: int, over: str, why: str) -> None:
        self.over = over
        self._logger.event("early_stop", why, step=step)
        self._logger.say(f"stopping after step {step} of {self._recipe.steps}: {why}")

    def require_healthy(self) -> None:
        """Raise HealthStop if a rule ended the run: the rule, its numbers, the remedy, and how to continue without the rule."""
        if self._failure is not None:
            raise self._failure
        if not self._broken:
            return
        off = " ".join(alarm.off for alarm in self._broken)
        rules = " and ".join(alarm.rule.name for alarm in self._broken)
        advice = "; ".join(alarm.advice for alarm in self._broken if alarm.advice)
        raise HealthStop(
            "; and ".join(alarm.what for alarm in self._broken),
            where=f"step {self._step}",
            fix=f"{advice}{'. ' if advice else ''}A checkpoint was saved; to continue with the health rule {rules} switched off: "
            f"lockstep train --resume {self._logger.run.path} {off}",
        )

    def _report(self, alarm: Alarm) -> None:
        """Report the alarm and, unless the last step is done, stop the run."""
        stops = alarm.setting.tier == "stop" and self._step < self._recipe.steps
        facts = {"rule": alarm.rule.name, "tier": alarm.setting.tier, "limit": alarm.limit.value}
        values = {str(one.step): one.value for one in alarm.seen}
        self._logger.event("health", alarm.what, step=self._step, values=values, **facts)
        if stops:
            self._broken.append(alarm)
            self.over = alarm.what
            self._logger.say(f"stopping after step {self._step} of {self._recipe.steps}, by the rule {alarm.place}")
        else:
            self._logger.say(f"warning: {alarm.what}{alarm.to_do}")

    def _points(self, name: str) -> list[Point]:
        return [Point(step, value) for step, value in sorted(self._values.get(name, {}).items())]


def last_evaluated(recipe: Recipe, logger: RunLogger) -> int:
    """Return the newest step whose evaluation is recorded: the run's last one, unless a rule of eval.stop ended it before."""
    rows = [row.step for row in read_metrics(logger.run) if any(name.startswith("eval/") for name in row.metrics)]
    return max(rows, default=recipe.steps)
