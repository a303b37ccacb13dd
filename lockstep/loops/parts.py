"""The objects of a run, built from its recipe. Everything that is swapped by a setting is chosen here or in a build_* below."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from lockstep.algorithms.build import Objective, build_objective
from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.device import choose_device, prepare_process
from lockstep.learner.learner import TorchLearner, base_model
from lockstep.models import ResolvedModel, load_model, load_tokenizer, resolve, resolve_dtype
from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.weights import frozen_names, load_weights
from lockstep.rollout.native import NativeEngine
from lockstep.seeds import seed_for
from lockstep.sync.transports import CopySync, SharedSync, build_sync
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that can be sampled: what training, evaluation and sampling have in common."""

    resolved: ResolvedModel
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    numerics: Literal["fp32", "bf16"]

    @property
    def context(self) -> int | None:
        """Longest sequence that the model takes."""
        config: Any = base_model(self.model).config.get_text_config()
        return getattr(config, "max_position_embeddings", None)


@dataclass(frozen=True, slots=True)
class Parts:
    """A run's parts, in the order in which data flows through them."""

    policy: Policy
    task: BuiltTask
    engine: NativeEngine
    objective: Objective
    learner: TorchLearner
    sync: SharedSync | CopySync


def build_task_of(recipe: Recipe) -> BuiltTask:
    return build_task(recipe.task, recipe.seed)


def build_policy(recipe: Recipe, weights: Mapping[str, Tensor] | None = None) -> Policy:
    """Load the model with its adapter; `weights`, in the names of lockstep.models.weights, replace what was loaded."""
    device = choose_device(recipe.device)
    prepare_process(device, recipe.threads)
    resolved = resolve(recipe.model)
    dtype = resolve_dtype(recipe.model.dtype, device)
    base = load_model(resolved, dtype=dtype, device=device, attention=ATTENTION)
    tokenizer = load_tokenizer(resolved)
    generation: Any = base.generation_config
    chat = ChatFormat(tokenizer, recipe.chat, getattr(generation, "eos_token_id", None))
    model = attach(base, recipe.adapter, seed_for(recipe.seed, "adapter"))
    if weights is not None:
        load_weights(model, iter(weights.items()))
    return Policy(resolved, model, tokenizer, chat, "bf16" if str(dtype).endswith("bfloat16") else "fp32")


def build_engine(policy: Policy, recipe: Recipe, *, own_copy: bool = False) -> NativeEngine:
    """The engine over the policy's own model, or over a copy that must be sent its weights."""
    model = copy.deepcopy(policy.model) if own_copy else policy.model
    decode: Any = policy.tokenizer.decode
    return NativeEngine(model, slots=recipe.rollout.slots, stop_ids=frozenset(policy.chat.stop_ids), decode=decode)


def build_parts(recipe: Recipe, task: BuiltTask, weights: Mapping[str, Tensor] | None = None) -> Parts:
    """Everything that a training run needs. Raises LockstepError for whatever would fail later."""
    policy = build_policy(recipe, weights)
    objective = build_objective(recipe)
    reference = None
    if objective.needs_reference and recipe.adapter.kind == "none":
        reference = copy.deepcopy(policy.model).requires_grad_(False)
    engine = build_engine(policy, recipe, own_copy=recipe.sync.transport == "copy")
    learner = TorchLearner(policy.model, recipe, reference)
    sync = build_sync(
        recipe.sync,
        vocab=int(base_model(policy.model).config.get_text_config().vocab_size),
        numerics=policy.numerics,
        special=policy.tokenizer.all_special_ids,
        frozen=frozen_names(policy.model),
    )
    return Parts(policy, task, engine, objective, learner, sync)
