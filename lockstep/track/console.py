"""The terminal output of a run: one short line for each step, and progress bars below it. log.txt has everything in full.

rich is imported only if the output is a terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TextIO

from lockstep.config.metric import Range
from lockstep.text import hide_values
from lockstep.track.catalogue import Judge, accuracies
from lockstep.track.files import Appender, Closing
from lockstep.track.text import one_line, plain_table, visible
from lockstep.track.writer import StepRecord

if TYPE_CHECKING:
    from lockstep.track.progress import Bars

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
BRIEF = ("reward", "correct", "val", "loss", "len", "grad", "trunc", "Δlogp")
"""Labels of the short line, the most important first: of a line that is too long the last ones are left out."""
WIDTH = 120
"""Longest step line on the screen, in columns; a narrower terminal has narrower lines."""
COLOURS = {"warning:": "yellow", "alarm:": "yellow", "! outside": "yellow", "stopping": "red", "reply ": "dim"}
"""Colours on a terminal of messages that begin so."""
NAMED = 3
"""Metrics that are named when they leave their healthy range; log.txt has all of a step."""
LEAST_TIME_S = 0.05
"""Shorter phases are left off the line."""


class Console(Closing):
    """Prints a run's progress and appends it to `log` (log.txt; None writes none). Messages are plain text, not markup.

    An output that is closed (`| head`) or full ends the printing, not the run; log.txt goes on and says so.
    `terminal` forces or forbids the bars; None asks the stream. `clock` is in seconds. `ranges`: see Judge.
    """

    def __init__(
        self,
        log: Path | None,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranges: Mapping[str, Range] | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._log = None if log is None else Appender(log)
        self._printing = True
        self._bars: Bars | None = None
        self._total = 0
        self._evaluations: tuple[int, ...] = ()
        self._since = 0.0
        self._times: list[float] = []
        """Seconds of the latest steps, evaluations not counted."""
        self._evaluated: list[float] = []
        """Seconds of the evaluations so far."""
        self._apart = 0.0
        """Seconds spent in evaluations since the last step."""
        self._judge = Judge(ranges)
        self._named: set[str] = set()
        """Metrics that were said to be outside their healthy range."""

    def start(self, total_steps: int, start_step: int = 0, evaluations: Sequence[int] = ()) -> None:
        """Begin the count: `start_step` steps are already done (0, or the step that the run resumes from).

        `evaluations`: the steps after which the run evaluates, for the ETA.
        """
        self._total, self._evaluations = total_steps, tuple(evaluations)
        self._times, self._since, self._apart = [], self._clock(), 0.0
        if self._terminal and self._printing:
            from lockstep.track.progress import Bars

            self._bars = Bars(self._stream, total_steps, start_step)

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """Show the present phase on its bar, and how far it is."""
        if self._bars is not None:
            self._bars.phase(name, done, of)
            self._check()

    def notice(self, text: str) -> None:
        """Tell that a signal came, from within its handler: below the bars, or at once on standard error."""
        if self._bars is not None:
            self._bars.notice(text)
        else:
            os.write(2, f"\n{text}\n".encode())

    def replies(self, lines: Sequence[str]) -> None:
        """Show replies on a terminal, each cut to a line; rollouts/ has them all."""
        if self._bars is not None:
            width = min(WIDTH, shutil.get_terminal_size().columns)
            for line in lines:
                self._emit("", one_line(line, width))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time an evaluation, which is no part of a step's time."""
        began = self._clock()
        yield
        self._evaluated.append(self._clock() - began)
        self._apart += self._evaluated[-1]

    def step(self, record: StepRecord) -> None:
        """Print one step and move the bar."""
        now = self._clock()
        self._times = [*self._times[1 - RECENT :], now - self._since - self._apart]
        self._since, self._apart = now, 0.0
        eta = self._eta(record.step)
        outside = self._judge.step(record.step, record.metrics)
        values = [f"{name}={record.metrics[name]:.3g}" for name in outside]
        width = min(WIDTH, shutil.get_terminal_size().columns) if self._terminal else WIDTH
        self._emit(
            step_line(record, self._total, eta, values), brief_line(record, self._total, eta, len(outside), width)
        )
        if new := [name for name in outside if name not in self._named]:
            self._named |= set(new)
            told = ", ".join(f"{name} {record.metrics[name]:.3g}" for name in new[:NAMED])
            told += f" and {len(new) - NAMED} more (log.txt)" if len(new) > NAMED else ""
            self._emit(
                "", f"  ! outside the healthy range: {told}\n    what it means: lockstep metrics explain {new[0]}"
            )
        if self._bars is not None:
            self._bars.step(record.step, eta)
            self._check()

    def message(self, text: str, *, shown: bool = True) -> None:
        """Print text; control characters in it are shown, not obeyed. Unless `shown` it goes to log.txt alone."""
        safe = visible(hide_values(text))
        self._emit(safe, safe if shown else "")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in aligned text, the same on a terminal and in log.txt."""
        text = plain_table(title, columns, rows)
        self._emit(text, text)

    def close(self) -> None:
        """Take the bars away and close log.txt. Twice is once."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _eta(self, step: int) -> str:
        """Estimate the time of the steps and evaluations that are left, each as long as those so far."""
        if not self._times or not self._total:
            return ""
        left = sum(planned > step for planned in self._evaluations)
        seconds = fmean(self._times) * max(self._total - step, 0)
        if left and not self._evaluated:
            return f"{duration(seconds)} + {left} evaluation{'s' if left > 1 else ''}"
        return duration(seconds + (left * fmean(self._evaluated) if left else 0.0))

    def _emit(self, logged: str, shown: str) -> None:
        """Write to log.txt and to the screen; an empty text is not written."""
        if self._log is not None and logged:
            stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            lines = "".join(f"{stamp}  {line}\n" for line in logged.split("\n"))
            self._log.append(lines.encode("utf-8", "backslashreplace"), flush=False)
        if not self._printing or not shown:
            return
        text = encodable(shown, self._stream)
        try:
            if self._terminal:
                self._paint(text)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except OSError as error:
            self._lose(error)
        else:
            self._check()

    def _check(self) -> None:
        """Give up a terminal that was lost while the bars were drawn."""
        if self._bars is not None and self._bars.error is not None:
            self._lose(self._bars.error)

    def _lose(self, error: OSError) -> None:
        """Print nothing more; log.txt goes on and says so."""
        bars, self._printing, self._bars = self._bars, False, None
        # What is still buffered, and all that follows, goes nowhere: else the run would fail at exit, when it is flushed.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        if bars is not None:
            bars.stop()
        gone = isinstance(error, BrokenPipeError)
        why = "the reader of the output has gone" if gone else f"the output cannot be written ({error.strerror})"
        self._emit(f"{why}: from here on only this file is written", "")

    def _paint(self, text: str) -> None:
        from rich.console import Console as RichConsole
        from rich.text import Text

        colour = next((colour for head, colour in COLOURS.items() if text.lstrip().startswith(head)), "")
        target = self._bars.console if self._bars is not None else RichConsole(file=self._stream, force_terminal=True)
        target.print(Text(text, style=colour), soft_wrap=True)


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
    parts += [f"eval {mode} {value:.3f}" for mode, value in accuracies(metrics)]
    parts += [f"eta {eta}"] if eta else []
    parts += ["! " + " ".join(warned)] if warned else []
    return one_line("  ".join(parts))


def brief_line(record: StepRecord, total: int, eta: str, outside: int, width: int = WIDTH) -> str:
    """Return a step's line for a screen.

    Example: "step  12/50  reward 0.41  correct 0.39  loss 0.012  len 8.3  3.2s  eta 1m12s  ! 2"
    """
    metrics = record.metrics
    known = {one.label: f"{one.label} {metrics[one.name]:{one.form}}" for one in SHOWN if one.name in metrics}
    middle = [known[label] for label in BRIEF if label in known]
    head = [f"step {record.step:>{len(str(total))}}/{total}"]
    tail = [f"eval {mode} {value:.3f}" for mode, value in accuracies(metrics)]
    tail += [f"{metrics['time/step'] - metrics.get('time/evaluate', 0.0):.1f}s"] if "time/step" in metrics else []
    tail += [f"eta {eta}"] if eta else []
    tail += [f"! {outside}"] if outside else []
    while middle and len("  ".join([*head, *middle, *tail])) > width:
        middle.pop()
    return one_line("  ".join([*head, *middle, *tail]), width)


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
    """Return the text with characters that the stream's encoding lacks replaced: Δ by d, others by escapes."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("Δ", "d").replace("─", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text
