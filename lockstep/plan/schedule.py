"""When a run does what: its learning rate and the reason for it, its evaluations, its checkpoints."""

from __future__ import annotations

from lockstep.config.schema import Recipe, default_rate
from lockstep.evaluate.plan import plan_lines
from lockstep.learner.schedule import learning_rate

_FAR = 1000
"""A rate that is so many times the default is taken for a slip: such steps ruin a pretrained model."""
_LOW = 5
"""A rate that is a fifth of the default or less trains so slowly that a short run shows no effect."""
_SHOWN = 8
"""Steps written out in a line; of longer lists the middle is left out."""


def rate_lines(recipe: Recipe) -> list[str]:
    """The peak rate with its reason, the schedule, and its values on the way. Rates are of optimizer steps, counted from 1."""
    total = recipe.policy_updates
    settings = recipe.optimizer
    warm = f"{settings.warmup_steps} warm-up steps" if settings.warmup_steps else "no warm-up"
    shape: str = settings.schedule
    if shape == "wsd":
        shape = f"wsd, falling in the last {settings.decay_share:.0%},"
    lines = [f"learning rate {recipe.lr:g}: {_reason(recipe)}; {shape} over {total} optimizer steps, {warm}"]
    usual = default_rate(recipe.loop, adapter=recipe.adapter.kind != "none")
    if recipe.lr >= _FAR * usual and settings.kind != "python":
        lines.append(
            f"warning: optimizer.lr is {recipe.lr / usual:,.0f} times the default ({usual:.0e}); is that what is meant?"
        )
    if recipe.optimizer.lr is not None and recipe.lr <= usual / _LOW and settings.kind != "python":
        kind = "adapters" if recipe.adapter.kind != "none" else "full training"
        lines.append(
            f"warning: optimizer.lr = {recipe.lr:g} is far below the default of {kind} ({usual:.0e}): a run of {total} optimizer "
            f"steps may show no effect; leave optimizer.lr out, or set it to about {usual:.0e} or more"
        )
    if settings.warmup_steps or settings.schedule != "constant":
        marks = _marks(settings.warmup_steps, total)
        rates = (f"{learning_rate(settings, recipe.lr, mark - 1, total):.3g} at {mark}" for mark in marks)
        lines.append(f"on the way: {', '.join(rates)}")
    if recipe.algorithm.critic is not None:
        lines.append(
            f"critic: learning rate {recipe.algorithm.critic.lr:g} (algorithm.critic.lr), on the policy's schedule"
        )
    return lines


def evaluation_lines(recipe: Recipe) -> list[str]:
    """When and how the run evaluates, and what difference its items can show."""
    return plan_lines(recipe)


def checkpoint_lines(recipe: Recipe) -> list[str]:
    """The steps after which the run saves, and what it keeps."""
    every, last = recipe.save.every, recipe.steps
    steps = [str(step) for step in (*range(every, last, every), last)]
    if len(steps) > _SHOWN:
        steps = [*steps[:3], "…", *steps[-2:]]
    best = f", and the best {recipe.save.keep_best}" if recipe.save.keep_best else ""
    return [f"will save at steps {', '.join(steps)} (last); the newest {recipe.save.keep_last} are kept{best}"]


def _reason(recipe: Recipe) -> str:
    if recipe.optimizer.lr is not None:
        return "set by optimizer.lr"
    adapter = recipe.adapter.kind != "none"
    other = default_rate(recipe.loop, adapter=not adapter)
    kind, rest = ("adapters", "full training") if adapter else ("full training", "adapters")
    loop = "SFT" if recipe.loop == "sft" else "RL"
    return f"the default of {kind} in {loop} ({rest}: {other:.0e})"


def _marks(warmup: int, total: int) -> list[int]:
    """First and last optimizer step, the end of the warm-up, and the quarters between."""
    rest = total - warmup
    wanted = {1, warmup, total, *(warmup + rest * quarter // 4 for quarter in (1, 2, 3))}
    return sorted(mark for mark in wanted if 1 <= mark <= total)
