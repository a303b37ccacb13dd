"""Scores from Python: the functions `evaluate` and `compare` of the package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from lockstep.api.run import path_text
from lockstep.commands.compare import compare_pair, find_pairs, lines_of
from lockstep.config.evaluate import Role
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.evaluation.collect import Pair
    from lockstep.evaluation.compare import Comparison
    from lockstep.scoring.score import Outcome


@dataclass(frozen=True, slots=True)
class ComparedScores:
    """Two scores of one set and mode, compared item by item. `print` shows what `lockstep compare` prints."""

    pair: Pair
    comparisons: tuple[Comparison, ...]
    """One per number that both have, the headline first."""

    def __str__(self) -> str:
        return "\n".join(lines_of(self.pair, self.comparisons, items=False))

    __repr__ = __str__


def evaluate(
    target: str | PathLike[str],
    *overrides: str,
    recipe: str | PathLike[str] | None = None,
    step: int | None = None,
    mode: str = "all",
    role: str | None = None,
    items: int | None = None,
    base: bool = True,
    out: str | PathLike[str] | None = None,
) -> Outcome:
    """Score a run, a checkpoint, an adapter's folder or a model on held-out problems, and its base (`base`).

    Options are those of `lockstep eval`; `recipe` names the task of a model or adapter. Scores are stored in the run's folder,
    or in `out`. Raises LockstepError; nothing is sampled before the weights are proven to be those that were saved.
    """
    from lockstep.commands.eval import Progress, choose_modes, choose_sets
    from lockstep.scoring.score import ScoreOptions, score_targets
    from lockstep.scoring.targets import find_target

    if items is not None and items < 1:
        raise ConfigError([f"items={items}: at least one item is scored"])
    if role is not None and role not in get_args(Role):
        raise ConfigError([f"role={role}: no such set of items; there are {', '.join(get_args(Role))}"])
    recipes = [] if recipe is None else [os.fspath(recipe)]
    found = find_target(path_text(target), recipes, overrides, step)
    options = ScoreOptions(
        modes=lambda recipe, chosen: choose_modes(recipe, mode, chosen),
        sets=lambda recipe: choose_sets(recipe, role, items),
        out=None if out is None else Path(out),
        base=base,
        watch=Progress,
    )
    return next(score_targets([found], options))


def compare(
    a: str | PathLike[str],
    b: str | PathLike[str] | None = None,
    *,
    all_steps: bool = False,
    allow_mismatch: bool = False,
    estimate: str | None = None,
) -> list[ComparedScores]:
    """Compare two scores, runs or folders of scores item by item; one run alone is its base against its last score.

    Measures nothing. Raises EvaluationError for scores that may not be compared.
    """
    pairs, _ = find_pairs([path_text(one) for one in (a, b) if one is not None], all_steps=all_steps)
    return [ComparedScores(one, tuple(compare_pair(one, allow_mismatch, estimate))) for one in pairs]
