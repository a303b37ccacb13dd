"""Proposes settings that make a recipe fit a machine, each with its reason: `lockstep plan --fit`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.config.schema import Recipe
from lockstep.plan.choice import MODES, MemoryPlan, fitting_changes, part, replan
from lockstep.plan.memory import cache_bytes, peak, phases, stream_tokens
from lockstep.plan.memory_inputs import GIB
from lockstep.plan.preview import Preview

CPU_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
"""Micro-batches that are tried on a CPU."""
LONGEST_REPLY = 2**17
"""Tokens above which no longer reply is looked for."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """Example: Proposed("update.recompute=selective", "none would need 161.2 of 139.8 GiB")"""

    setting: str
    why: str


def fit_lines(preview: Preview) -> list[str]:
    """Return the proposal line by line, with its settings as a command's arguments at the end."""
    proposed, recipe, plan = propose(preview)
    if not plan.fits:
        return [f"nothing that leaves the model as it is fits: {_needs(plan)}; take a smaller model or more memory"]
    return [
        *(f"{one.setting:<44}{one.why}" for one in proposed),
        f"{'kept: prompts_per_step, samples_per_prompt':<44}they decide what is learnt; memory depends on the micro-batch",
        f"by memory replies of up to {_longest(recipe, plan)} tokens would fit (the recipe asks for {recipe.rollout.max_tokens})",
        f"with it the run needs {_needs(plan)}: lockstep train RECIPE {' '.join(one.setting for one in proposed)}",
    ]


def propose(preview: Preview) -> tuple[list[Proposed], Recipe, MemoryPlan]:
    """Return settings in the order in which they were decided, the recipe with them, and its plan."""
    asked = preview.recipe
    recipe = part(
        asked,
        allow=["memory"],
        update=part(asked.update, tokens_per_microbatch=None, recompute="auto"),
        rollout=part(asked.rollout, slots="auto"),
    )
    before = replace(preview, recipe=recipe).memory()
    recipe, plan = _sized(recipe, before)
    proposed: list[Proposed] = []
    if not plan.fits and (changes := fitting_changes(before, recipe)):
        settings, recipe, _ = changes[0]
        proposed += [Proposed(setting, f"without it the run would need {_needs(before)}") for setting in settings]
        recipe, plan = _sized(recipe, replan(before, recipe))
    return [*proposed, *_sizes(plan)], recipe, plan


def _sized(recipe: Recipe, plan: MemoryPlan) -> tuple[Recipe, MemoryPlan]:
    """Choose the micro-batch on a CPU, where the plan does not: the largest that fits."""
    if plan.inputs.device == "cuda":
        return recipe, plan
    for tokens in CPU_TOKENS:
        recipe = part(recipe, update=part(recipe.update, tokens_per_microbatch=tokens))
        plan = replan(plan, recipe)
        if plan.fits:
            break
    return recipe, plan


def _sizes(plan: MemoryPlan) -> list[Proposed]:
    """Return micro-batch, recomputation, rows of the engine and vLLM's share of the memory, as the plan has them."""
    inputs, sizes = plan.inputs, plan.sizes
    tokens = stream_tokens(inputs, sizes.tokens)
    train = next(phase for phase in plan.phases if phase.name == "train")
    found = [
        Proposed(
            f"update.tokens_per_microbatch={sizes.tokens}",
            f"the largest that fits: {tokens} tokens train in {train.bytes / GIB:.1f} GiB; no result changes",
        )
    ]
    less = MODES[: MODES.index(sizes.recompute)]
    if less:
        other = peak(phases(inputs, type(sizes)(sizes.tokens, less[-1], sizes.slots)))
        found.append(
            Proposed(
                f"update.recompute={sizes.recompute}",
                f"{less[-1]} would take {other.bytes / GIB:.1f} GiB in {other.name}",
            )
        )
    else:
        found.append(
            Proposed(f"update.recompute={sizes.recompute}", "all activations have room: no time is spent on them again")
        )
    rows = (
        "all samples of a step side by side" if sizes.slots >= inputs.samples_per_step else "more wait for a free row"
    )
    cache = cache_bytes(inputs, sizes.slots) / GIB
    found.append(
        Proposed(f"rollout.slots={sizes.slots}", f"keys and values of {sizes.slots} rows take {cache:.1f} GiB; {rows}")
    )
    if inputs.engine == "vllm":
        share = min(
            0.95, round((inputs.vllm_cache + inputs.element * inputs.shape.parameters) / plan.available + 0.05, 2)
        )
        cache = inputs.vllm_cache / GIB
        why = f"its weights and {cache:.1f} GiB of keys and values; the learner takes {train.bytes / GIB:.1f} GiB"
        found.append(Proposed(f"rollout.vllm.gpu_memory_utilization={share:g}", why))
    return found


def _longest(recipe: Recipe, plan: MemoryPlan) -> int:
    """Return the longest reply, doubled from the recipe's, that fits too."""
    tokens = recipe.rollout.max_tokens
    while tokens * 2 <= LONGEST_REPLY:
        longer = part(recipe, rollout=part(recipe.rollout, max_tokens=tokens * 2))
        if not replan(plan, longer).fits:
            break
        tokens *= 2
    return tokens


def _needs(plan: MemoryPlan) -> str:
    return f"{plan.needs / GIB:.1f} of {plan.available / GIB:.1f} GiB"
