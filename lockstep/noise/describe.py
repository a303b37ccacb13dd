"""Describes the noise of a run in lines that are printed at its start. Does not import torch."""

from __future__ import annotations

from lockstep.config.schema import Recipe
from lockstep.noise.schedule import sigmas
from lockstep.noise.targets import Targets


def noise_lines(recipe: Recipe, targets: Targets) -> list[str]:
    """Return schedule, norms, and the effect of the noise on the rollouts' log-probabilities. Needs a recipe with noise."""
    noise = recipe.noise
    if noise is None:
        return []
    steps = recipe.policy_updates / recipe.updates_per_step / noise.stages
    shown = ", ".join(f"{sigma:.3g}" for sigma in sigmas(noise))
    scaled = sum(scale != 1 for scale in targets.scales)
    return [
        f"noise (AQN) on {len(targets.names)} norms of the sampling model, such as {targets.names[0]}"
        + (f", {scaled} of them scaled" if scaled else ""),
        f"noise: sigma {shown}, {steps:.3g} step{'' if steps == 1 else 's'} each; drawn again for every version of the weights, "
        "none in evaluation",
        *(f"noise: {note}" for note in targets.notes),
        f"noise: rollout log-probabilities are those of the noisy model, so mismatch/* is meant to be above 0; {_ratio(recipe)}",
    ]


def _ratio(recipe: Recipe) -> str:
    if recipe.algorithm.correction.kind == "none":
        return "no correction: the update treats the noisy model's samples as its own, as QeRL does"
    return (
        f"correction {recipe.algorithm.correction.kind} weights samples back to the clean model, "
        "which takes back part of what the noise explores"
    )
