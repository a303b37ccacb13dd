"""Predicts the peak memory of each phase of a run on one device, before anything is loaded.

Every phase takes   M = static + tokens · slope + const + keys and values.   What is outside torch's memory is added once: the
CUDA context, libraries, captured CUDA graphs. `static` is the tensors that outlive a phase: weights, fp32 masters, moments,
copies of the weights. Lifetimes follow the learner: a bf16 gradient is added to its fp32 sum as soon as it is complete and
freed; sums exist from the first micro-batch to the optimizer step; moments from the first step on; keys and values during a
rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.activations import FP32, PAIRS, STREAM, PerToken, Recompute, copied_keys, per_token
from lockstep.plan.memory_inputs import GIB, MemoryInputs, critic_parameters
from lockstep.plan.shapes import NF4_BYTES

LOGITS_BYTES = 2**31
"""A GPU's head makes logits in tiles of this many bytes (models.head_kernels.TILE_BYTES)."""
CPU_TILE = 512 * 2048
"""A CPU's head makes this many logits at once, in fp32."""
CPU_FORWARD, CPU_BACKWARD = 2, 3
"""Copies of those: as they come and tempered; backward also their gradient."""
HEAD_NUMBERS = 3 * FP32
"""Bytes of a token with loss: log-sum-exp, log-probability, entropy."""
PAGE = 64
"""Tokens of a page of keys and values (rollout.paged.state.PAGE)."""
PREFILL_TOKENS = 16384
"""Prompt tokens that the native engine processes at once (rollout.paged.prefill.PREFILL_TOKENS)."""
PROOF_BYTES = {"cuda": 16 * 2**20, "cpu": 2 * 2**20}
"""Work space of the fingerprints."""
WORKSPACE = 96 * 2**20
"""Work space of the matrix libraries, which torch's allocator holds."""
VLLM_BYTES, VLLM_FIXED, VLLM_NUMBER = 2.5 * GIB, 1.2 * GIB, 18
"""Least bytes that vLLM takes beside weights, keys and values: activations of a profile run, samplers, graphs; those that do not
grow with its rows; and those of each logit. Read on an H200: 0.45 GiB of tensors with 64 rows of 152k logits, 1.59 with 512.
"""
OUTSIDE = {"cuda": 1.25 * GIB, "cpu": 0.5 * GIB}
"""Context, libraries and kernels of the process, outside torch's allocator."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a phase's memory. Example: Term("fp32 masters", 6.2e9)"""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory that is in use at the worst moment of a phase."""

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
    """Sizes that the plan decides."""

    tokens: int
    """Tokens of one micro-batch, at most."""
    recompute: Recompute
    slots: int


def phases(inputs: MemoryInputs, sizes: Sizes) -> tuple[Phase, ...]:
    """Return all phases of a run, in order."""
    rate = per_token(inputs.shape, inputs.layers, sizes.recompute)
    tokens = stream_tokens(inputs, sizes.tokens)
    weights, state = static_terms(inputs, sizes.slots)
    static = (*weights, *state)
    sampling = sampler_terms(inputs, weights[0], sizes.slots) if inputs.split else static
    found = [Phase("load", weights), Phase("generate", (*sampling, *generate_terms(inputs, sizes.slots)))]
    if inputs.cache_stays:
        static = (*static, Term("keys and values", inputs.vllm_cache))
    if inputs.extra_passes:
        found.append(
            Phase("log-probabilities", (*static, *forward_terms(inputs, rate, pass_tokens(inputs, sizes.tokens))))
        )
    found.append(Phase("train", (*static, *train_terms(inputs, rate, tokens, inputs.trained, sizes.recompute))))
    found.append(Phase("optimizer", (*static, *optimizer_terms(inputs))))
    if inputs.critic == "own":
        found.append(
            Phase(
                "critic",
                (*static, *train_terms(inputs, rate, tokens, critic_trained(inputs), sizes.recompute, head=False)),
            )
        )
    found.append(Phase("sync and proof", (*static, *sync_terms(inputs))))
    found.append(Phase("save", static))
    return tuple(found)


def peak(found: tuple[Phase, ...]) -> Phase:
    return max(found, key=lambda phase: phase.bytes)


def stream_tokens(inputs: MemoryInputs, budget: int) -> int:
    """Tokens of the largest micro-batch: the budget, unless the update has fewer, or one sequence more."""
    return max(min(budget, inputs.update_tokens), inputs.row or inputs.prompt + inputs.response)


def pass_tokens(inputs: MemoryInputs, budget: int) -> int:
    """Tokens of the largest stream of a pass over all samples of a step, whatever the updates' size."""
    return max(min(budget, inputs.step_tokens), inputs.prompt + inputs.response)


# --- parts of a phase -----------------------------------------------------------------------------------------------
def static_terms(inputs: MemoryInputs, slots: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return what loading makes, and what the first step adds for the rest of the run."""
    shape, element = inputs.shape, inputs.element
    packed = shape.expert_bytes if shape.expert_bytes < 2 else NF4_BYTES
    weights = element * (shape.parameters - inputs.packed) + packed * inputs.packed
    critic = critic_trained(inputs)
    here = 0 if inputs.offload else 1
    terms = [Term("weights", weights + element * inputs.added), Term("fp32 masters", here * inputs.masters)]
    terms += [Term(name, weights + element * inputs.added) for name in inputs.copies]
    terms += [Term("merged weights", float(element * inputs.merged))] if inputs.merged else []
    state = [Term("moments", here * inputs.state_bytes * inputs.owned)]
    if inputs.trainers:  # learner.sharded keeps these from the start
        state += [
            Term("gradients sent", float(element * inputs.trained)),
            Term("gradients received", float(element * inputs.owned * inputs.trainers)),
            Term("owned gradient sums", float(FP32 * inputs.owned)),
        ]
    if inputs.critic == "own":
        terms.append(Term("critic", (element + here * inputs.master_bytes) * critic))
        state.append(Term("critic's moments", here * inputs.state_bytes * critic))
    vllm = inputs.engine == "vllm" and not inputs.split
    engine = vllm_bytes(inputs, slots) if vllm else element * slots * shape.vocab
    terms.append(Term("engine's buffers", engine))
    if inputs.device == "cuda":
        terms.append(Term("work space", WORKSPACE))
    if inputs.device == "cuda" and inputs.packed and shape.expert_bytes < 2:
        terms.append(Term("gate and up of a layer, dequantised", element * inputs.packed * 2 / 3 / shape.layers))
    present = tuple(term for term in terms if term.bytes)
    return present, tuple(term for term in state if term.bytes)


def vllm_bytes(inputs: MemoryInputs, slots: int) -> float:
    """Bytes of vLLM beside weights, keys and values."""
    return max(VLLM_BYTES, VLLM_FIXED + VLLM_NUMBER * slots * inputs.shape.vocab)


def sampler_terms(inputs: MemoryInputs, weights: Term, slots: int) -> tuple[Term, ...]:
    """Return what a worker that only samples keeps beside keys and values."""
    terms = [weights]
    if inputs.samplers_copy:
        terms.append(Term("engine's weights", weights.bytes))
    if inputs.engine == "vllm":
        terms.append(Term("engine's buffers", vllm_bytes(inputs, slots)))
    return tuple(terms)


def critic_trained(inputs: MemoryInputs) -> int:
    """Parameters that a critic of its own trains; 0 without one."""
    return critic_parameters(inputs.shape, inputs.added) if inputs.critic == "own" else 0


def cache_bytes(inputs: MemoryInputs, slots: int) -> float:
    """Keys and values of `slots` samples side by side, each as long as it may be, prompts once for each group."""
    if inputs.engine == "vllm":
        return inputs.vllm_cache
    one = inputs.shape.kv_bytes(inputs.element)
    count = min(slots, inputs.samples_per_engine)
    if inputs.device == "cpu" or inputs.shape.state or inputs.shape.cached:  # slots, not pages
        return count * ((inputs.prompt + inputs.response) * one + inputs.shape.state)
    prompts = -(-count // inputs.samples_per_prompt)
    pages = count * (-(-inputs.response // PAGE) + 1) + prompts * -(-inputs.prompt // PAGE)
    return pages * PAGE * one


def generate_terms(inputs: MemoryInputs, slots: int) -> tuple[Term, ...]:
    """Keys and values, and the worst moment beside them.

    A GPU's engine lets in as many samples as it has rows. It keeps the logits behind their prompts while it processes the next
    ones, and then gives each sample a copy of them to draw its first token from.
    """
    cache = Term("keys and values", cache_bytes(inputs, slots))
    if inputs.engine == "vllm":
        return (cache,)
    count = min(slots, inputs.samples_per_engine)
    prompts = -(-(inputs.samples_per_engine if inputs.device == "cpu" else count) // inputs.samples_per_prompt)
    stream = max(inputs.prompt, min(PREFILL_TOKENS, prompts * inputs.prompt))
    prefill = stream * per_token(inputs.shape, inputs.layers, "none").forward
    if inputs.device == "cpu":
        prefill += _score_work(inputs, inputs.prompt**2)
        return cache, Term("prompts and sampling", prefill + 2 * FP32 * inputs.shape.vocab * slots)
    logits = float(inputs.element * inputs.shape.vocab)
    return cache, Term("prompts and sampling", prompts * logits + max(prefill, count * logits))


def forward_terms(inputs: MemoryInputs, rate: PerToken, tokens: int) -> tuple[Term, ...]:
    """Count a pass that keeps nothing for a backward pass, at the worse of two moments that do not meet.

    In a layer; or in the head, beside one tile of logits, when of the layers only the states of the tokens with loss are left.
    """
    rows = tokens * inputs.samples_per_step * inputs.response / inputs.step_tokens
    attention = _score_work(inputs, inputs.pairs(tokens)[1])
    attention += inputs.own_keys(tokens) * copied_keys(inputs.shape, inputs.layers, backward=False)
    layer = (Term(f"forward pass of {tokens} tokens", tokens * rate.forward + attention),)
    states = Term("states with loss", rows * (inputs.element * inputs.shape.hidden + HEAD_NUMBERS) + tokens * STREAM)
    head = (Term("logits", _logits(inputs, rows, CPU_FORWARD)), states)
    return max(layer, head, key=lambda terms: sum(term.bytes for term in terms))


def train_terms(
    inputs: MemoryInputs, rate: PerToken, tokens: int, trained: int, recompute: Recompute, *, head: bool = True
) -> tuple[Term, ...]:
    """Count the backward pass of the last of several micro-batches, or of the only one, where sums grow as activations go.

    The worst moment is the head's, when all activations are there, or the last layer's.
    """
    pairs, at_once = inputs.pairs(tokens)
    layer = inputs.scores.kept * pairs * bool(inputs.scores.layers)
    matrices = 0.0 if recompute == "full" else inputs.scores.layers * layer
    kept = tokens * rate.kept + matrices
    sums = 0.0 if inputs.trainers else float(FP32 * trained)
    if -(-inputs.update_tokens // tokens) == 1:
        sums = max(0.0, sums - kept)
    work = (
        tokens * rate.working + _layer_gradient(inputs) + _score_work(inputs, at_once) + layer * (recompute == "full")
    )
    work += inputs.own_keys(tokens) * copied_keys(inputs.shape, inputs.layers, backward=True)
    if head:
        work = max(work, _head_work(inputs, tokens))
    terms = [Term("gradient sums", sums), Term(f"activations of {tokens} tokens", tokens * rate.kept)]
    terms += [Term(f"attention scores of {tokens} tokens", matrices)] if matrices else []
    return (*terms, Term("head and layer at work", work))


def optimizer_terms(inputs: MemoryInputs) -> tuple[Term, ...]:
    """Count the sums, and what the step works with."""
    sums = Term("gradient sums", 0.0 if inputs.trainers else FP32 * inputs.trained)
    work = (Term("buffers of offload", inputs.offload_room), Term("moments at work", inputs.step_work))
    return (sums, *(term for term in work if term.bytes))


def sync_terms(inputs: MemoryInputs) -> tuple[Term, ...]:
    """Fingerprints; where adapters are merged into weights, one matrix of those in fp32, and one stack of experts."""
    proof = Term("fingerprints", PROOF_BYTES[inputs.device])
    if not (inputs.added and inputs.engine == "vllm") and not inputs.merged:
        return (proof,)
    largest = max((linear.parameters for linear in inputs.shape.linears), default=0)
    experts = (
        inputs.shape.experts * 2 * inputs.shape.hidden * inputs.shape.intermediate * (inputs.layers.expert_rank > 0)
    )
    return proof, Term("merged matrix", (2 * FP32 + inputs.element) * largest + inputs.element * experts)


def offloaded_host_bytes(inputs: MemoryInputs) -> float:
    """Main memory that holds the masters and moments of all workers; a critic's own too."""
    return inputs.offload * (inputs.master_bytes + inputs.state_bytes) * (inputs.trained + critic_trained(inputs))


def host_bytes(inputs: MemoryInputs) -> float:
    """Main memory of masters and moments that lie there, and what a checkpoint of a GPU's tensors takes while it is written: its
    larger file at once.
    """
    weights = float(inputs.element * (inputs.trained if inputs.added else inputs.shape.parameters))
    state = (inputs.master_bytes + inputs.state_bytes) * inputs.trained
    return offloaded_host_bytes(inputs) + max(weights, 0.0 if inputs.offload else state)


def _layer_gradient(inputs: MemoryInputs) -> float:
    """Gradients in the model's precision: a layer's largest matrix, and a tied head that waits for the embedding's share."""
    if inputs.layers.rank:
        return 0.0
    matrix = inputs.shape.hidden * inputs.shape.intermediate * max(1, inputs.shape.experts)
    return float(inputs.element * (matrix + inputs.shape.head * inputs.shape.tied))


def _score_work(inputs: MemoryInputs, pairs: float) -> float:
    """Scores of the layer that runs, if they are tensors."""
    if inputs.scores.blocks:
        return inputs.scores.working * min(pairs, PAIRS)
    return inputs.scores.working * pairs * bool(inputs.scores.layers)


def _head_work(inputs: MemoryInputs, tokens: int) -> float:
    """Count the head's backward pass: logits, the gradient of the states, and that of its matrix summed over tiles in fp32."""
    rows, element = inputs.trained_share * tokens, inputs.element
    states = 2 * element * rows * inputs.shape.hidden  # and their gradient
    if inputs.device == "cpu" and element < FP32:
        states += FP32 * rows * inputs.shape.hidden
    if inputs.layers.rank:
        return states + _logits(inputs, rows, CPU_BACKWARD)
    rounded = element if element < FP32 else 0
    return states + FP32 * inputs.shape.head + max(_logits(inputs, rows, CPU_BACKWARD), rounded * inputs.shape.head)


def _logits(inputs: MemoryInputs, rows: float, copies: int) -> float:
    """Count one tile of the head's logits, at most of `rows`; a CPU's operations have `copies` of it in fp32."""
    if inputs.device == "cpu":
        return copies * float(FP32) * min(rows * inputs.shape.vocab, CPU_TILE)
    return min(rows * inputs.shape.vocab * inputs.element, LOGITS_BYTES)
