"""Output of a run: metrics and events, console and log, trackers. One object, so that the loop needs one line for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from lockstep.config.schema import Recipe
from lockstep.track.console import Console
from lockstep.track.rundir import RunDirectory
from lockstep.track.sinks import build_sinks
from lockstep.track.writer import RunWriter, read_metrics
from lockstep.types import Metrics, Proof, Tracker


class RunLogger:
    """Opens everything that `recipe.track` names for a run whose lock this process holds."""

    def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
        self.run = run
        self.writer = RunWriter(run)
        self.console = Console(run.log_path)
        settings = recipe.model_dump(mode="json")
        self._sinks: list[Tracker] = []
        try:
            self._sinks = build_sinks(
                recipe.track,
                run,
                recipe.name,
                settings,
                on_failure=lambda name, why: self.warn(f"{name} is off: {why}"),
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
                sink.log(step, metrics)

    def event(self, kind: str, message: str, *, step: int | None = None, **facts: object) -> None:
        self.writer.event(kind, message, step=step, **facts)

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


class Clock:
    """Seconds by phase of one step; repeated phases are summed. `begins` is called with the name of each phase."""

    def __init__(self, begins: Callable[[str], None] = lambda phase: None) -> None:
        self._begins = begins
        self._start = time.perf_counter()
        self.seconds: Metrics = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._begins(phase)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        name = f"time/{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one phase to another, for work inside another phase."""
        for phase, moved in ((source, -seconds), (target, seconds)):
            self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + moved

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add times by their metric's name, summed over the step."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def metrics(self, counts: Mapping[str, float]) -> Metrics:
        """Return times, throughputs and memory of the step so far."""
        times = self.seconds | {"time/step": time.perf_counter() - self._start}
        if (trained := times["time/step"] - times.get("time/evaluate", 0.0)) > 0 and "time/grade" in times:
            times["time/grade_share"] = times["time/grade"] / trained
        times["memory/rss_gib"] = psutil.Process().memory_info().rss / 2**30
        if torch.cuda.is_available():
            times["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
            times["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        for name, count, phase in (
            ("throughput/rollout_tokens_per_s", "batch/tokens_generated", "time/rollout"),
            ("throughput/train_tokens_per_s", "batch/tokens_trained", "time/update"),
        ):
            if times.get(phase):
                times[name] = counts.get(count, 0.0) / times[phase]
        return times
