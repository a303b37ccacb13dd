"""A worker that samples with an engine in a process of its own, as vLLM may, on a machine without vLLM."""

from __future__ import annotations

from typing import Any

from lockstep.build.build import build_weight_sync
from lockstep.build.parts import Policy
from lockstep.cluster import sampler
from lockstep.config.schema import Recipe
from lockstep.sync.transports import CopySync, SharedSync
from lockstep.types import RolloutEngine
from tests.rollout.vllm.native_child import start


def _engine(policy: Policy, recipe: Recipe) -> RolloutEngine:
    slots = recipe.rollout.slots
    assert isinstance(slots, int)
    return start(policy.resolved.path, slots=slots, stop_ids=sorted(policy.chat.stop_ids))


def _sync(policy: Policy, recipe: Recipe) -> SharedSync | CopySync:
    """Return the transport of a recipe with vLLM in a process of its own, which is refused on a CPU."""
    vllm = recipe.rollout.vllm.model_copy(update={"process": "own", "transport": "copy"})
    rollout = recipe.rollout.model_copy(update={"engine": "vllm", "vllm": vllm})
    return build_weight_sync(policy, recipe.model_copy(update={"rollout": rollout}))


class CopySampler(sampler.Sampler):
    """A sampler whose engine has its own copy of the weights."""

    def build(self, recipe: str, weights: bool) -> Any:
        parts: Any = sampler
        parts.build_engine, parts.build_weight_sync = _engine, _sync
        return super().build(recipe, weights)
