"""Chooses how a run uses a device's memory: micro-batch, recomputation, slots of the engine; or says why it does not fit.

After the first steps the prediction is compared with the measured memory. Two measurements can refine it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import Literal, TypeVar

from lockstep.config.optimizer import offload_mistake
from lockstep.config.schema import Lora, Recipe
from lockstep.config.section import Section
from lockstep.errors import DoesNotFitError
from lockstep.learner.packing import Cost, split
from lockstep.plan.activations import FP32, Recompute
from lockstep.plan.memory import OUTSIDE, Phase, Sizes, host_bytes, offloaded_host_bytes, peak, phases, stream_tokens
from lockstep.plan.memory_inputs import GIB, MemoryInputs, memory_inputs_of
from lockstep.plan.shapes import ModelShape
from lockstep.types import Metrics

MARGIN = 0.05
"""Share of the prediction that is left free: rounding and gaps of the allocator, and the prediction's own error."""
BUDGETS = (65536, 32768, 16384)
"""Tokens of a micro-batch, tried in this order with each way of recomputing, the one that recomputes least first."""
LEAST_BUDGET = 8192
"""Tried in the same way if none of these fits."""
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
CPU_SIZES = (8192, "none")
TOLERATED = 0.1
"""A peak may differ from its prediction by this share before a warning says so."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The inputs of a memory plan, the sizes that were chosen, and the predicted use of the device."""

    inputs: MemoryInputs
    sizes: Sizes
    asked_slots: int
    """The recipe's, or what its auto is on this device; `sizes.slots` is what fits."""
    phases: tuple[Phase, ...]
    available: float
    """Bytes that the device has for this process."""
    host: float | None = None
    """Free bytes of main memory; None is not known."""

    @property
    def peak(self) -> Phase:
        return peak(self.phases)

    @property
    def needs(self) -> float:
        """Bytes to be had for the run to be safe: the largest phase, its margin, and what torch does not count."""
        return self.peak.bytes * (1 + MARGIN) + OUTSIDE[self.inputs.device]

    @property
    def fits(self) -> bool:
        return self.needs <= self.available and self.host_fits

    @property
    def host_fits(self) -> bool:
        """Return whether masters and moments that are to lie in main memory have room there."""
        return not self.inputs.offload or self.host is None or host_bytes(self.inputs) <= self.host


def plan_memory(
    recipe: Recipe,
    shape: ModelShape,
    device: Literal["cuda", "cpu"],
    available: float,
    *,
    prompt_tokens: int,
    passes: bool,
    host: float | None = None,
) -> MemoryPlan:
    """Decide what the recipe leaves open, for a device with `available` bytes for this process, and `host` of main memory.

    `prompt_tokens`: the longest prompt. `passes`: the objective computes log-probabilities or values before the update.
    Raises DoesNotFitError on a GPU that has no room, before anything is loaded; a CPU's plan is coarse and never refuses.
    """
    inputs = memory_inputs_of(recipe, shape, device, available, prompt_tokens=prompt_tokens, passes=passes)
    plan = _best(inputs, recipe, available, host)
    if device == "cuda" and not plan.fits and "memory" not in recipe.allow:
        raise _refusal(plan, recipe)
    return plan


# --- choosing -------------------------------------------------------------------------------------------------------
def _best(inputs: MemoryInputs, recipe: Recipe, available: float, host: float | None) -> MemoryPlan:
    """Return the first sizes that fit, or else those that need least."""
    slots = recipe.slots(inputs.device)
    tried = [
        _planned(inputs, recipe, replace(sizes, slots=slots), available, host) for sizes in _candidates(inputs, recipe)
    ]
    fitting = next((plan for plan in tried if plan.fits), None)
    return fitting or min(tried, key=lambda plan: plan.needs)


def _candidates(inputs: MemoryInputs, recipe: Recipe) -> Iterator[Sizes]:
    tokens, recompute = recipe.update.tokens_per_microbatch, recipe.update.recompute
    if inputs.device == "cpu":
        yield Sizes(tokens or CPU_SIZES[0], "none" if recompute == "auto" else recompute, 0)
        return
    modes = MODES if recompute == "auto" else (recompute,)
    budgets = tuple(even_share(inputs, budget) for budget in BUDGETS) if tokens is None else (tokens,)
    for mode in modes:
        for budget in budgets:
            yield Sizes(budget, mode, 0)
    if tokens is None:
        for mode in modes:
            yield Sizes(even_share(inputs, LEAST_BUDGET), mode, 0)


def even_share(inputs: MemoryInputs, budget: int) -> int:
    """Return the tokens of the largest micro-batch that an update of the longest replies has under this budget: micro-batches are
    about equally large. Such a budget is used up, so that the plan foretells the peak; shorter replies stay below it.
    """
    prompt, response, group = inputs.prompt, inputs.response, inputs.samples_per_prompt if inputs.share_prompts else 1
    if inputs.row:
        prompt, response, group = 0, inputs.row, 1
    costs = [
        Cost(index, prompt + response, response + (prompt if index % group == 0 else 0))
        for index in range(inputs.samples_per_update)
    ]
    chunks = split(costs, budget)
    return min(budget, max(chunk[0].whole + sum(cost.more for cost in chunk[1:]) for chunk in chunks))


def _planned(inputs: MemoryInputs, recipe: Recipe, sizes: Sizes, available: float, host: float | None) -> MemoryPlan:
    """Return the plan of these sizes. The native engine on a GPU takes as many rows as its cache has room for."""
    plan = MemoryPlan(inputs, sizes, recipe.slots(inputs.device), phases(inputs, sizes), available, host)
    while (
        inputs.device == "cuda"
        and inputs.engine == "native"
        and plan.peak.name == "generate"
        and plan.needs > available
    ):
        if plan.sizes.slots == 1:
            break
        fewer = replace(plan.sizes, slots=max(1, plan.sizes.slots * 7 // 8))
        plan = replace(plan, sizes=fewer, phases=phases(inputs, fewer))
    return plan


# --- refusing -------------------------------------------------------------------------------------------------------
def _refusal(plan: MemoryPlan, recipe: Recipe) -> DoesNotFitError:
    """By how much it does not fit, what takes most, and which changes would make it fit."""
    if plan.needs <= plan.available and plan.host is not None:
        what = (
            f"optimizer.offload=cpu does not fit: masters, moments and a checkpoint's weights need "
            f"{host_bytes(plan.inputs) / GIB:.1f} GiB of main memory, but only {plan.host / GIB:.1f} GiB are free"
        )
        return DoesNotFitError([what], where="memory plan", fix=_advice(plan, recipe))
    training = "training adapters of" if plan.inputs.added else "full fine-tuning of"
    term = plan.peak.largest
    what = (
        f"{training} {plan.inputs.shape.parameters / 1e9:.3g}e9 parameters does not fit: it needs {plan.needs / GIB:.1f} GiB, "
        f"but {plan.available / GIB:.1f} GiB are available ({(plan.needs - plan.available) / GIB:.1f} GiB too few); most in "
        f"the phase {plan.peak.name}, whose largest part is {term.name} ({term.bytes / GIB:.1f} GiB)"
    )
    return DoesNotFitError([what], where="memory plan", fix=_advice(plan, recipe))


def _advice(plan: MemoryPlan, recipe: Recipe) -> str:
    """Return the smallest sets of changes that fit, each with what it then needs."""
    fitting = [
        f"{' and '.join(settings)} (needs {changed.needs / GIB:.1f} GiB)"
        for settings, _, changed in fitting_changes(plan, recipe)
    ]
    small = "use a smaller model, shorter replies (rollout.max_tokens), or a GPU with more memory"
    return f"set {', or '.join(fitting)}" if fitting else small


def fitting_changes(plan: MemoryPlan, recipe: Recipe) -> list[tuple[tuple[str, ...], Recipe, MemoryPlan]]:
    """Return the smallest sets of settings that fit, with the changed recipe and its plan; none if nothing helps."""
    changes = [change for change in _CHANGES if change.helps(recipe, plan.inputs)]
    for count in (1, 2, 3):
        fitting = []
        for chosen in combinations(changes, count):
            changed = reduce(lambda so_far, change: change.made(so_far), chosen, recipe)
            if (found := replan(plan, changed)).fits:
                fitting.append((tuple(change.setting for change in chosen), changed, found))
        if fitting:
            return fitting
    return []


def replan(plan: MemoryPlan, recipe: Recipe) -> MemoryPlan:
    """Return the plan of a changed recipe on the same device."""
    before = plan.inputs
    inputs = memory_inputs_of(
        recipe, before.shape, before.device, plan.available, prompt_tokens=before.prompt, passes=before.extra_passes
    )
    return _best(inputs, recipe, plan.available, plan.host)


@dataclass(frozen=True, slots=True)
class _Change:
    """A setting that saves memory. Example: _Change("model.dtype", "bf16", …)"""

    path: str
    value: str | int
    helps: Callable[[Recipe, MemoryInputs], bool]

    @property
    def setting(self) -> str:
        return f"{self.path}={self.value}"

    def made(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this setting."""
        if self.path != "adapter.kind":
            return _with(recipe, self.path, self.value)
        return part(recipe, adapter=Lora()) if recipe.optimizer.offload == "none" else recipe  # refused together


S = TypeVar("S", bound=Section)


def part(section: S, **changes: object) -> S:
    return section.model_copy(update=changes)


def _with(section: S, path: str, value: object) -> S:
    """Return the section with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return part(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


_CHANGES = (
    _Change("update.recompute", "auto", lambda recipe, inputs: recipe.update.recompute in ("none", "selective")),
    _Change(
        "update.tokens_per_microbatch",
        LEAST_BUDGET,
        lambda recipe, inputs: (recipe.update.tokens_per_microbatch or 0) > LEAST_BUDGET,
    ),
    _Change("model.dtype", "bf16", lambda recipe, inputs: inputs.element == FP32),
    _Change(
        "sync.transport",
        "shared",
        lambda recipe, inputs: recipe.rollout.engine == "native" and recipe.sync.transport == "copy",
    ),
    _Change("rollout.engine", "native", lambda recipe, inputs: recipe.rollout.engine == "vllm"),
    _Change(
        "optimizer.states",
        "8bit",
        lambda recipe, inputs: recipe.optimizer.kind == "adamw" and recipe.optimizer.states == "fp32",
    ),
    _Change(
        "optimizer.offload",
        "cpu",
        lambda recipe, inputs: (
            recipe.optimizer.offload == "none"
            and not offload_mistake(part(recipe.optimizer, offload="cpu"), inputs.device, recipe.adapter)
        ),
    ),
    _Change("optimizer.offload", "none", lambda recipe, inputs: recipe.optimizer.offload == "cpu"),
    _Change("algorithm.kl.coef", 0, lambda recipe, inputs: "reference model" in inputs.copies),
    _Change("algorithm.critic.backbone", "shared", lambda recipe, inputs: inputs.critic == "own"),
    _Change("adapter.kind", "lora", lambda recipe, inputs: recipe.adapter.kind == "none"),
)


# --- printing -------------------------------------------------------------------------------------------------------
def memory_lines(plan: MemoryPlan) -> list[str]:
    """Return the plan as a table, in GiB, with what each phase has most of."""
    sizes, available = plan.sizes, f"{plan.available / GIB:.1f}"
    tokens = stream_tokens(plan.inputs, sizes.tokens)
    lines = [f"micro-batches of up to {tokens} tokens, recompute {sizes.recompute}, {sizes.slots} rows in the engine"]
    if sizes.slots < plan.asked_slots:
        lines.append(f"keys and values of {plan.asked_slots} rows have no room (rollout.slots)")
    lines.append(f"{'phase':<20}{'GiB':>8}   largest part")
    for phase in plan.phases:
        largest = f"{phase.largest.name}, {phase.largest.bytes / GIB:.2f}"
        lines.append(f"{phase.name:<20}{phase.bytes / GIB:>8.2f}   {largest}")
    outside = OUTSIDE[plan.inputs.device] / GIB
    lines.append(
        f"{plan.peak.name} {plan.peak.bytes / GIB:.2f} + {MARGIN:.0%} + {outside:.2f} outside torch = "
        f"{plan.needs / GIB:.1f} of {available} GiB"
    )
    if plan.inputs.device == "cuda":
        held = f", {offloaded_host_bytes(plan.inputs) / GIB:.1f} of them always" if plan.inputs.offload else ""
        lines.append(f"the host needs {host_bytes(plan.inputs) / GIB:.1f} GiB while it writes a checkpoint{held}")
    elif plan.fits:
        lines.append("on a CPU the plan is coarse, and no reason to refuse")
    else:
        lines.append("more than there is, by a coarse count: it may fail, and is tried")
    return lines


# --- checking -------------------------------------------------------------------------------------------------------
def compared(plan: MemoryPlan, peak_bytes: float) -> tuple[Metrics, str]:
    """Return the predicted peak of torch's allocator with the share by which the measured one is above, and a warning if that is
    more than TOLERATED.
    """
    freed = plan.inputs.freed_cache
    predicted = max(phase.bytes + (0.0 if phase.name == "generate" else freed) for phase in plan.phases)
    error = peak_bytes / predicted - 1
    metrics = {"memory/predicted_gib": predicted / GIB, "memory/plan_error": error}
    if abs(error) <= TOLERATED:
        return metrics, ""
    return metrics, (
        f"memory: the peak is {peak_bytes / GIB:.2f} GiB where {predicted / GIB:.2f} GiB were predicted ({error:+.0%})"
    )
