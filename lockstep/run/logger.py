"""Output of a run: metrics and events, console and log, trackers. One object, so that the loop needs one line for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import psutil

from lockstep.config.schema import Recipe
from lockstep.device import wait
from lockstep.health.spikes import Spike
from lockstep.track.console import Console
from lockstep.track.jsonl import JsonlFile
from lockstep.track.rundir import RunDirectory
from lockstep.track.sinks import Sender, build_sinks, reason
from lockstep.track.text import reading_line
from lockstep.track.trackers import Sample
from lockstep.track.writer import RunWriter, read_metrics
from lockstep.types import Group, Metrics, Proof, Rollout


class RunLogger:
    """Opens everything that `recipe.track` names for a run whose lock this process holds."""

    def __init__(self, run: RunDirectory, recipe: Recipe, start: int = 0) -> None:
        self.run = run
        self.writer = RunWriter(run)
        self.console = Console(run.log_path, ranges=recipe.health.ranges)
        self.beat: Callable[[], None] = lambda: None
        """Called at progress within a phase."""
        self._track = recipe.track
        settings = recipe.model_dump(mode="json")
        self._sinks: list[Sender] = []
        try:
            self._sinks = build_sinks(
                recipe.track,
                run,
                recipe.name,
                settings,
                on_failure=lambda name, why: self.warn(
                    f"the tracker {name} is left behind: {reason(why)}; send the rest later: lockstep track sync {run.path}"
                ),
                start=start,
            )
        except BaseException:
            self.close()
            raise

    def step(self, step: int, metrics: Metrics, proof: Proof | None) -> None:
        """Store one step's numbers and print its line."""
        self.console.step(self.writer.step(step, metrics, proof))
        for sink in self._sinks:
            sink.log(step, metrics)

    def add(self, step: int, metrics: Metrics, proof: Proof | None = None) -> None:
        """Add metrics to a step that is already logged."""
        self.writer.step(step, metrics, proof)

    def at_start(self, step: int, metrics: Metrics, proof: Proof) -> None:
        """Log the evaluation of the weights that the attempt began with: row 0, or the rest of a step's row after a stop."""
        row = next((row for row in read_metrics(self.run) if row.step == step), None)
        before = row.metrics if row and step else {}
        if not metrics.keys() <= before.keys():
            self.writer.step(step, before | metrics, proof)
            for sink in self._sinks:
                sink.log(step, metrics, more=True)

    def event(self, kind: str, message: str, *, step: int | None = None, **facts: object) -> None:
        self.writer.event(kind, message, step=step, **facts)

    def spike(self, spike: Spike) -> None:
        """Store a spike with its rows, and name it in the log; the first one on the console."""
        first = not self.run.spikes_path.exists()
        with JsonlFile(self.run.spikes_path) as file:
            file.append({"attempt": self.run.attempt, **asdict(spike)})
        self.event("spike", spike.line, step=spike.step)
        text = f"step {spike.step}, update {spike.update}: {spike.line}"
        self.console.message(
            f"warning: {text}\n  further ones: `lockstep diagnose {self.run.path}`" if first else text, shown=first
        )

    def progress(self, phase: str, done: int = 0, of: int = 0) -> None:
        """Show how far a phase is, and that it moves."""
        self.beat()
        self.console.phase(phase, done, of)

    def replies(self, step: int, groups: Sequence[Group]) -> None:
        """Show the best and the worst reply of one prompt on the terminal, every few steps."""
        every = self._track.replies_every
        if every and (step == 1 or step % every == 0):
            self.console.replies(reply_lines(groups))
            if shown := samples(groups, self._track.samples) if self._sinks else ():
                for sink in self._sinks:
                    sink.samples(step, shown)

    def saved(self, path: Path) -> None:
        """Send a checkpoint to the trackers that take files, if the recipe asks for it."""
        for sink in self._sinks if self._track.artifacts else ():
            sink.artifact(path, f"{self.run.name}-{path.name}")

    def say(self, text: str) -> None:
        self.console.message(text)

    def note(self, text: str) -> None:
        """Write details to log.txt only."""
        self.console.message(text, shown=False)

    def warn(self, text: str, *, step: int | None = None) -> None:
        self.event("warning", text, step=step)
        self.console.message(f"warning: {text}")

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self.console.close()
        self.writer.close()


def reply_lines(groups: Sequence[Group]) -> list[str]:
    """Return a line each for the best and the worst scored reply of one prompt, of one with different rewards if there is any."""
    scored = [[one for one in group.rollouts if one.grade.reward is not None] for group in groups]
    spread = [max(rewards) - min(rewards) if (rewards := [_reward(one) for one in group]) else -1.0 for group in scored]
    chosen = sorted(scored[spread.index(max(spread))], key=_reward, reverse=True) if scored else []
    return [
        f"reply {_reward(one):g}  {reading_line(one.grade.extracted, one.grade.method, one.prompt.answer)}  {one.text.strip()}"
        for one in (chosen[:1] + chosen[-1:] if len(chosen) > 1 else chosen)
    ]


def samples(groups: Sequence[Group], prompts: int) -> list[Sample]:
    """Return the best and the worst scored reply of the first prompts."""
    found = []
    for group in groups[:prompts]:
        scored = sorted((one for one in group.rollouts if one.grade.scored), key=_reward, reverse=True)
        for place, one in enumerate(scored[:1] + scored[1:][-1:]):
            name = f"{group.prompt.id} {('best', 'worst')[place]}"
            found.append(Sample(name, [dict(turn) for turn in group.prompt.messages], one.text, one.grade.reward))
    return found


def _reward(one: Rollout) -> float:
    return one.grade.reward or 0.0


class Clock:
    """Seconds by phase of one step; repeated phases are summed. Each phase runs inside `around`, called with its name; `shows` is
    told how far it is."""

    def __init__(
        self,
        around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
        shows: Callable[[str, int, int], None] = lambda phase, done, of: None,
    ) -> None:
        self._around, self._shows = around, shows
        self._start = time.perf_counter()
        self.seconds: Metrics = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._around(phase):
            yield
            wait()
        name = f"time/{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def progress(self, phase: str) -> Callable[[int, int], None]:
        """Return a function that shows how many pieces of a phase are done."""
        return lambda done, of: self._shows(phase, done, of)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one phase to another, for work inside another phase."""
        for phase, moved in ((source, -seconds), (target, seconds)):
            self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + moved

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add times by their metric's name, summed over the step."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def metrics(self, counts: Mapping[str, float]) -> Metrics:
        """Return times, throughputs and resident memory of the step so far."""
        times = self.seconds | {"time/step": time.perf_counter() - self._start}
        if (trained := times["time/step"] - times.get("time/evaluate", 0.0)) > 0 and "time/grade" in times:
            times["time/grade_share"] = times["time/grade"] / trained
        times["memory/rss_gib"] = psutil.Process().memory_info().rss / 2**30
        for name, count, phase in (
            ("throughput/rollout_tokens_per_s", "batch/tokens_generated", "time/rollout"),
            ("throughput/train_tokens_per_s", "batch/tokens_trained", "time/update"),
        ):
            if times.get(phase):
                times[name] = counts.get(count, 0.0) / times[phase]
        return times
