"""Settings → task."""

from __future__ import annotations

from typing import assert_never

from lockstep.config import schema
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.file import build_file_task
from lockstep.tasks.python import build_python_task
from lockstep.tasks.reasoning_gym import ReasoningGym


def build_task(settings: schema.Task, seed: int) -> BuiltTask:
    """The task that the settings describe; `seed` is the run's and orders the questions.

    Raises TaskError or DataError for anything that would fail in the run: names, rows, answers, overlap.
    """
    match settings:
        case schema.ReasoningGymTask():
            return ReasoningGym(settings, seed)
        case schema.FileTask():
            return build_file_task(settings, seed)
        case schema.PythonTask():
            return build_python_task(settings, seed)
        case _:
            assert_never(settings)
