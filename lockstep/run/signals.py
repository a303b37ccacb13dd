"""SIGTERM and SIGINT end a run at the next safe point, with a checkpoint, instead of in the middle of a step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import Interrupted


class StopRequest:
    """Request to stop. While it is entered, the first SIGTERM or SIGINT sets `name`; a second one has its usual effect."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.name = ""
        self._notice = notice
        """Called in the signal handler, so it must not print through a buffer."""
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: the embedding program handles signals
                return self
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def after(self, done: int, steps: int, run: Path) -> Interrupted:
        """Return the error to raise when step `done` of `steps` is recorded and its checkpoint saved."""
        return Interrupted(
            f"{self.name} after step {done} of {steps}; a checkpoint was saved", fix=f"lockstep train --resume {run}"
        )

    def require_none(self, run: Path) -> None:
        """Raise Interrupted if a signal came: for work that a resume repeats."""
        if self.name:
            raise Interrupted(
                f"{self.name} during an evaluation, which was abandoned", fix=f"lockstep train --resume {run}"
            )

    def _note(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._notice(f"{self.name}: ending this step, then saving; once more stops at once")
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
