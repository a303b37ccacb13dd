"""Progress bars at the bottom of the terminal during a run: one for the steps, one for the current phase, and a notice."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

PER_SECOND = 4
"""Renderings a second."""
BAR = 24
"""Columns of a bar: rows that fill the terminal would be broken into pieces when it gets narrower."""


class Bars:
    """Bars below everything that `console` prints. The cursor stays visible, so that a killed run leaves a sane terminal."""

    def __init__(self, stream: TextIO, total: int, done: int) -> None:
        self._stream = _Guarded(stream)
        self.console = RichConsole(file=cast(TextIO, self._stream), force_terminal=True)
        self._rows = _Rows(self.console)
        self._steps = self._rows.add_task("step", total=total, completed=done, rest="")
        self._phase = self._rows.add_task("", total=None, visible=False, rest=0.0)
        self._name = ""
        self._rows.start()
        self.console.show_cursor(True)

    @property
    def error(self) -> OSError | None:
        """The error by which the terminal was lost."""
        return self._stream.error

    def step(self, done: int, eta: str) -> None:
        """Move the bar of the steps; the phase is over."""
        self._name = ""
        self._rows.update(self._phase, visible=False)
        self._rows.update(self._steps, completed=done, rest=f"eta {eta}" if eta else "", refresh=True)

    def phase(self, name: str, done: int, of: int) -> None:
        """Show a phase: `done` of `of` pieces, or seconds alone if `of` is 0."""
        refresh = not self._name or done == of
        if name != self._name:  # a row of its own: `update` leaves the total of the phase before
            self._rows.remove_task(self._phase)
            self._phase = self._rows.add_task(name, total=None, rest=time.monotonic())
            self._name = name
        self._rows.update(self._phase, total=of or None, completed=done, refresh=refresh)

    def notice(self, text: str) -> None:
        """Show a line below the bars from the next rendering on. Writes nothing itself: a signal handler may call it."""
        self._rows.notice = text

    def stop(self) -> None:
        self._rows.stop()


class _Guarded:
    """A stream whose errors are kept, not raised: they may come in the thread that renders, too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = self.error or error
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Rows(Progress):
    def __init__(self, console: RichConsole) -> None:
        self.notice = ""
        name = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (name, _CountColumn(), BarColumn(bar_width=BAR), _RestColumn())
        super().__init__(*columns, console=console, transient=True, refresh_per_second=PER_SECOND)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.notice:
            yield Text(self.notice, style="yellow")


class _CountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:.0f}/{task.total:.0f}" if task.total else "")


class _RestColumn(ProgressColumn):
    """The text of a row, or the seconds since the moment that it holds."""

    def render(self, task: Task) -> Text:
        rest = task.fields["rest"]
        return Text(f"{time.monotonic() - rest:.0f}s" if isinstance(rest, float) else rest)
