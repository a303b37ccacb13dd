"""Peak memory of a run on one device, phase by phase, predicted before anything is loaded.

Every phase takes   M = static + tokens · slope + const + keys and values   and, once, what other than torch takes: the context,
libraries, captured graphs. `static` are the tensors that outlive a phase: weights, fp32 masters, moments, copies of the
weights. Lifetimes follow the learner: a bf16 gradient is added to its fp32 sum as soon as it is complete and freed; sums exist
from the first micro-batch to the optimizer step; moments from the first step on; keys and values during a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.activations import FP32, PAIRS, STREAM, PerToken, Recompute, copied_keys, per_token
from lockstep.plan.job import GIB as GIB
from lockstep.plan.job import Job
from lockstep.plan.shapes import PACKED_BYTES

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
VLLM_BYTES = 2.5 * GIB
"""Bytes that vLLM takes beside weights, keys and values: activations of a profile run, samplers, graphs."""
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


def phases(job: Job, sizes: Sizes) -> tuple[Phase, ...]:
    """Return all phases of a run, in order."""
    rate = per_token(job.shape, job.layers, sizes.recompute)
    tokens = stream_tokens(job, sizes.tokens)
    weights, state = static_terms(job, sizes.slots)
    static = (*weights, *state)
    sampling = weights[:1] if job.split else static
    found = [Phase("load", weights), Phase("generate", (*sampling, *generate_terms(job, sizes.slots)))]
    if job.cache_stays:
        static = (*static, Term("keys and values", job.vllm_cache))
    if job.extra_passes:
        found.append(Phase("log-probabilities", (*static, *forward_terms(job, rate, pass_tokens(job, sizes.tokens)))))
    found.append(Phase("train", (*static, *train_terms(job, rate, tokens, job.trained, sizes.recompute))))
    found.append(Phase("optimizer", (*static, *optimizer_terms(job))))
    if job.critic == "own":
        found.append(
            Phase(
                "critic", (*static, *train_terms(job, rate, tokens, critic_trained(job), sizes.recompute, head=False))
            )
        )
    found.append(Phase("sync and proof", (*static, *sync_terms(job))))
    found.append(Phase("save", static))
    return tuple(found)


def peak(found: tuple[Phase, ...]) -> Phase:
    return max(found, key=lambda phase: phase.bytes)


def stream_tokens(job: Job, budget: int) -> int:
    """Tokens of the largest micro-batch: the budget, unless the update has fewer, or one sequence more."""
    return max(min(budget, job.update_tokens), job.row or job.prompt + job.response)


def pass_tokens(job: Job, budget: int) -> int:
    """Tokens of the largest stream of a pass over all samples of a step, whatever the updates' size."""
    return max(min(budget, job.step_tokens), job.prompt + job.response)


# --- parts of a phase -----------------------------------------------------------------------------------------------
def static_terms(job: Job, slots: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return what loading makes, and what the first step adds for the rest of the run."""
    shape, element = job.shape, job.element
    weights = element * (shape.parameters - job.packed) + PACKED_BYTES * job.packed
    critic = critic_trained(job)
    here = 0 if job.offload else 1
    terms = [Term("weights", weights + element * job.added), Term("fp32 masters", here * job.masters)]
    terms += [Term(name, weights + element * job.added) for name in job.copies]
    state = [Term("moments", here * job.state_bytes * job.owned)]
    if job.trainers:  # learner.sharded keeps these from the start
        state += [
            Term("gradients sent", float(element * job.trained)),
            Term("gradients received", float(element * job.owned * job.trainers)),
            Term("owned gradient sums", float(FP32 * job.owned)),
        ]
    if job.critic == "own":
        terms.append(Term("critic", (element + here * job.master_bytes) * critic))
        state.append(Term("critic's moments", here * job.state_bytes * critic))
    engine = VLLM_BYTES if job.engine == "vllm" else element * slots * shape.vocab
    terms.append(Term("engine's buffers", engine))
    if job.device == "cuda":
        terms.append(Term("work space", WORKSPACE))
    if job.device == "cuda" and job.packed and shape.expert_bytes < 2:
        terms.append(Term("gate and up of a layer, dequantised", element * job.packed * 2 / 3 / shape.layers))
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
    count = min(slots, job.samples_per_engine)
    if job.device == "cpu" or job.shape.state or job.shape.cached:  # slots, not pages
        return count * ((job.prompt + job.response) * one + job.shape.state)
    prompts = -(-count // job.samples_per_prompt)
    pages = count * (-(-job.response // PAGE) + 1) + prompts * -(-job.prompt // PAGE)
    return pages * PAGE * one


def generate_terms(job: Job, slots: int) -> tuple[Term, ...]:
    """Keys and values, and the worst moment beside them.

    A GPU's engine lets in as many samples as it has rows. It keeps the logits behind their prompts while it processes the next
    ones, and then gives each sample a copy of them to draw its first token from.
    """
    cache = Term("keys and values", cache_bytes(job, slots))
    if job.engine == "vllm":
        return (cache,)
    count = min(slots, job.samples_per_engine)
    prompts = -(-(job.samples_per_engine if job.device == "cpu" else count) // job.samples_per_prompt)
    stream = max(job.prompt, min(PREFILL_TOKENS, prompts * job.prompt))
    prefill = stream * per_token(job.shape, job.layers, "none").forward
    if job.device == "cpu":
        prefill += _score_work(job, job.prompt**2)
        return cache, Term("prompts and sampling", prefill + 2 * FP32 * job.shape.vocab * slots)
    logits = float(job.element * job.shape.vocab)
    return cache, Term("prompts and sampling", prompts * logits + max(prefill, count * logits))


def forward_terms(job: Job, rate: PerToken, tokens: int) -> tuple[Term, ...]:
    """Count a pass that keeps nothing for a backward pass, at the worse of two moments that do not meet.

    In a layer; or in the head, beside one tile of logits, when of the layers only the states of the tokens with loss are left.
    """
    rows = tokens * job.samples_per_step * job.response / job.step_tokens
    attention = _score_work(job, job.pairs(tokens)[1])
    attention += job.own_keys(tokens) * copied_keys(job.shape, job.layers, backward=False)
    layer = (Term(f"forward pass of {tokens} tokens", tokens * rate.forward + attention),)
    states = Term("states with loss", rows * (job.element * job.shape.hidden + HEAD_NUMBERS) + tokens * STREAM)
    head = (Term("logits", _logits(job, rows, CPU_FORWARD)), states)
    return max(layer, head, key=lambda terms: sum(term.bytes for term in terms))


def train_terms(
    job: Job, rate: PerToken, tokens: int, trained: int, recompute: Recompute, *, head: bool = True
) -> tuple[Term, ...]:
    """Count the backward pass of the last of several micro-batches, or of the only one, where sums grow as activations go.

    The worst moment is the head's, when all activations are there, or the last layer's.
    """
    pairs, at_once = job.pairs(tokens)
    layer = job.scores.kept * pairs * bool(job.scores.layers)
    matrices = 0.0 if recompute == "full" else job.scores.layers * layer
    kept = tokens * rate.kept + matrices
    sums = 0.0 if job.trainers else float(FP32 * trained)
    if -(-job.update_tokens // tokens) == 1:
        sums = max(0.0, sums - kept)
    work = tokens * rate.working + _layer_gradient(job) + _score_work(job, at_once) + layer * (recompute == "full")
    work += job.own_keys(tokens) * copied_keys(job.shape, job.layers, backward=True)
    if head:
        work = max(work, _head_work(job, tokens))
    terms = [Term("gradient sums", sums), Term(f"activations of {tokens} tokens", tokens * rate.kept)]
    terms += [Term(f"attention scores of {tokens} tokens", matrices)] if matrices else []
    return (*terms, Term("head and layer at work", work))


def optimizer_terms(job: Job) -> tuple[Term, ...]:
    """Count the sums, and what the step works with."""
    sums = Term("gradient sums", 0.0 if job.trainers else FP32 * job.trained)
    work = (Term("buffers of offload", job.offload_room), Term("moments at work", job.step_work))
    return (sums, *(term for term in work if term.bytes))


def sync_terms(job: Job) -> tuple[Term, ...]:
    """Fingerprints; for an engine that is sent merged weights, one matrix of those in fp32."""
    proof = Term("fingerprints", PROOF_BYTES[job.device])
    if not (job.added and job.engine == "vllm"):
        return (proof,)
    largest = max((linear.parameters for linear in job.shape.linears), default=0)
    return proof, Term("merged matrix", (2 * FP32 + job.element) * largest)


def offloaded_host_bytes(job: Job) -> float:
    """Main memory that holds the masters and moments of all workers; a critic's own too."""
    return job.offload * (job.master_bytes + job.state_bytes) * (job.trained + critic_trained(job))


def host_bytes(job: Job) -> float:
    """Main memory of masters and moments that lie there, and what a checkpoint of a GPU's tensors takes while it is written: its
    larger file at once.
    """
    weights = float(job.element * (job.trained if job.added else job.shape.parameters))
    state = (job.master_bytes + job.state_bytes) * job.trained
    return offloaded_host_bytes(job) + max(weights, 0.0 if job.offload else state)


def _layer_gradient(job: Job) -> float:
    """Gradients in the model's precision: a layer's largest matrix, and a tied head that waits for the embedding's share."""
    if job.layers.rank:
        return 0.0
    matrix = job.shape.hidden * job.shape.intermediate * max(1, job.shape.experts)
    return float(job.element * (matrix + job.shape.head * job.shape.tied))


def _score_work(job: Job, pairs: float) -> float:
    """Scores of the layer that runs, if they are tensors."""
    if job.scores.blocks:
        return job.scores.working * min(pairs, PAIRS)
    return job.scores.working * pairs * bool(job.scores.layers)


def _head_work(job: Job, tokens: int) -> float:
    """Count the head's backward pass: logits, the gradient of the states, and that of its matrix summed over tiles in fp32."""
    rows, element = job.trained_share * tokens, job.element
    states = 2 * element * rows * job.shape.hidden  # and their gradient
    if job.device == "cpu" and element < FP32:
        states += FP32 * rows * job.shape.hidden
    if job.layers.rank:
        return states + _logits(job, rows, CPU_BACKWARD)
    rounded = element if element < FP32 else 0
    return states + FP32 * job.shape.head + max(_logits(job, rows, CPU_BACKWARD), rounded * job.shape.head)


def _logits(job: Job, rows: float, copies: int) -> float:
    """Count one tile of the head's logits, at most of `rows`; a CPU's operations have `copies` of it in fp32."""
    if job.device == "cpu":
        return copies * float(FP32) * min(rows * job.shape.vocab, CPU_TILE)
    return min(rows * job.shape.vocab * job.element, LOGITS_BYTES)
