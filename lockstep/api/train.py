"""Recipes as objects, and training: the functions `recipe`, `train` and `resume` of the package."""

from __future__ import annotations

import json
import os
import re
import sys
from os import PathLike
from typing import Any

from lockstep.api.run import Run
from lockstep.config.load import layer_of, load, require_task, use_paths
from lockstep.config.run_names import fill_name
from lockstep.config.schema import Recipe
from lockstep.config.section import Section
from lockstep.openmp import leave_out_tiles, set_waiting


def recipe(*layers: Recipe | str | PathLike[str], **settings: object) -> Recipe:
    """Return a validated recipe: files, names of built-in recipes, recipes and `a.b=value` on top of each other, then settings.

    Two underscores stand for a dot: `recipe("quickstart", steps=20, optimizer__lr=1e-5, adapter={"kind": "lora"})`.
    Raises ConfigError with every mistake at once.
    """
    words = [layer if isinstance(layer, Recipe) else os.fspath(layer) for layer in layers]
    return load([*words, *(_override(name, value) for name, value in settings.items())])


def train(recipe: Recipe | str | PathLike[str], *overrides: str, **settings: object) -> Run:
    """Train as `lockstep train` does, in this process, and return the finished run. Arguments are those of `recipe`.

    SIGINT (a notebook's stop button) and SIGTERM end the step, save and raise Interrupted; HealthStop is raised if a rule of
    the run stopped it; any other LockstepError says what is wrong. The run's folder remains: `Run(path).state` has the reason.
    """
    chosen = fill_name(require_task(_recipe(recipe, *overrides, **settings)))
    use_paths(chosen)
    _prepare()
    from lockstep.loops.start import start_run

    return Run(start_run(chosen).path)


def resume(run: Run | str | PathLike[str], *health: str, steps: int | None = None, allow_fallback: bool = False) -> Run:
    """Continue a run from its last checkpoint; a finished one is returned as it is, unless `steps` makes it longer.

    `health`: overrides of settings that a resume may change (health, track, placement, optimizer.offload), such as
    "health.clipping=off". Raises as `train`.
    """
    found = Run(run)
    if found.state.name != "finished" or steps is not None:
        use_paths(found.recipe)
        _prepare()
        from lockstep.loops.start import resume_run

        resume_run(found.path, health, allow_fallback=allow_fallback, steps=steps)
    return found


_recipe = recipe  # `train` has an argument of that name


def _override(name: str, value: object) -> str:
    return f"{name.replace('__', '.')}={_PAIR.sub(_one_character, json.dumps(value, default=_plain))}"


_PAIR = re.compile(r"\\\\|\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
"""An escaped backslash, or a character that JSON escapes as two halves, which YAML takes for two."""


def _one_character(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    return f"\\U{0x10000 + (int(found[1], 16) - 0xD800 << 10) + int(found[2], 16) - 0xDC00:08x}"


def _plain(value: object) -> Any:
    return layer_of(value) if isinstance(value, Section) else str(value)


def _prepare() -> None:
    """Set what must be set before torch is loaded; a program that has loaded it decides for itself."""
    if "torch" not in sys.modules:
        set_waiting(os.environ)
    leave_out_tiles(os.environ)  # oneDNN reads it at its first product
