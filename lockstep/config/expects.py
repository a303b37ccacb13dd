"""Reads the published results that a recipe's run is compared with, from a file beside it: mine.expects.yml for mine.yaml."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from lockstep.config.section import Section
from lockstep.config.text import read
from lockstep.errors import ConfigError


class Count(Section):
    """Published number of rows of one of the recipe's data sets."""

    of: str = "train"
    """Data set: train, or a role of task.heldout."""
    after: str = ""
    """Name of the filter after which they are counted; empty counts those of the source."""
    rows: int
    within: float = Field(default=0.0, ge=0)
    """Share by which ours may differ: a published figure is often rounded."""
    source: str


class Figure(Section):
    """Published accuracy, before (base) or after training."""

    score: str = Field(pattern="^(base|trained)$")
    mode: str = "greedy"
    """Name of the score among the recipe's evaluations: greedy, ood_probe.greedy."""
    value: float = Field(ge=0, le=1)
    source: str


class Expects(Section):
    """Everything published about a run."""

    counts: list[Count] = Field(default=[])
    figures: list[Figure] = Field(default=[])


def expects_of(recipe: Path) -> Expects:
    """Return what is published about a recipe. Raises ConfigError if no file beside it says it."""
    path = recipe.with_suffix(".expects.yml")
    if not path.exists():
        raise ConfigError(
            [f"{path}: there is no such file; the published results to compare {recipe.name} with are read from it"],
            fix="write this file in the form of recipes/tasks/gsm8k_0.5b.expects.yml, or give a recipe of recipes/tasks",
        )
    document = read(path)
    if document.mistakes:
        raise ConfigError(document.mistakes)
    try:
        return Expects.model_validate(document.value)
    except ValidationError as error:
        raise ConfigError([f"{path}: {' '.join(str(error).split())}"]) from None
