"""Computes the least possible time of a step's phases on this machine, from the step's lengths and measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.device import choose_device, wait
from lockstep.errors import LockstepError
from lockstep.plan.floors import Machine, Update, Work, step_floor
from lockstep.plan.memory_inputs import offloaded_bytes
from lockstep.plan.model_shape import recipe_shape
from lockstep.plan.shapes import ModelShape
from lockstep.types import Group, Metrics

PRODUCT = {"cpu": 768, "cuda": 8192}
"""Width of the square matrices that are multiplied."""
COPIED = {"cpu": 2**25, "cuda": 2**30}
"""Bytes that are copied."""
REPEATS = 4


class StepFloor:
    """Floors of a run's steps; none for a model of unknown sizes."""

    def __init__(self, parts: Parts, recipe: Recipe) -> None:
        self._recipe, self._parts = recipe, parts
        self._shape: ModelShape | None = None
        try:
            self._shape = recipe_shape(recipe, parts.policy.resolved.path)
        except LockstepError:  # a family that the plan does not know either
            return
        device = choose_device(recipe.device).type
        self._machine = measured_rates(device, torch.bfloat16 if device == "cuda" else torch.float32)
        self._gpus = getattr(recipe.placement, "gpus", 1)

    def metrics(self, groups: Sequence[Group], metrics: Metrics) -> Metrics:
        """Return the least seconds of sampling these groups, of the updates that were made, and of the sync."""
        if self._shape is None or not groups:
            return {}
        lengths = [(len(g.rollouts[0].prompt_ids), tuple(len(r.ids) for r in g.rollouts)) for g in groups if g.rollouts]
        samples = sum(len(replies) for _, replies in lengths)
        objective, update = self._parts.objective, self._recipe.update
        floor = step_floor(
            self._shape,
            Work(tuple(lengths)),
            Update(
                self._parts.learner.describe().trained,
                adapter=self._recipe.adapter.kind != "none",
                share_prompts=update.share_prompts,
                kept=metrics.get("batch/samples_trained", 0.0) / max(1, samples),
                old=objective.recomputes_old,
                reference=objective.needs_reference,
                offloaded=offloaded_bytes(self._recipe, self._shape),
            ),
            self._machine,
        )
        optimizer = floor.optimizer * metrics.get("batch/optimizer_steps", 1.0)
        seconds = {
            "rollout": floor.generate,
            "update": floor.old + floor.reference + floor.train * update.epochs + optimizer,
            "sync": floor.sync,
        }
        return {f"time/floor_{phase}": value / self._gpus for phase, value in seconds.items()}


@lru_cache
def measured_rates(device: str, dtype: torch.dtype) -> Machine:
    """Return the best of a few matrix products and copies, on one device."""
    size, count = PRODUCT[device], COPIED[device]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    product, copy = _best(lambda: torch.mm(a, b)), _best(lambda: target.copy_(source))
    return Machine(device, 2.0 * size**3 / product, 2.0 * count / copy)


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)
