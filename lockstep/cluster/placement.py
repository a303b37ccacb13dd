"""Batch arithmetic of a run on several workers, as text. Does not import torch."""

from __future__ import annotations

from lockstep.config.schema import Local, Recipe


def placement_lines(recipe: Recipe) -> list[str]:
    """Return what each worker does in a step; nothing for a run in one process."""
    placement = recipe.placement
    if isinstance(placement, Local):
        return []
    trainers, samplers = placement.trainers, placement.samplers
    lines = [f"{_count(trainers)}, each with the whole weights and a share of the optimizer"]
    if samplers:
        lines.append(
            f"{_count(samplers)} more that sample, in turn with training: the weights are sent after each step"
        )
    if recipe.loop == "rl":
        least, more = divmod(recipe.prompts_per_step, samplers or trainers)
        prompts = f"{least} or {least + 1}" if more else f"{least}"
        if recipe.rollout.deal == "queue":
            prompts = f"as many as it is ready for, about {prompts},"
        lines.append(
            f"a worker samples {prompts} of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples a step"
        )
    lines.append(f"micro-batches are those of one process, dealt in rounds of {trainers}")
    return lines


def _count(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"
