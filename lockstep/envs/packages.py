"""Imports packages that only some environments need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lockstep.errors import TaskError


def package(module: str, kind: str, *, extra: str = "envs", name: str = "") -> Any:
    """Return a module of an optional package, for tasks of a kind. Raises TaskError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{name or module.partition('.')[0]} is not installed"
        raise TaskError(what, where=f"task.kind={kind}", fix=f"pip install 'lockstep-rl[{extra}]'") from error
