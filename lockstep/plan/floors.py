"""Computes a lower bound on the time of one step from the model's shape, the run's real lengths and two rates of the machine.

The bound assumes that every matrix multiplication runs at the rate of the largest ones, that every byte moves at the rate of a
plain copy, and that nothing else takes time. Generation alternates between matrix multiplications and reading keys and values,
which cannot overlap within a layer.
Legend: B samples, P prompt tokens, R response tokens, h hidden, L layers, d_a query heads × head size, N parameters of the
matrices that a token passes (body of the layers, and head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.plan.shapes import ModelShape

ADAMW_BYTES = 30
"""Read and written per parameter by AdamW: fp32 master, both moments and gradient, bf16 weight."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates that were measured on one accelerator."""

    name: str
    flops: float
    """FLOP/s of large bf16 matrix products."""
    bandwidth: float
    """Bytes/s of memory, read and written together."""
    link: float = 55e9
    """Bytes/s from main memory to the device, and at the same time back: PCIe 5 x16, as measured beside an H200."""


H200 = Machine("H200", 790e12, 4.3e12)
"""Measured: GEMM 798 TFLOP/s, copy 4.29 TB/s; the round figures are those of the project's tables."""


@dataclass(frozen=True, slots=True)
class Work:
    """The real lengths of one step: a prompt's tokens, and the response tokens of each of its samples."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]

    @staticmethod
    def equal(prompts: int, samples: int, prompt: int, response: int) -> Work:
        """Prompts × samples of one length."""
        return Work(((prompt, (response,) * samples),) * prompts)

    @property
    def samples(self) -> list[tuple[int, int]]:
        """(prompt, response) of every sample."""
        return [(prompt, response) for prompt, responses in self.groups for response in responses]

    @property
    def response_tokens(self) -> int:
        return sum(response for _, response in self.samples)


@dataclass(frozen=True, slots=True)
class Update:
    """The training part of a step."""

    trained_parameters: int
    """All of them, or the adapters'."""
    adapter: bool = False
    share_prompts: bool = True
    """A group's prompt is processed once."""
    recompute: bool = False
    """The forward pass runs again in the backward pass."""
    kept: float = 1.0
    """Share of the samples that are trained: 1 minus those with a zero advantage."""
    old: bool = False
    """A pass for the old log-probabilities."""
    reference: bool = False
    """A pass of the reference model."""
    offloaded: float = 0.0
    """Bytes of each trained parameter that an optimizer step gets from main memory and puts back."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of each phase."""

    prefill: float
    linear: float
    """Matrix products of generation."""
    attention: float
    """Keys and values read in generation."""
    old: float
    reference: float
    train: float
    optimizer: float
    sync: float

    @property
    def generate(self) -> float:
        return self.prefill + self.linear + self.attention

    @property
    def update(self) -> float:
        return self.old + self.reference + self.train + self.optimizer

    @property
    def total(self) -> float:
        return self.generate + self.update + self.sync


def step_floor(shape: ModelShape, work: Work, update: Update, machine: Machine) -> Floor:
    """Lower bound on the seconds of one step."""
    prefill, linear, attention = generation(shape, work, machine)
    forward = pass_seconds(shape, work, machine, share_prompts=update.share_prompts)
    return Floor(
        prefill,
        linear,
        attention,
        old=forward if update.old else 0.0,
        reference=forward if update.reference else 0.0,
        train=train_seconds(shape, work, update, machine),
        optimizer=optimizer_seconds(update, machine),
        sync=2 * 2 * update.trained_parameters / machine.bandwidth,
    )


def generation(shape: ModelShape, work: Work, machine: Machine) -> tuple[float, float, float]:
    """Seconds of prefill (each prompt once), of the decode steps' matrix products, and of their reading keys and values."""
    prompts = [prompt for prompt, _ in work.groups]
    samples = work.samples
    prefill = 2.0 * shape.body * sum(prompts) + 2 * shape.head * len(samples)
    prefill += sum(4 * shape.query_size * attended(shape, prompt) for prompt in prompts)
    linear = attention = 0.0
    for running, keys in _decode_steps(shape, samples):
        weights = shape.body_bytes(running) + 2 * shape.head
        linear += max(
            2 * (shape.body + shape.head) * running / machine.flops,
            weights / machine.bandwidth,
        )
        key_bytes = shape.kv_bytes() / shape.layers
        attention += keys * max(key_bytes / machine.bandwidth, 4 * shape.query_size / machine.flops)
    return prefill / machine.flops, linear, attention


def pass_seconds(shape: ModelShape, work: Work, machine: Machine, *, share_prompts: bool) -> float:
    """Seconds of one forward pass over all samples, log-probabilities of the response tokens included."""
    linear, attention = _pass_flops(shape, work, share_prompts=share_prompts)
    return (linear + attention) / machine.flops


def train_seconds(shape: ModelShape, work: Work, update: Update, machine: Machine) -> float:
    """Seconds of forward and backward: with adapters the frozen matrices need no gradient of their own."""
    linear, attention = _pass_flops(shape, work, share_prompts=update.share_prompts)
    passes = 2 if update.adapter else 3
    flops = passes * linear + 3.5 * attention + (linear + attention) * update.recompute
    return update.kept * flops / machine.flops


def optimizer_seconds(update: Update, machine: Machine) -> float:
    """Seconds of an optimizer step: its memory, or the link to main memory, which works at the same time in both directions."""
    return update.trained_parameters * max(ADAMW_BYTES / machine.bandwidth, update.offloaded / machine.link)


def attended(shape: ModelShape, tokens: int, before: int = 0) -> float:
    """Pairs of query and key, summed over layers, of `tokens` causal queries after `before` earlier ones (n²/2, no windows)."""
    end = before + tokens
    full = (end**2 - before**2) / 2
    return (shape.layers - shape.windowed) * full + shape.windowed * (
        _in_window(shape, end) - _in_window(shape, before)
    )


def _in_window(shape: ModelShape, tokens: int) -> float:
    """Pairs of a causal triangle that a sliding window leaves."""
    window = tokens if shape.window is None else min(tokens, shape.window)
    return tokens * window - window**2 / 2


def _pass_flops(shape: ModelShape, work: Work, *, share_prompts: bool) -> tuple[float, float]:
    """FLOP of the matrix products and of attention in one forward pass."""
    prompts = [prompt for prompt, _ in work.groups] if share_prompts else [prompt for prompt, _ in work.samples]
    tokens = sum(prompts) + work.response_tokens
    linear = 2.0 * (shape.body * tokens + shape.head * work.response_tokens)
    pairs = sum(attended(shape, prompt) for prompt in prompts)
    pairs += sum(attended(shape, response, prompt) for prompt, response in work.samples)
    return linear, 4 * shape.query_size * pairs


def _decode_steps(shape: ModelShape, samples: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
    """Return for every decode step the samples still running, and the keys that they read, summed over samples and layers."""
    full, windowed = shape.layers - shape.windowed, shape.windowed
    prompt_B, response_B = np.array(samples, np.int64).reshape(-1, 2).T
    order = np.argsort(-response_B, kind="stable")
    prompt_B, response_B = prompt_B[order], response_B[order]
    times = np.arange(response_B.max(initial=0))
    running = np.searchsorted(-response_B, -times, side="left")  # those with more tokens than t are the first ones
    keys = full * (np.concatenate([[0], np.cumsum(prompt_B)])[running] + times * running)
    if windowed and shape.window is not None:
        seen = [np.minimum(prompt_B[:count] + t, shape.window).sum() for t, count in enumerate(running)]
        keys += windowed * np.array(seen, np.int64)
    return [(int(count), float(read)) for count, read in zip(running, keys, strict=True)]


def table(floor: Floor) -> list[str]:
    """Lines of a table: the phases that take any time, and the floor of each."""
    rows = [
        ("generate", floor.generate),
        ("old log-probabilities", floor.old),
        ("reference", floor.reference),
        ("train", floor.train),
        ("optimizer", floor.optimizer),
        ("sync", floor.sync),
        ("step", floor.total),
    ]
    return [f"{'phase':<24}{'floor s':>10}", *(f"{name:<24}{seconds:>10.3f}" for name, seconds in rows if seconds)]
