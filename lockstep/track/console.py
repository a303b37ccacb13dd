"""What a person sees of a run: one line a step, a progress bar if the output is a terminal, and all of it in log.txt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from lockstep.track.catalogue import Judge
from lockstep.track.files import Appender
from lockstep.track.text import one_line, plain_table, visible
from lockstep.track.writer import StepRecord

RECENT = 20
"""Steps over which the time of a step is averaged for the ETA."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric on the step line."""

    label: str
    name: str
    form: str


SHOWN = (
    Shown("reward", "reward/mean", ".2f"),
    Shown("correct", "answer/correct", ".2f"),
    Shown("len", "length/mean", ".1f"),
    Shown("trunc", "length/truncated", ".2f"),
    Shown("loss", "loss/policy", ".3f"),
    Shown("val", "validation/loss", ".3f"),
    Shown("grad", "grad/norm", ".2f"),
    Shown("lr", "lr", ".1e"),
    Shown("Δlogp", "mismatch/mean_abs_dlogp", ".4f"),
    Shown("grading", "time/grade_share", ".1%"),
)
TIMES = (
    Shown("rollout", "time/rollout", ".1f"),
    Shown("update", "time/update", ".1f"),
    Shown("sync", "time/sync", ".1f"),
    Shown("val", "time/validate", ".1f"),
    Shown("eval", "time/evaluate", ".1f"),
    Shown("save", "time/save", ".1f"),
)
LEAST_TIME_S = 0.05
"""Shorter phases are left off the line."""


class Console:
    """Prints a run's progress and appends it to `log` (log.txt; None writes none). Messages are plain text, not markup.

    An output that is closed (`| head`) or full ends the printing, not the run; log.txt goes on and says so.
    `terminal` forces or forbids the progress bar; None asks the stream. `clock` is in seconds.
    """

    def __init__(
        self,
        log: Path | None,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._log = None if log is None else Appender(log)
        self._printing = True
        self._progress: Progress | None = None
        self._total = 0
        self._times: list[float] = []
        self._judge = Judge()

    def start(self, total_steps: int, start_step: int = 0) -> None:
        """Begin the count: `start_step` steps are already done (0, or the step that the run resumes from)."""
        self._total = total_steps
        self._times = [self._clock()]
        if self._terminal and self._printing:
            rich = RichConsole(file=self._stream, force_terminal=True)
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), _EtaColumn())
            self._progress = Progress(*columns, console=rich, transient=True, auto_refresh=False)
            self._progress.add_task("steps", total=total_steps, completed=start_step, eta="")
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Print one step and move the bar."""
        self._times = [*self._times[-RECENT:], self._clock()]
        eta = self._eta(record.step)
        warned = [f"{name}={record.metrics[name]:.3g}" for name in self._judge.step(record.step, record.metrics)]
        self._emit(step_line(record, self._total, eta, warned))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record.step, eta=eta, refresh=True)

    def message(self, text: str) -> None:
        """Print text; control characters in it are shown, not obeyed."""
        self._emit(visible(text))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in aligned text, the same on a terminal and in log.txt."""
        self._emit(plain_table(title, columns, rows))

    def close(self) -> None:
        """Take the bar away and close log.txt. Twice is once."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _eta(self, step: int) -> str:
        if len(self._times) < 2 or not self._total:
            return ""
        per_step = fmean(after - before for before, after in zip(self._times, self._times[1:], strict=False))
        return duration(per_step * max(self._total - step, 0))

    def _emit(self, text: str) -> None:
        if self._log is not None:
            stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            lines = "".join(f"{stamp}  {line}\n" for line in text.split("\n"))
            self._log.append(lines.encode("utf-8", "backslashreplace"), flush=False)
        if not self._printing:
            return
        try:
            if self._progress is not None:
                self._progress.console.print(Text(encodable(text, self._stream)), soft_wrap=True)
            else:
                self._stream.write(encodable(text, self._stream) + "\n")
                self._stream.flush()
        except OSError as error:
            self._printing, self._progress = False, None
            _discard(self._stream)
            gone = isinstance(error, BrokenPipeError)
            why = "nobody reads the output any more" if gone else f"the output cannot be written ({error.strerror})"
            self._emit(f"{why}: from here on only this file is written")


def step_line(record: StepRecord, total: int, eta: str, warned: Sequence[str]) -> str:
    """Example: "step  12/50  reward 0.41  len 8.3  lr 1.0e-05  rollout 1.2s update 2.0s  eta 1m12s  ! answer/boxed=0.5" """
    metrics = record.metrics
    width = len(str(total))
    parts = [f"step {record.step:>{width}}/{total}"]
    parts += [f"{one.label} {metrics[one.name]:{one.form}}" for one in SHOWN if one.name in metrics]
    times = [
        f"{one.label} {metrics[one.name]:{one.form}}s" for one in TIMES if metrics.get(one.name, 0) >= LEAST_TIME_S
    ]
    parts += [" ".join(times)] if times else []
    parts += [f"eval {mode} {value:.3f}" for mode, value in _accuracies(metrics)]
    parts += [f"eta {eta}"] if eta else []
    parts += ["! " + " ".join(warned)] if warned else []
    return one_line("  ".join(parts))


def duration(seconds: float) -> str:
    """Examples: 8s, 1m12s, 3h05m, 2d04h"""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def encodable(text: str, stream: TextIO) -> str:
    """The text with characters that the stream's encoding lacks replaced: Δ by d, others by escapes."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("Δ", "d").replace("─", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text


def _discard(stream: TextIO) -> None:
    """Send what is still buffered, and all that follows, to nowhere: else the run would fail at exit, when it is flushed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _accuracies(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    parts = [(name.split("/"), value) for name, value in metrics.items()]
    return [(path[1], value) for path, value in parts if len(path) == 3 and path[0] == "eval" and path[2] == "accuracy"]


class _EtaColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        eta = task.fields.get("eta")
        return Text(f"eta {eta}" if eta else "")
