"""Builds the objects of a run from its recipe. Everything that a setting selects is chosen here or in a build_* function."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, assert_never

from torch import Tensor

from lockstep.algorithms.build import Objective, build_objective
from lockstep.build.exactness import settle_exactness, wants_exactness
from lockstep.build.memory import execution, plan_run, rows_of_engine
from lockstep.build.opponents import load_opponents
from lockstep.build.parts import Carried, Parts, Policy, PolicyFacts
from lockstep.build.warm_start import adapter_weights, find_parent, load_base, require_proven
from lockstep.chat.chat import ChatFormat
from lockstep.config.adapter import keeps_mxfp4
from lockstep.config.schema import Recipe
from lockstep.device import allow_repeatable_products, choose_device, prepare_process
from lockstep.envs.programs import MODEL
from lockstep.errors import ConfigError, ModelError
from lockstep.learner.adapter_files import Base
from lockstep.learner.adapters import adopt_starts, attach
from lockstep.learner.critic import TorchCritic, build_critic
from lockstep.learner.learner import TorchLearner, base_model
from lockstep.learner.ranks import Ranks
from lockstep.learner.rounding import rounding_gap
from lockstep.models import exact, load_model, load_tokenizer, resolve, resolve_dtype
from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.decoder import context_of
from lockstep.models.fused_layers import fuse_layers
from lockstep.models.known import has_experts
from lockstep.models.merged_weights import merged_of
from lockstep.models.weights import frozen_names, load_weights, named_weights
from lockstep.noise.targets import find_targets
from lockstep.numerics.apply import numerics_of
from lockstep.plan.choice import MemoryPlan
from lockstep.plan.family import require_family
from lockstep.plan.model_shape import meta_model
from lockstep.rollout.allocator import grow_segments
from lockstep.rollout.build import native_engine
from lockstep.rollout.vllm.build import prepare_environment, vllm_engine
from lockstep.seeds import seed_for
from lockstep.serve.endpoint import Endpoint
from lockstep.sync.transports import CopySync, SharedSync, build_sync
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.types import RolloutEngine, Sampler, TokenIds


def build_task_of(recipe: Recipe) -> BuiltTask:
    """Return the recipe's task, with the opponents of its games."""
    task = build_task(recipe.task, recipe.seed)
    load_opponents(task, recipe)
    return task


def connect(task: BuiltTask, policy: PolicyFacts) -> None:
    """Give the task a way to open an endpoint, for programs that play its episodes. They write all of a chat themselves."""

    def open_endpoint(sampler: Sampler) -> Endpoint:
        return Endpoint(sampler, policy.chat.unframed(), model=MODEL, context=policy.context or 0)

    task.open_endpoint = open_endpoint


def prepare_for_engine(recipe: Recipe) -> None:
    """Set up this process for the engine's libraries. Raises EngineError if it is too late to remove a setting."""
    match recipe.rollout.engine:
        case "native":
            grow_segments(os.environ)
        case "vllm":
            prepare_environment()
        case other:
            assert_never(other)


def build_policy(recipe: Recipe, *, replaced: bool = False) -> Policy:
    """Load the model with its adapter, and a warm start's weights. `replaced`: a checkpoint holds every weight."""
    parent = None if replaced else find_parent(recipe)
    prepare_for_engine(recipe)
    device = choose_device(recipe.device)
    prepare_process(device, recipe.threads)
    resolved = resolve(recipe.model)
    dtype = resolve_dtype(recipe.model.dtype, device)
    empty = meta_model(resolved.path, resolved.trust_remote_code)
    require_family(type(empty), empty.config)  # before weights are read
    if wants_exactness(empty, recipe, on_gpu=device.type == "cuda"):
        allow_repeatable_products(device)
    packed = keeps_mxfp4(recipe.adapter)
    base = load_model(resolved, dtype=dtype, device=device, attention=ATTENTION, packed=packed)
    load_base(base, parent)
    if device.type == "cuda":
        fuse_layers(base)  # for every user of the model: an evaluation without a learner must round as training does
    tokenizer = load_tokenizer(resolved)
    generation: Any = base.generation_config
    chat = ChatFormat(tokenizer, recipe.chat, getattr(generation, "eos_token_id", None))
    require_rows(base, chat, resolved.name)
    origin = Base.of(base, resolved.name) if recipe.adapter.kind != "none" else None
    model = attach(base, recipe.adapter, seed_for(recipe.seed, "adapter"), origin)
    numerics: Literal["fp32", "bf16"] = "bf16" if str(dtype).endswith("bfloat16") else "fp32"
    context = context_of(base_model(model).config)
    policy = Policy(resolved, tokenizer, chat, numerics, context, parent, model=model)
    require_precision(recipe, policy.numerics)
    numerics_of(model, recipe.numerics.scale, recipe.numerics.exclude)
    settle_exactness(model, recipe)
    if parent is not None and (weights := adapter_weights(parent, policy.numerics)) is not None:
        load_weights(model, iter(adopt(policy, weights).items()))
        require_proven(model, parent)
    return policy


def require_rows(model: Any, chat: ChatFormat, name: str) -> None:
    """Raise ModelError if the tokenizer writes ids that the embedding has no row for: on a GPU they end the whole process.

    Added tokens that no prompt is made of may lie beyond it, such as that for an image (Gemma 3 1B).
    """
    rows, added = model.get_input_embeddings().weight.shape[0], chat.tokenizer.added_tokens_decoder
    usual = (i for i in chat.tokenizer.get_vocab().values() if i not in added)
    largest = max((*usual, *chat.prefix, chat.template.end_of_turn() or 0))
    if largest >= rows:
        token = chat.tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"the tokenizer writes {token!r} as {largest}, but the model's embedding has only {rows} rows",
            where=name,
            fix="use the tokenizer that belongs to the model, or call model.resize_token_embeddings and save it again",
        )


def adopt(policy: Policy, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's weights, ready to be loaded. An adapter that began as a part of the base's weights (PiSSA, OLoRA)
    needs the same residual that it was trained on, which is written to the base here.
    """

    def originals() -> Mapping[str, Tensor]:
        kept = next(policy.model.parameters())
        base = load_model(policy.resolved, dtype=kept.dtype, device="cpu", attention=ATTENTION)
        load_base(base, policy.parent)
        return dict(named_weights(base))

    return adopt_starts(policy.model, weights, originals)


def build_engine(
    policy: Policy, recipe: Recipe, *, own_copy: bool = False, memory: MemoryPlan | None = None
) -> RolloutEngine:
    """Build the recipe's engine. The native one runs the policy's own model, or a copy (`own_copy`) that must be sent its
    weights.

    `memory` decides its number of slots if the recipe leaves it open.
    """
    decode: Any = policy.tokenizer.decode
    stop_ids = frozenset(policy.chat.stop_ids)
    match recipe.rollout.engine:
        case "native":
            model = copy.deepcopy(policy.model) if own_copy else policy.model
            slots = rows_of_engine(recipe, next(model.parameters()).device.type, memory)
            return native_engine(
                model, slots=slots, stop_ids=stop_ids, decode=decode, routes=recipe.update.replay_routing
            )
        case "vllm":
            return vllm_engine(recipe, policy.model, str(policy.resolved.path), stop_ids, decode)
        case other:
            assert_never(other)


def build_weight_sync(policy: Policy, recipe: Recipe) -> SharedSync | CopySync:
    """Build the transport of the policy's weights to its engine. vLLM has no adapters: they are merged."""
    merges = recipe.rollout.engine == "vllm" and recipe.adapter.kind != "none"

    def rounding(sequences: Sequence[TokenIds]) -> float:
        return rounding_gap(policy.model, sequences, sum(map(len, sequences)))

    return build_sync(
        recipe.sync,
        vocab=int(base_model(policy.model).config.get_text_config().vocab_size),
        numerics="exact" if exact.complete() else policy.numerics,
        special=policy.tokenizer.all_special_ids,
        frozen=frozen_names(policy.model),
        transport="copy" if recipe.weight_transport in ("copy", "ipc") else "shared",
        merge=frozenset(name for name, _ in named_weights(policy.model)) if merges else None,
        dithered=bool(merged_of(policy.model)),
        rounding=rounding if recipe.rollout.engine == "vllm" or has_experts(base_model(policy.model)) else None,
    )


def build_parts(
    recipe: Recipe,
    task: BuiltTask,
    weights: Mapping[str, Tensor] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Parts:
    """Build everything that a training run needs. Raises LockstepError for anything that would fail later.

    `weights`, in the names of lockstep.models.weights, replace those that the run starts from; its reference stays the start.
    `say` receives the lines of the memory plan before the model is loaded.
    """
    objective = build_objective(recipe)
    prepare_for_engine(recipe)  # before the plan, which asks the GPU for its memory and so starts CUDA
    memory = plan_run(recipe, task, objective, say)
    policy, engine, learner, critic = build_trained(recipe, objective, weights, memory)
    connect(task, policy)
    sync = build_weight_sync(policy, recipe)
    noise = None if recipe.noise is None else find_targets(policy.model, recipe.noise)
    return Parts(policy, task, engine, objective, learner, critic, sync, Carried.at_start(recipe), memory, noise)


def build_trained(
    recipe: Recipe,
    objective: Objective,
    weights: Mapping[str, Tensor] | None,
    memory: MemoryPlan | None = None,
    ranks: Ranks | None = None,
) -> tuple[Policy, RolloutEngine, TorchLearner, TorchCritic | None]:
    """Load the model, and build its engine, learner and critic. `weights` as in build_parts, `ranks` as in TorchLearner."""
    full, plan = recipe.adapter.kind == "none", execution(memory)
    policy = build_policy(recipe, replaced=weights is not None and full and not objective.needs_reference)
    critic = build_critic(policy.model, recipe, plan, ranks) if objective.needs_values else None
    reference = copy.deepcopy(policy.model).requires_grad_(False) if objective.needs_reference and full else None
    if weights is not None:
        load_weights(policy.model, iter(adopt(policy, weights).items()))
    engine = build_engine(policy, recipe, own_copy=recipe.sync.transport == "copy", memory=memory)
    joint = critic.joint if critic else None
    return policy, engine, TorchLearner(policy.model, recipe, reference, joint, plan, ranks), critic


def require_precision(recipe: Recipe, weights: str) -> None:
    """Raise ConfigError if numerics names a precision that differs from that of the loaded weights."""
    named = recipe.numerics.plain_named
    if named is not None and named != weights:
        raise ConfigError(
            [f"numerics names {named}, but the weights are in {weights}, in which unquantised layers compute"],
            fix=f"set model.dtype={named}, or replace {named} by {weights} in the numerics section",
        )
