"""Settings of what a step does: it samples rollouts, updates the weights, and syncs them to the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.section import Section
from lockstep.config.vllm import Vllm


class Rollout(Section):
    """Sampling of rollouts."""

    engine: Literal["native", "vllm"] = "native"
    """native samples from the learner's own weights in one process; vllm needs a GPU and pip install 'lockstep-rl[vllm]'."""
    slots: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = "auto"
    """Sequences decoded together; others wait for a free slot. auto is 64, and on a GPU all samples of a step (64 to 1024);
    for the native engine fewer where the memory plan finds no room for their keys and values."""
    max_tokens: int = Field(default=64, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(default=1.0, ge=1e-3)
    """Sampling temperature in training; log-probabilities are of the tempered distribution."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this much probability."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the most likely one."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a response."""
    ignore_eos: bool = False
    """Force every response to max_tokens (benchmarks only)."""
    deal: Literal["static", "queue"] = "static"
    """Prompts of several workers (placement): static gives all to them in turn; queue gives a worker the next prompt when it has
    room, for replies of different lengths when a step has more samples than slots. Time both: in the case of
    docs/several_gpus.md queue was slower."""
    vllm: Vllm = Vllm()


class Update(Section):
    """From a batch to optimizer steps."""

    samples_per_update: int | None = Field(default=None, ge=1)
    """Samples of one optimizer step; none takes all samples of the step, so that the ratio is 1 by construction."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass, prompts and padding-free responses together; none is 8192 on a CPU and on a GPU what the
    memory plan finds room for. Changes memory, not the result."""
    share_prompts: bool = True
    """Run the prompt of a group once for all its samples. Exact; off for comparison."""
    drop_zero_advantage: bool = True
    """Leave out samples whose gradient is known to be zero. They still count in every denominator."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations computed again in the backward pass: selective is norms and activation products alone (a third less memory for
    a few percent more time), full is whole layers (least memory, a third more time). auto is none on a CPU and on a GPU what the
    memory plan chooses. Changes memory, not the result."""
    replay_routing: bool = False
    """Train each token of a mixture of experts with the experts that sampling chose for it (routing replay, R3); probabilities
    stay those of the present weights. The engine records them: a byte for each expert of a token and layer."""
    max_skipped: int = Field(default=3, ge=1)
    """Stop after this many steps in a row were skipped for a non-finite gradient."""


class Sync(Section):
    """Transfer of weights to the engine, and its proof."""

    transport: Literal["shared", "copy"] = "shared"
    """shared: the engine reads the learner's own tensors; copy: it owns a second set, sent after every update. Applies to
    the native engine; for vLLM see rollout.vllm.transport."""
    probe_first: int = Field(default=10, ge=0)
    """Number of syncs at the start that all probe log-probabilities."""
    probe_every: int = Field(default=10, ge=1)
    """Syncs between probes after that."""
    probe_sequences: int = Field(default=4, ge=1)
    """Number of fixed sequences in the probe."""
    probe_tokens: int = Field(default=32, ge=2)
    """Tokens of each sequence."""
