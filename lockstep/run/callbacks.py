"""Calls the user's functions after each step. They may end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from lockstep.algorithms.user_loss import load_function
from lockstep.config.health import Callback
from lockstep.errors import LearnerError
from lockstep.types import Metrics
from lockstep.user_code import describe

History: TypeAlias = Sequence[tuple[int, Metrics]]


def load_callbacks(settings: Sequence[Callback]) -> list[tuple[Callback, Callable[..., object]]]:
    """Load every function and see that it can be called. Raises LearnerError."""
    return [(one, load_function(one.path, "history", one.settings)) for one in settings]


def call(loaded: Sequence[tuple[Callback, Callable[..., object]]], history: History) -> str:
    """Call all with the run so far; returns the reasons to end the run, "" for none. Raises LearnerError if one fails."""
    shown = [(step, MappingProxyType(metrics)) for step, metrics in history]
    reasons = [_call(one, function, shown) for one, function in loaded]
    return "; ".join(filter(None, reasons))


def _call(one: Callback, function: Callable[..., object], history: Sequence[object]) -> str:
    try:
        answer = function(list(history), **one.settings)
    except Exception as error:
        what = f"the callback fails: {describe(error, Path(one.path.rpartition(':')[0]).expanduser())}"
        raise LearnerError(
            what, where=one.path, fix="correct it and resume the run, or resume without callbacks: health.callbacks=[]"
        ) from error
    if answer is None or isinstance(answer, str):
        return f"{one.path}: {answer}" if answer else ""
    raise LearnerError(
        f"the callback returned a value of type {type(answer).__name__}",
        where=one.path,
        fix="return None, or a text with the reason to end the run",
    )
