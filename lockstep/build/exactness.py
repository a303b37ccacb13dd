"""Decides whether a run can use `numerics.exact`, by a test on this device."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from lockstep.config.numerics import PHASES
from lockstep.config.schema import Recipe
from lockstep.learner.learner import base_model
from lockstep.models import exact
from lockstep.models.decoder import Decoder
from lockstep.models.known import has_experts, kind_of_experts

log = logging.getLogger(__name__)

FAMILIES = frozenset({"gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""Model types for which it was shown."""
REPLAYED = "the engine that records routes (update.replay_routing) has attention of its own; other sums have one order"


def wants_exactness(model: nn.Module, recipe: Recipe, *, on_gpu: bool) -> bool:
    """Return whether the recipe asks for exactness with this model, which has no adapter and may be on torch's meta device."""
    asked = recipe.numerics.exact
    return bool(asked) if asked != "auto" else on_gpu and has_experts(model)


def settle_exactness(model: nn.Module, recipe: Recipe) -> None:
    """Turn exactness on for this process if the recipe asks for it and the device passes the test; else say why not."""
    asked, on_gpu = recipe.numerics.exact, next(model.parameters()).device.type == "cuda"
    if not wants_exactness(base_model(model), recipe, on_gpu=on_gpu):
        exact.enable("", on=False)
        return
    if not on_gpu:
        exact.enable(
            "exact: off, it is for GPUs; on a CPU rollouts and updates differ by rounding of fp32 sums", on=False
        )
        return
    reason = unserved(model, recipe)
    if not reason:
        from lockstep.build.exactness_check import differing

        reason = "; ".join(differing(Decoder.of(model)))
    if reason:
        exact.enable(f"exact: off, {reason}", on=False)
        if asked is True:
            log.warning("numerics.exact has no effect: %s", reason)
        return
    from lockstep.build.exactness_check import changing

    exact.order_products(base_model(model))
    changes = changing(Decoder.of(model))
    again = f"two runs may differ, because {changes}" if changes else "an update repeated gives the same bits"
    if recipe.update.replay_routing:
        exact.enable(f"exact: off, {REPLAYED}; {again}", repeatable=not changes, complete=False)
        if asked is True:
            log.warning("numerics.exact has only part of its effect: %s", REPLAYED)
        return
    exact.enable(f"exact: on, its kernels agree bit by bit on this device; {again}", repeatable=not changes)


def unserved(model: nn.Module, recipe: Recipe) -> str:
    """Return why this run cannot be exact; empty if it can."""
    base: Any = base_model(model)
    config: Any = base.config.get_text_config()
    weight, adapter = next(base.parameters()), recipe.adapter
    if recipe.rollout.engine != "native":
        return f"the engine {recipe.rollout.engine} has kernels of its own"
    if recipe.sync.transport == "copy":
        return "with sync.transport=copy the engine does not read the learner's own weights"
    if str(weight.dtype) != "torch.bfloat16":
        return f"the weights are {str(weight.dtype).removeprefix('torch.')}, but numerics.exact needs bf16"
    if config.model_type not in FAMILIES:
        return f"it was tested for {' and '.join(sorted(FAMILIES))}, not for {config.model_type}"
    if adapter.kind not in ("none", "lora") or getattr(adapter, "dora", False):
        return "it supports no adapter except plain LoRA"
    if getattr(adapter, "merged", False):
        return "it was not tested with adapter.merged"
    if (stored := getattr(adapter, "base", "full")) not in ("full", "mxfp4"):
        return f"the base is in {stored}"
    if numeric := next((recipe.numerics.of(phase) for phase in PHASES if recipe.numerics.of(phase)), ""):
        return f"a phase computes in {numeric}"
    if recipe.noise is not None:
        return "noise changes the sampling model on purpose"
    if any(type(m).__name__.endswith("Experts") and kind_of_experts(m) is None for m in base.modules()):
        return "the model's experts are of a form that the kernels do not support"
    decoder = Decoder.of(model)
    size = decoder.head_size
    if size & (size - 1) or not 16 <= size <= 256:
        return f"the head size {size} is not a power of two from 16 to 256"
    plain = decoder.head.bias_V is None and decoder.head.softcap is None and decoder.head.scale == 1.0
    return "" if plain else "the head has a bias, a cap or a factor"
