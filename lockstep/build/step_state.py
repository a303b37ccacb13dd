"""State that a run carries from step to step besides weights and optimizer; saved in every checkpoint, restored to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.algorithms.kl import adapted_coef
from lockstep.config.schema import MixedTask, Recipe
from lockstep.tasks.mixed import Progress


@dataclass(slots=True)
class Carried:
    """State carried between steps. Example: Carried(kl_coef=0.05, empty_steps=0)"""

    kl_coef: float
    """Weight of the KL penalty in the next step."""
    empty_steps: int = 0
    """Number of steps so far that found no group to train on, and so made no update."""
    progress: Progress | None = None
    """Progress of the curriculum of mixed tasks; None without one."""

    @staticmethod
    def at_start(recipe: Recipe) -> Carried:
        task = recipe.task
        curriculum = isinstance(task, MixedTask) and task.curriculum is not None
        return Carried(recipe.algorithm.kl.coef, progress=Progress.at_start() if curriculum else None)

    def adapt_kl(self, recipe: Recipe, kl: float, samples: int) -> None:
        """Move the coefficient after a step whose mean k1 per token was `kl`; without a target it stays."""
        settings = recipe.algorithm.kl
        if settings.target is not None:
            self.kl_coef = adapted_coef(
                self.kl_coef, kl=kl, target=settings.target, samples=samples, horizon=settings.horizon
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.kl_coef, self.empty_steps = saved["kl_coef"], saved["empty_steps"]
        found = saved.get("progress")  # checkpoints from before mixed tasks have none
        self.progress = None if found is None else Progress.restored(found)
