"""Peak memory of a run on one device, phase by phase, predicted before anything is loaded.

Of every phase   M = static + tokens · slope + const + keys and values   and, once, what other than torch takes: the context,
libraries, captured graphs. `static` are the tensors that outlive a phase: weights, fp32 masters, moments, copies of the
weights. Lifetimes follow the learner: a bf16 gradient is added to its fp32 sum as soon as it is complete and freed; sums exist
from the first micro-batch to the optimizer step; moments from the first step on; keys and values during a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from lockstep.config.schema import AdamW, Muon, PythonOptimizer, Recipe
from lockstep.plan.activations import FP32, Layers, PerToken, Recompute, per_token
from lockstep.plan.adapter import adapter_size, packed_parameters
from lockstep.plan.copies import quantised_copies
from lockstep.plan.shapes import ModelShape

GIB = 2**30

LOGITS_BYTES = 2**31
"""A GPU's head makes logits in tiles of so many bytes (models.head_kernels.TILE_BYTES)."""
CPU_TILE = 512 * 2048
"""A CPU's head makes so many logits at once, in fp32."""
PAGE = 64
"""Tokens of a page of keys and values (rollout.paged.state.PAGE)."""
PREFILL_TOKENS = 16384
"""Prompt tokens that the native engine processes at once (rollout.paged.prefill.PREFILL_TOKENS)."""
VLLM_PROMPT_ROOM = 8192
"""Prompt tokens that vLLM has room for by default beside a reply (rollout.vllm.settings.PROMPT_ROOM)."""
PROOF_BYTES = {"cuda": 16 * 2**20, "cpu": 2 * 2**20}
"""Work space of the fingerprints."""
STATE_CHUNK = 2**25
"""Parameters whose 8-bit moments are wide at a time (learner.adamw8bit.CHUNK)."""
STATE_WORK = 7 * 4
"""Bytes of each of those, at most: moments, roots, codes and their scales, in fp32 or int32."""
STATE_BYTES = {"fp32": 8.0, "8bit": 2.0 + 2 * FP32 / 256}
"""Both moments of a parameter; 8-bit ones have an fp32 scale for every 256."""
WORKSPACE = 96 * 2**20
"""Work space of the matrix libraries, which torch's allocator holds."""
VLLM_BYTES = 2.5 * GIB
"""What vLLM takes beside weights, keys and values: activations of a profile run, samplers, graphs."""
NF4_BYTES = 0.5 + 2 / 64
"""Of a weight in 4 bits with its share of a scale (models.nf4.BYTES)."""
OUTSIDE = {"cuda": 1.25 * GIB, "cpu": 0.5 * GIB}
"""Context, libraries and kernels of the process, outside torch's allocator."""


@dataclass(frozen=True, slots=True)
class Job:
    """What of a recipe and its model decides memory. Bytes and tokens."""

    shape: ModelShape
    device: Literal["cuda", "cpu"]
    layers: Layers
    trained: int
    """Parameters that are trained."""
    added: int
    """Of those, the adapters': they come on top of the model's own."""
    state_bytes: float
    """Both moments of a trained parameter."""
    copies: tuple[str, ...]
    """Further whole sets of weights. Example: ("reference model",)"""
    critic: Literal["none", "own", "shared"]
    extra_passes: bool
    """Log-probabilities or values are computed before the update."""
    prompt: int
    """Longest prompt."""
    response: int
    """Longest response."""
    samples_per_step: int
    samples_per_update: int
    samples_per_prompt: int
    share_prompts: bool
    engine: Literal["native", "vllm"]
    vllm_cache: float = 0.0
    """Bytes of vLLM's keys and values."""
    cache_stays: bool = False
    """vLLM keeps its cache during the update."""
    row: int = 0
    """SFT: tokens of the longest row that is trained; prompt and response are then those of evaluations alone."""
    packed: int = 0
    """Frozen parameters that are kept in 4 bits."""
    step_work: float = 0.0
    """Bytes that an optimizer step works with, beside gradients and state."""

    @property
    def element(self) -> int:
        return self.layers.element

    @property
    def masters(self) -> float:
        """fp32 masters of the trained parameters; fp32 parameters are their own."""
        return FP32 * self.trained if self.element < FP32 else 0.0

    @property
    def update_tokens(self) -> int:
        """Tokens of one update's streams, if all responses are as long as they may be."""
        if self.row:
            return self.samples_per_update * self.row
        group = self.samples_per_prompt if self.share_prompts else 1
        return self.samples_per_update * self.response + -(-self.samples_per_update // group) * self.prompt

    @property
    def trained_share(self) -> float:
        """Share of a stream's tokens that carry loss; in SFT at most all."""
        if self.row:
            return 1.0
        return self.samples_per_update * self.response / self.update_tokens


def job_of(
    recipe: Recipe,
    shape: ModelShape,
    device: Literal["cuda", "cpu"],
    available: float,
    *,
    prompt_tokens: int,
    passes: bool,
) -> Job:
    """The job that a recipe makes of a model, on a device with `available` bytes.

    `passes`: the objective needs log-probabilities or values before the update.
    """
    adapter = recipe.adapter
    rank, added = adapter_size(adapter, shape)
    packed = packed_parameters(adapter, shape)
    element = 4 if recipe.model.dtype == "fp32" or (recipe.model.dtype == "auto" and device == "cpu") else 2
    copies = []
    if recipe.algorithm.kl.coef > 0 and not rank:
        copies.append("reference model")
    if recipe.weight_transport in ("copy", "ipc"):
        copies.append("engine's weights")
    copies += quantised_copies(recipe, reference="reference model" in copies)
    critic = recipe.algorithm.critic
    return Job(
        shape=shape,
        device=device,
        layers=Layers(element, fused=device == "cuda", rank=rank),
        trained=added if rank else shape.parameters,
        added=added,
        packed=packed,
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
        cache_stays=recipe.rollout.engine == "vllm" and not recipe.rollout.vllm.sleep,
        row=recipe.sft.max_tokens if recipe.sft else 0,
        step_work=_step_work(recipe, shape, added if rank else shape.parameters),
    )


def state_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes that the recipe's optimizer keeps of a trained parameter, on average."""
    optimizer = recipe.optimizer
    match optimizer:
        case AdamW():
            return STATE_BYTES[optimizer.states]
        case Muon():  # one fp32 number for matrices between hidden states, AdamW's two for the rest
            hidden = shape.layers * sum(linear.parameters for linear in shape.linears)
            matrices = 1.0 if recipe.adapter.kind != "none" else hidden / shape.parameters
            return FP32 * matrices + STATE_BYTES["fp32"] * (1 - matrices)
        case PythonOptimizer():
            return optimizer.state_bytes
        case _:
            assert_never(optimizer)


def _generated(recipe: Recipe) -> int:
    """Samples that are drawn together: a step's, or in SFT an evaluation's."""
    if recipe.sft is None:
        return recipe.samples_per_step
    return recipe.eval.items * max(mode.samples for mode in recipe.eval.modes) if recipe.eval.enabled else 1


def _step_work(recipe: Recipe, shape: ModelShape, trained: int) -> float:
    """8-bit moments made wide a chunk at a time; of Muon the largest matrix: its update in fp32, three times in bf16."""
    optimizer = recipe.optimizer
    if isinstance(optimizer, AdamW) and optimizer.states == "8bit":
        return float(STATE_WORK * min(STATE_CHUNK, trained))
    if isinstance(optimizer, Muon):
        return float((FP32 + 3 * 2) * max((linear.parameters for linear in shape.linears), default=0))
    return 0.0


def _vllm_cache(recipe: Recipe, shape: ModelShape, element: int, available: float) -> float:
    """As rollout.vllm.settings works it out."""
    vllm, rollout = recipe.rollout.vllm, recipe.rollout
    if rollout.engine != "vllm":
        return 0.0
    if vllm.kv_cache_gib is not None:
        return vllm.kv_cache_gib * GIB
    length = vllm.max_model_len or max(rollout.max_tokens, recipe.eval.max_tokens or 0) + VLLM_PROMPT_ROOM
    return min(float(rollout.slots * length * shape.kv_bytes(element)), vllm.gpu_memory_utilization * available)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a phase's memory. Example: Term("fp32 masters", 6.2e9)"""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What is alive at the worst moment of a phase."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        return sum(term.bytes for term in self.terms)

    @property
    def largest(self) -> Term:
        return max(self.terms, key=lambda term: term.bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan decides."""

    tokens: int
    """Of one micro-batch, at most."""
    recompute: Recompute
    slots: int


def phases(job: Job, sizes: Sizes) -> tuple[Phase, ...]:
    """All phases of a run, in order."""
    rate = per_token(job.shape, job.layers, sizes.recompute)
    tokens = stream_tokens(job, sizes.tokens)
    weights, state = static_terms(job, sizes.slots)
    static = (*weights, *state)
    found = [Phase("load", weights), Phase("generate", (*static, *generate_terms(job, sizes.slots)))]
    if job.cache_stays:
        static = (*static, Term("keys and values", job.vllm_cache))
    if job.extra_passes:
        found.append(Phase("log-probabilities", (*static, *forward_terms(job, rate, tokens))))
    found.append(Phase("train", (*static, *train_terms(job, rate, tokens, job.trained))))
    found.append(Phase("optimizer", (*static, *optimizer_terms(job))))
    if job.critic == "own":
        found.append(Phase("critic", (*static, *train_terms(job, rate, tokens, critic_trained(job), head=False))))
    found.append(Phase("sync and proof", (*static, *sync_terms(job))))
    found.append(Phase("save", static))
    return tuple(found)


def peak(found: tuple[Phase, ...]) -> Phase:
    return max(found, key=lambda phase: phase.bytes)


def stream_tokens(job: Job, budget: int) -> int:
    """Tokens of the largest micro-batch: the budget, unless the update has fewer, or one sequence more."""
    return max(min(budget, job.update_tokens), job.row or job.prompt + job.response)


# --- parts of a phase -----------------------------------------------------------------------------------------------
def static_terms(job: Job, slots: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """What loading makes, and what the first step adds for the rest of the run."""
    shape, element = job.shape, job.element
    weights = element * (shape.parameters - job.packed) + NF4_BYTES * job.packed
    critic = critic_trained(job)
    terms = [Term("weights", weights + element * job.added), Term("fp32 masters", job.masters)]
    terms += [Term(name, weights + element * job.added) for name in job.copies]
    state = [Term("moments", job.state_bytes * job.trained)]
    if job.critic == "own":
        terms.append(Term("critic", (element + FP32 * (element < FP32)) * critic))
        state.append(Term("critic's moments", job.state_bytes * critic))
    engine = VLLM_BYTES if job.engine == "vllm" else element * slots * shape.vocab
    terms.append(Term("engine's buffers", engine))
    if job.device == "cuda":
        terms.append(Term("work space", WORKSPACE))
    present = tuple(term for term in terms if term.bytes)
    return present, tuple(term for term in state if term.bytes)


def critic_trained(job: Job) -> int:
    """Parameters that a critic of its own trains: the decoder's, without a separate head; under an adapter its adapters."""
    if job.critic != "own":
        return 0
    if job.added:
        return job.added
    return job.shape.parameters - (0 if job.shape.tied else job.shape.head)


def cache_bytes(job: Job, slots: int) -> float:
    """Keys and values of `slots` samples side by side, each as long as it may be, prompts once for each group."""
    if job.engine == "vllm":
        return job.vllm_cache
    one = job.shape.kv_bytes(job.element)
    count = min(slots, job.samples_per_step)
    if job.device == "cpu":
        return count * (job.prompt + job.response) * one
    prompts = -(-count // job.samples_per_prompt)
    pages = count * (-(-job.response // PAGE) + 1) + prompts * -(-job.prompt // PAGE)
    return pages * PAGE * one


def generate_terms(job: Job, slots: int) -> tuple[Term, ...]:
    """Keys and values, and the larger of what a prefill and a decode step need."""
    cache = Term("keys and values", cache_bytes(job, slots))
    if job.engine == "vllm":
        return (cache,)
    rate = per_token(job.shape, job.layers, "none")
    prompts = -(-job.samples_per_step // job.samples_per_prompt) * job.prompt
    prefill = max(job.prompt, min(PREFILL_TOKENS, prompts)) * rate.forward
    logits = 2 * FP32 * job.shape.vocab * (slots if job.device == "cpu" else -(-slots // job.samples_per_prompt))
    return cache, Term("prompts and sampling", prefill + logits)


def forward_terms(job: Job, rate: PerToken, tokens: int) -> tuple[Term, ...]:
    """A pass that keeps nothing for a backward pass."""
    return Term(f"forward pass of {tokens} tokens", tokens * rate.forward), Term("logits", _logits(job, tokens))


def train_terms(job: Job, rate: PerToken, tokens: int, trained: int, *, head: bool = True) -> tuple[Term, ...]:
    """The backward pass of the last of several micro-batches, or of the only one, where sums grow as activations go.

    The worst moment is the head's, when all activations are there, or the last layer's.
    """
    sums = float(FP32 * trained)
    if -(-job.update_tokens // tokens) == 1:
        sums = max(0.0, sums - tokens * rate.kept)
    work = tokens * rate.working + _layer_gradient(job)
    if head:
        work = max(work, _head_work(job, tokens))
    return (
        Term("gradient sums", sums),
        Term(f"activations of {tokens} tokens", tokens * rate.kept),
        Term("head and layer at work", work),
    )


def optimizer_terms(job: Job) -> tuple[Term, ...]:
    """The sums, and what the step works with."""
    sums = Term("gradient sums", FP32 * job.trained)
    return (sums, Term("moments at work", job.step_work)) if job.step_work else (sums,)


def sync_terms(job: Job) -> tuple[Term, ...]:
    """Fingerprints; for an engine that is sent merged weights, one matrix of those in fp32."""
    proof = Term("fingerprints", PROOF_BYTES[job.device])
    if not (job.added and job.engine == "vllm"):
        return (proof,)
    largest = max((linear.parameters for linear in job.shape.linears), default=0)
    return proof, Term("merged matrix", (2 * FP32 + job.element) * largest)


def host_bytes(job: Job) -> float:
    """Main memory that a checkpoint of a GPU's tensors takes while it is written: its larger file at once."""
    weights = job.element * (job.trained if job.added else job.shape.parameters)
    return max(float(weights), job.masters + job.state_bytes * job.trained)


def _layer_gradient(job: Job) -> float:
    """Gradients in the model's precision: a layer's largest matrix, and a tied head that waits for the embedding's share."""
    if job.layers.rank:
        return 0.0
    matrix = job.shape.hidden * job.shape.intermediate * max(1, job.shape.experts)
    return float(job.element * (matrix + job.shape.head * job.shape.tied))


def _head_work(job: Job, tokens: int) -> float:
    """The head's backward pass: logits, the gradient of the states, and that of its matrix summed over tiles in fp32."""
    rows, element = job.trained_share * tokens, job.element
    states = 2 * element * rows * job.shape.hidden  # and their gradient
    if job.device == "cpu" and element < FP32:
        states += FP32 * rows * job.shape.hidden
    if job.layers.rank:
        return states + _logits(job, tokens)
    rounded = element if element < FP32 else 0
    return states + FP32 * job.shape.head + max(_logits(job, tokens), rounded * job.shape.head)


def _logits(job: Job, tokens: int) -> float:
    """One tile of the head's logits."""
    rows = job.trained_share * tokens
    if job.device == "cpu":
        return 3.0 * FP32 * min(rows * job.shape.vocab, CPU_TILE)
    return min(rows * job.shape.vocab * job.element, LOGITS_BYTES)
