"""Fills in run-name templates when a run starts: `name: "{task}-{lr}-{date}"` becomes reasoning_gym-0.0003-20261122."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from lockstep.config.schema import Recipe
from lockstep.config.text import value_at
from lockstep.errors import ConfigError

FIELD = re.compile(r"\{([^{}]*)\}")


def fill_name(recipe: Recipe) -> Recipe:
    """Return the recipe with its name's fields filled in; `{n}` is the lowest number that no run folder has yet.

    Raises ConfigError for a field that is neither in `_values` nor a setting.
    """
    if "{" not in recipe.name:
        return recipe
    values = _values(recipe)
    settings = recipe.model_dump(mode="json")

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field == "n":
            return match[0]
        found = values[field] if field in values else value_at(settings, field)
        if found is None or isinstance(found, dict | list):
            near = get_close_matches(field, [*values, "n"], n=1)
            hint = (
                f"did you mean {{{near[0]}}}?" if near else "write a setting with its full path, such as {optimizer.lr}"
            )
            what = "has no single value in this recipe" if field in values or found is not None else "is not known"
            raise ConfigError(
                [f"name={recipe.name}: the field {{{field}}} {what}; {hint}"],
                fix=f"use one of the fields {', '.join([*values, 'n'])}, or a setting such as {{update.epochs}}",
            )
        text = f"{found:g}" if isinstance(found, float) else str(found)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "none"

    name = FIELD.sub(value, recipe.name)
    number = 1
    while "{n}" in name and (Path(recipe.runs_dir) / name.replace("{n}", str(number))).exists():
        number += 1
    return recipe.model_copy(update={"name": name.replace("{n}", str(number))[:100]})


def _values(recipe: Recipe) -> dict[str, object]:
    now = datetime.now(UTC)
    task = getattr(recipe.task, "dataset", None) or recipe.task.kind
    return {
        "task": task if recipe.loop == "rl" else "sft",
        "model": Path(recipe.model.path).name,
        "algorithm": recipe.algorithm.kind,
        "adapter": recipe.adapter.kind,
        "lr": f"{recipe.lr:g}",
        "seed": recipe.seed,
        "steps": recipe.steps,
        "date": f"{now:%Y%m%d}",
        "time": f"{now:%H%M%S}",
    }
