"""What a run asks, as an identity: a resumed run must go on over the very questions that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import Recipe
from lockstep.data.questions import data_hash
from lockstep.errors import DataError
from lockstep.loops.sampling import round_prompts
from lockstep.types import Task


def questions_hash(task: Task, recipe: Recipe) -> str:
    """Of the questions of four steps from first to last; "" of a run that asks none. Batches are functions of the step alone."""
    if recipe.loop != "rl":
        return ""
    steps = sorted({0, 1, recipe.steps // 2, recipe.steps - 1})
    return data_hash([prompt for step in steps for prompt in round_prompts(task, recipe, step, 0, (), 0)])


def require_same_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError if the manifest of the earlier attempts names other data. `now`: what is about to be written into it."""
    names = {
        "questions_hash": "its questions are others",
        "heldout_hash": "its held-out items are others",
        "sft": "its rows are others",
    }
    for name, what in names.items():
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            old, new = old.get("content_hash"), new.get("content_hash")
        if old and new and old != new:
            raise DataError(
                f"{what} than when the run began ({old} then, {new} now)",
                where=str(name),
                fix="put data, task code and their packages back as they were and resume, or begin another run from this one's "
                "weights (warm_start)",
            )
