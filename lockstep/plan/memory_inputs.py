"""Collects the inputs of the memory plan from a recipe, its model and the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from lockstep.config.adapter import ATTENTION, REGEX, Adapter, Lora, NoAdapter, OtherPeft, Targets
from lockstep.config.numerics import PHASES, Phase
from lockstep.config.schema import AdamW, Local, Muon, PythonOptimizer, Recipe, Split
from lockstep.config.vllm import cache_bytes, longest_of
from lockstep.plan.activations import FP32, Layers, Scores, scores
from lockstep.plan.shapes import Linear, ModelShape

GIB = 2**30

STATE_CHUNK = 2**25
"""Number of parameters whose 8-bit moments are expanded to fp32 at a time (learner.adamw8bit.CHUNK)."""
STATE_WORK = 7 * 4
"""Bytes for each of those parameters, at most: moments, roots, codes and their scales, in fp32 or int32."""
USUAL_RANK = 8
"""PEFT's default for its other methods; with it the plan is an upper bound for those without ranks."""
OFFLOAD_CHUNK = 2**24
"""Number of parameters whose masters and moments are on the device at a time, if main memory keeps them
(learner.offload.CHUNK)."""
STATE_BYTES = {"fp32": 8.0, "8bit": 2.0 + 2 * FP32 / 256}
"""Both moments of a parameter; 8-bit ones have an fp32 scale for every 256."""


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """Everything in a recipe and its model that affects memory, in bytes and tokens. plan/memory.py computes with it."""

    shape: ModelShape
    device: Literal["cuda", "cpu"]
    layers: Layers
    trained: int
    """Number of parameters that are trained."""
    added: int
    """Number of adapter parameters among them, which are added to those of the model."""
    state_bytes: float
    """Bytes of both moments of a trained parameter."""
    copies: tuple[str, ...]
    """Further whole sets of weights. Example: ("reference model",)"""
    critic: Literal["none", "own", "shared"]
    extra_passes: bool
    """True if log-probabilities or values are computed before the update."""
    prompt: int
    """Tokens of the longest prompt."""
    response: int
    """Tokens of the longest response."""
    samples_per_step: int
    samples_per_update: int
    samples_per_prompt: int
    share_prompts: bool
    engine: Literal["native", "vllm"]
    vllm_cache: float = 0.0
    """Bytes of vLLM's keys and values."""
    apart: bool = False
    """True if vLLM has a process of its own beside the trainer's, whose torch does not count its memory."""
    cache_stays: bool = False
    """True if vLLM keeps its cache during the update."""
    row: int = 0
    """SFT only: tokens of the longest training row; prompt and response then describe the evaluations."""
    packed: int = 0
    """Frozen parameters that are kept in 4 bits."""
    merged: int = 0
    """Parameters of layers that are kept with their adapters merged in, too: each set of them counts."""
    step_work: float = 0.0
    """Bytes that an optimizer step works with, beside gradients and state."""
    trainers: int = 0
    """Number of workers that train, each with a part of masters and moments; 0 for a run in one process."""
    engines: int = 1
    """Number of engines that share the samples of a step."""
    split: bool = False
    """True if separate workers sample."""
    samplers_copy: bool = False
    """True if an engine of those workers has weights beside the model's."""
    offload: bool = False
    """True if masters and moments are kept in main memory."""
    offload_room: float = 0.0
    """Bytes of the two buffers on the device through which they pass."""

    @property
    def freed_cache(self) -> float:
        """Bytes of keys and values that a vLLM in this process frees between rollouts. torch counts them all the time."""
        return 0.0 if self.split or self.apart or self.cache_stays else self.vllm_cache

    @property
    def owned(self) -> int:
        """Trained parameters whose masters and moments one worker keeps, at most: no tensor is cut."""
        if not self.trainers:
            return self.trained
        return max(-(-self.trained // self.trainers), 0 if self.added else min(self.shape.head, self.trained))

    @property
    def samples_per_engine(self) -> int:
        return -(-self.samples_per_step // self.engines)

    @property
    def element(self) -> int:
        return self.layers.element

    @property
    def masters(self) -> float:
        """Bytes of the fp32 masters of the owned parameters; parameters in fp32 need no other master."""
        return self.master_bytes * self.owned

    @property
    def master_bytes(self) -> float:
        """Bytes of the fp32 master of a trained parameter."""
        return float(FP32) if self.element < FP32 else 0.0

    @property
    def update_tokens(self) -> int:
        """Tokens of all sequences of one update, if every response has its largest length."""
        if self.row:
            return self.samples_per_update * self.row
        return self._tokens(self.samples_per_update)

    @property
    def step_tokens(self) -> int:
        """Tokens of all samples of a step, if every response has its largest length: those of a forward pass before updates."""
        return self._tokens(self.samples_per_step)

    def _tokens(self, samples: int) -> int:
        group = self.samples_per_prompt if self.share_prompts else 1
        return samples * self.response + -(-samples // group) * self.prompt

    @property
    def scores(self) -> Scores:
        """Attention of the learner without a fused kernel: its scores are tensors."""
        return scores(self.shape, self.layers, self.device, self.row or self.prompt + self.response)

    def pairs(self, tokens: int) -> tuple[float, float]:
        """Queries times keys in a stream of that many tokens: of all whose scores are kept, and of those that run at once."""
        longest = self.row or self.prompt + self.response
        if self.row or not self.share_prompts or self.samples_per_prompt == 1:
            return float(tokens * longest), float(longest**2)
        replies = self.response * longest * (self.scores.whole or self.scores.blocks)
        group = self.prompt + self.samples_per_prompt * self.response
        together = min(self.samples_per_prompt, max(1.0, (tokens - self.prompt) / self.response))
        kept = self.prompt**2 + self.samples_per_prompt * replies
        return tokens / group * kept, max(float(self.prompt**2), together * replies)

    def own_keys(self, tokens: int) -> float:
        """Keys of a windowed layer in a stream of that many tokens, if responses that share a prompt have their own; else 0."""
        window = self.scores.window
        if window is None or self.row or not self.share_prompts or self.samples_per_prompt == 1:
            return 0.0
        responses = tokens / (self.prompt / self.samples_per_prompt + self.response)
        return tokens + responses * min(window - 1, self.prompt)

    @property
    def trained_share(self) -> float:
        """Share of a stream's tokens that carry loss; in SFT at most all."""
        if self.row:
            return 1.0
        return self.samples_per_update * self.response / self.update_tokens


def memory_inputs_of(
    recipe: Recipe,
    shape: ModelShape,
    device: Literal["cuda", "cpu"],
    available: float,
    *,
    prompt_tokens: int,
    passes: bool,
) -> MemoryInputs:
    """Collect the inputs of the memory plan from a recipe and the shape of its model, for a device with `available` bytes.

    `passes`: the objective needs log-probabilities or values before the update.
    """
    adapter, place = recipe.adapter, recipe.placement
    rank, added = adapter_size(adapter, shape)
    packed = packed_parameters(adapter, shape)
    element = element_bytes(recipe, device)
    copies = []
    if recipe.algorithm.kl.coef > 0 and not rank:
        copies.append("reference model")
    split, engine_copies = isinstance(place, Split), recipe.weight_transport in ("copy", "ipc")
    if engine_copies and not split:
        copies.append("engine's weights")
    copies += quantised_copies(recipe, reference="reference model" in copies)
    critic = recipe.algorithm.critic
    return MemoryInputs(
        shape=shape,
        device=device,
        layers=Layers(element, fused=device == "cuda", rank=rank, expert_rank=getattr(adapter, "expert_rank", 0)),
        trained=added if rank else shape.parameters,
        added=added,
        packed=packed,
        merged=merged_parameters(recipe, shape, own_engine="engine's weights" in copies),
        state_bytes=state_bytes(recipe, shape),
        copies=tuple(copies),
        critic=critic.backbone if critic else "none",
        extra_passes=passes,
        prompt=prompt_tokens,
        response=recipe.rollout.max_tokens,
        samples_per_step=_generated(recipe),
        samples_per_update=recipe.sft.sequences_per_step if recipe.sft else recipe.samples_per_update,
        samples_per_prompt=1 if recipe.sft else recipe.samples_per_prompt,
        share_prompts=recipe.update.share_prompts,
        engine=recipe.rollout.engine,
        vllm_cache=_vllm_cache(recipe, shape, element, available),
        apart=recipe.rollout.engine == "vllm" and recipe.rollout.vllm.process == "own" and not split,
        cache_stays=recipe.rollout.engine == "vllm" and not recipe.rollout.vllm.sleep and not split,
        row=recipe.sft.max_tokens if recipe.sft else 0,
        step_work=_step_work(recipe, shape, added if rank else shape.parameters),
        trainers=0 if isinstance(place, Local) else place.trainers,
        engines=recipe.engines,
        split=split,
        samplers_copy=split and engine_copies,
        offload=recipe.optimizer.offload == "cpu",
        offload_room=_offload_room(recipe, shape, element),
    )


def element_bytes(recipe: Recipe, device: Literal["cuda", "cpu"]) -> int:
    """Bytes of an element of the weights."""
    return 4 if recipe.model.dtype == "fp32" or (recipe.model.dtype == "auto" and device == "cpu") else 2


def critic_parameters(shape: ModelShape, added: int) -> int:
    """Parameters of a critic of its own: the decoder's, without a separate head; under an adapter the `added` of its adapters."""
    return added or shape.parameters - (0 if shape.tied else shape.head)


def state_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes that the recipe's optimizer keeps of a trained parameter, on average."""
    optimizer = recipe.optimizer
    match optimizer:
        case AdamW():
            return STATE_BYTES[optimizer.states]
        case Muon():  # one fp32 number for matrices between hidden states, AdamW's two for the rest
            hidden = sum(linear.parameters for linear in shape.all_linears)
            matrices = 1.0 if recipe.adapter.kind != "none" else hidden / shape.parameters
            return FP32 * matrices + STATE_BYTES["fp32"] * (1 - matrices)
        case PythonOptimizer():
            return optimizer.state_bytes
        case _:
            assert_never(optimizer)


def offloaded_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes of a trained parameter that a GPU's step gets from main memory and puts back."""
    if recipe.optimizer.offload == "none":
        return 0.0
    return state_bytes(recipe, shape) + FP32 * (recipe.model.dtype != "fp32")


def _offload_room(recipe: Recipe, shape: ModelShape, element: int) -> float:
    """Two batches of masters and moments; Muon's largest matrix is not cut, and has one moment."""
    if recipe.optimizer.offload == "none":
        return 0.0
    master = FP32 * (element < FP32)
    room = min(OFFLOAD_CHUNK, shape.parameters) * (master + state_bytes(recipe, shape))
    if isinstance(recipe.optimizer, Muon):
        largest = max((linear.parameters for linear in shape.linears), default=0)
        room = max(min(OFFLOAD_CHUNK, shape.parameters) * (master + STATE_BYTES["fp32"]), largest * (master + FP32))
    return 2 * room


def _generated(recipe: Recipe) -> int:
    """Samples that are drawn together: a step's, or in SFT an evaluation's."""
    if recipe.sft is None:
        return recipe.samples_per_step
    return max(one.items * mode.samples for one, mode in recipe.eval.pairs) if recipe.eval.enabled else 1


def _step_work(recipe: Recipe, shape: ModelShape, trained: int) -> float:
    """8-bit moments made wide a chunk at a time; of Muon the largest matrix: its update in fp32, three times in bf16."""
    optimizer = recipe.optimizer
    if isinstance(optimizer, AdamW) and optimizer.states == "8bit":
        return float(STATE_WORK * min(OFFLOAD_CHUNK if optimizer.offload == "cpu" else STATE_CHUNK, trained))
    if isinstance(optimizer, Muon):
        return float((FP32 + 3 * 2) * max((linear.parameters for linear in shape.linears), default=0))
    return 0.0


def _vllm_cache(recipe: Recipe, shape: ModelShape, element: int, available: float) -> float:
    if recipe.rollout.engine != "vllm":
        return 0.0
    vllm = recipe.rollout.vllm
    length = longest_of(vllm, recipe.longest_reply, shape.context)
    return float(cache_bytes(vllm, recipe.vllm_room * length * shape.kv_bytes(element), available))


# --- adapters and copies ----------------------------------------------------------------------------------------------
def adapter_size(adapter: Adapter, shape: ModelShape) -> tuple[int, int]:
    """Rank and parameters of all layers together; (0, 0) for full training."""
    match adapter:
        case NoAdapter():
            return 0, 0
        case Lora(rank=rank):
            chosen = targeted(adapter.targets, shape)
            names = {linear.name for linear in chosen}
            lengths = sum(x.outputs for x in shape.all_linears if x.name in names) if adapter.dora else 0
            on_experts = (
                adapter.expert_rank * shape.layers * shape.experts * (2 * shape.hidden + 3 * shape.intermediate)
            )
            return rank, shape.adapter_parameters(rank, [linear.name for linear in chosen]) + lengths + on_experts
        case OtherPeft():
            asked = adapter.options.get("r")
            rank = asked if isinstance(asked, int) and asked > 0 else USUAL_RANK
            return rank, shape.adapter_parameters(rank, [linear.name for linear in targeted(adapter.targets, shape)])
        case _:
            assert_never(adapter)


def packed_parameters(adapter: Adapter, shape: ModelShape) -> int:
    """Parameters of the base that are kept in 4 bits."""
    if not isinstance(adapter, Lora) or adapter.base == "full":
        return 0
    if adapter.base == "mxfp4":
        return shape.layers * shape.experts * 3 * shape.hidden * shape.intermediate
    return shape.layers * sum(linear.inputs * linear.outputs for linear in targeted(adapter.targets, shape))


def merged_parameters(recipe: Recipe, shape: ModelShape, *, own_engine: bool) -> int:
    """Parameters of layers that are kept with their adapters merged in, too, by the learner, a native engine with weights of its
    own, and a critic with a backbone of its own."""
    adapter, critic = recipe.adapter, recipe.algorithm.critic
    if not isinstance(adapter, Lora) or not adapter.merged:
        return 0
    sets = 1 + (own_engine and recipe.rollout.engine == "native") + (critic is not None and critic.backbone == "own")
    return sets * shape.layers * sum(linear.inputs * linear.outputs for linear in targeted(adapter.targets, shape))


def targeted(targets: Targets, shape: ModelShape) -> list[Linear]:
    """Return the linear layers of one decoder layer that get an adapter; a regular expression counts those that it spells out."""
    match targets:
        case "auto" if not shape.experts:
            return list(shape.linears)
        case "auto" | "attention":
            return [linear for linear in shape.linears if linear.name in ATTENTION]
        case "all-linear":
            return list(shape.linears)
        case list():
            names = {target.rsplit(".", 1)[-1] for target in targets if not target.startswith(REGEX)}
            patterns = [target for target in targets if target.startswith(REGEX)]
            return [x for x in shape.linears if x.name in names or any(x.name in pattern for pattern in patterns)]
        case _:
            assert_never(targets)


def quantised_copies(recipe: Recipe, *, reference: bool) -> list[str]:
    """Quantised weights that are kept beside those that they are made of: a set for each format and each model (counted as whole
    sets of weights, though embeddings and head have none)."""
    settings = recipe.numerics

    def formats(*phases: Phase) -> list[str]:
        return sorted({settings.of(phase).partition("-")[0] for phase in phases} - {""})

    if recipe.rollout.engine == "native" and recipe.sync.transport == "shared":
        found = [f"weights in {name}" for name in formats(*PHASES)]
    else:
        found = [f"weights in {name}" for name in formats("train")]
        if recipe.rollout.engine == "native":
            found += [f"engine's weights in {name}" for name in formats("rollout", "eval")]
    return found + [f"reference model in {name}" for name in formats("train") if reference]
