"""Further sets of weights that a run keeps."""

from __future__ import annotations

from lockstep.config.numerics import PHASES, Phase
from lockstep.config.schema import Recipe


def quantised_copies(recipe: Recipe, *, reference: bool) -> list[str]:
    """Quantised weights that are kept beside those that they are made of: a set for each format and each model (counted as whole
    sets of weights, though embeddings and head have none)."""
    settings = recipe.numerics

    def formats(*phases: Phase) -> list[str]:
        return sorted({settings.of(phase).partition("-")[0] for phase in phases} - {""})

    if recipe.rollout.engine == "native" and recipe.sync.transport == "shared":
        found = [f"weights in {name}" for name in formats(*PHASES)]
    else:
        found = [f"weights in {name}" for name in formats("train")]
        if recipe.rollout.engine == "native":
            found += [f"engine's weights in {name}" for name in formats("rollout", "eval")]
    return found + [f"reference model in {name}" for name in formats("train") if reference]
