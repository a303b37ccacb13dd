"""Schedule of the strength of the noise over a run, as in QeRL (arXiv 2510.11696), and lines about it for the start of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import Noise, Recipe
from lockstep.noise.targets import Targets


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of the schedule. Example: Stage(1, 0.01)"""

    index: int
    """Index of the stage, 0 … stages - 1; stage 0 has no noise."""
    sigma: float


def sigmas(noise: Noise) -> tuple[float, ...]:
    """Return one standard deviation per stage: 0, then σ_start (σ_end / σ_start)^(i / (K - 2)) for i = 0 … K - 2.

    This is `sigma_trend` of QeRL's code: K - 1 values, the first σ_start and the last σ_end.
    """
    ratio, last = noise.sigma_end / noise.sigma_start, noise.stages - 2
    return (0.0, *(noise.sigma_start * ratio ** (i / last) for i in range(last + 1)))


def stage_at(noise: Noise, update: int, updates: int) -> Stage:
    """Return the stage while optimizer step `update` of `updates` (counted from 0) is prepared: K equal intervals of the run."""
    index = min(update * noise.stages // updates, noise.stages - 1)
    return Stage(index, sigmas(noise)[index])


def stage_of(recipe: Recipe, step: int) -> Stage:
    """Return the stage of a training step's rollouts, from the number of the step alone: resuming changes nothing.

    A step's rollouts come before its first optimizer step. Steps that only train the critic have no optimizer step of the
    policy and stay in stage 0. Raises ValueError for a recipe without noise.
    """
    if recipe.noise is None:
        raise ValueError("the recipe has no noise")
    done = max(0, step - recipe.critic_steps) * recipe.updates_per_step
    return stage_at(recipe.noise, done, recipe.policy_updates)


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
