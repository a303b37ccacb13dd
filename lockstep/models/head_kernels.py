"""Computes the head on a GPU in tiles of some rows × the whole vocabulary, so that not all logits are in memory at once.

A matrix multiplication makes a tile of logits in the model's precision, and one Triton kernel reduces each row to its
log-sum-exp, target logit and entropy. In the backward pass another kernel replaces the logits by their gradient, and two more
matrix multiplications give the gradients of the hidden states and of the weight. Sums over tiles are fp32.

Legend: R rows, V vocabulary, H hidden.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models import exact
from lockstep.models.mm import add_product_
from lockstep.models.overlap import await_input, overlap

TILE_BYTES = 2**31
"""Logits that exist at once. The last tile of a forward pass is kept for the backward pass, which needs the room anyway."""
ROWS = 128
"""Tiles have a multiple of this many rows."""
BLOCK = 8192
"""Vocabulary entries that a program holds at once."""
CHUNK = 4096
"""Vocabulary entries of one program of `summaries`."""


def tile_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """Return the number of rows of a tile of logits."""
    return max(ROWS, TILE_BYTES // (vocabulary * dtype.itemsize) // ROWS * ROWS)


class FusedTokenLogprobs(torch.autograd.Function):
    """Fused heads.token_logprobs for one head whose logits are cap(scale · (hidden @ weight.T + bias)) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_RH.shape[0]
        lse_R, logprobs_R, entropy_R = (hidden_RH.new_empty(count, dtype=torch.float32) for _ in range(3))
        ctx.shape = softcap or 0.0, scale, temperature
        ctx.kept = None
        logits_RV = None
        for rows in _tiles(count, tile_rows(weight_VH.shape[0], hidden_RH.dtype)):
            logits_RV = None  # before the next is made
            logits_RV = _logits(hidden_RH[rows], weight_VH, bias_V)
            _summarise(logits_RV, targets_R[rows], lse_R[rows], logprobs_R[rows], entropy_R[rows], *ctx.shape)
            if exact.enabled():
                temperature_R = lse_R.new_full(logits_RV.shape[:1], temperature)
                peak_RC, mass_RC, _ = summaries(logits_RV, temperature_R)
                pick_logprobs(logits_RV, targets_R[rows], temperature_R, peak_RC, mass_RC, logprobs_R[rows])
        if any(ctx.needs_input_grad[:3]):
            ctx.kept = logits_RV
            ctx.save_for_backward(hidden_RH, weight_VH, bias_V, targets_R, lse_R, entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_R, grad_entropy_R = (grad.contiguous() for grad in grads)
        hidden_RH, weight_VH, bias_V, targets_R, lse_R, entropy_R = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        hidden = torch.empty_like(hidden_RH) if need_hidden else None
        weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        logits_RV, ctx.kept = ctx.kept, None  # it is overwritten: a second backward pass would have to make it again
        for rows in reversed(_tiles(hidden_RH.shape[0], tile_rows(weight_VH.shape[0], hidden_RH.dtype))):
            if logits_RV is None:
                logits_RV = _logits(hidden_RH[rows], weight_VH, bias_V)
            saved = targets_R[rows], lse_R[rows], entropy_R[rows]
            _differentiate(logits_RV, *saved, grad_logprobs_R[rows], grad_entropy_R[rows], *ctx.shape)
            if hidden is not None:
                torch.mm(logits_RV, weight_VH, out=hidden[rows])
            if weight is not None:
                add_product_(weight, logits_RV.T, hidden_RH[rows])
            if bias is not None:
                bias += logits_RV.sum(0, dtype=torch.float32)
            logits_RV = None
        wide = (weight, weight_VH), (bias, bias_V)
        return hidden, *(None if grad is None else grad.to(like.dtype) for grad, like in wide), None, None, None, None


def _logits(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    if not exact.enabled():
        return torch.nn.functional.linear(hidden_RH, weight_VH, bias_V)
    logits_RV = hidden_RH.new_empty(hidden_RH.shape[0], weight_VH.shape[0])
    exact.product_into(logits_RV, hidden_RH, weight_VH)
    return logits_RV


def _tiles(rows: int, size: int) -> list[slice]:
    """Return the tiles of rows, the small one first: the last one is kept."""
    ends = range(rows, 0, -size)
    return [slice(max(0, end - size), end) for end in reversed(ends)]


def summaries(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each part of CHUNK entries of each row: the largest tempered logit, the sum of exponentials, and at
    temperature 0, the best entry (else that is undefined).
    """
    rows, vocabulary = logits_RV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    peak_RC, mass_RC = (logits_RV.new_empty(rows, chunks, dtype=torch.float32) for _ in range(2))
    best_RC = logits_RV.new_empty(rows, chunks, dtype=torch.int32)
    _chunk_kernel[(rows, chunks)](
        logits_RV,
        temperature_R,
        peak_RC,
        mass_RC,
        best_RC,
        vocabulary,
        chunks,
        CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
        **overlap(),
    )
    return peak_RC, mass_RC, best_RC


def pick_logprobs(
    logits_RV: Tensor, ids_R: Tensor, temperature_R: Tensor, peak_RC: Tensor, mass_RC: Tensor, logprobs_R: Tensor
) -> None:
    """Write the log-probability of each row's id, given its `summaries`. Sampler, scorer and learner all use this kernel."""
    rows, vocabulary = logits_RV.shape
    chunks = peak_RC.shape[1]
    _pick_kernel[(rows,)](
        logits_RV,
        ids_R,
        temperature_R,
        peak_RC,
        mass_RC,
        logprobs_R,
        vocabulary,
        chunks,
        max(16, triton.next_power_of_2(chunks)),
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(),
    )


# --- kernels --------------------------------------------------------------------------------------------------------
def _summarise(
    logits_RV: Tensor,
    targets_R: Tensor,
    lse_R: Tensor,
    logprobs_R: Tensor,
    entropy_R: Tensor,
    softcap: float,
    scale: float,
    temperature: float,
) -> None:
    rows, vocabulary = logits_RV.shape
    out = lse_R, logprobs_R, entropy_R
    _summarise_kernel[(rows,)](
        logits_RV, targets_R, *out, softcap, scale, temperature, vocabulary, softcap > 0, BLOCK, num_warps=8
    )


def _differentiate(
    logits_RV: Tensor,
    targets_R: Tensor,
    lse_R: Tensor,
    entropy_R: Tensor,
    grad_logprobs_R: Tensor,
    grad_entropy_R: Tensor,
    softcap: float,
    scale: float,
    temperature: float,
) -> None:
    rows, vocabulary = logits_RV.shape
    given = targets_R, lse_R, entropy_R, grad_logprobs_R, grad_entropy_R
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    _differentiate_kernel[grid](
        logits_RV, *given, softcap, scale, temperature, vocabulary, softcap > 0, BLOCK, num_warps=8
    )


@triton.jit
def _shaped(raw, softcap, scale, temperature, CAPPED: tl.constexpr):
    """Compute logits as they enter the softmax, from the products of hidden states and weights."""
    value = raw.to(tl.float32) * scale
    if CAPPED:
        value = softcap * (2 * tl.sigmoid(2 * value / softcap) - 1)  # tanh
    return value / temperature


@triton.jit
def _summarise_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    logprobs_ptr,
    entropy_ptr,
    softcap,
    scale,
    temperature,
    VOCABULARY: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * VOCABULARY
    top = tl.full((), float("-inf"), tl.float32)
    mass = tl.full((), 0.0, tl.float32)  # Σ exp(logit - top)
    moment = tl.full((), 0.0, tl.float32)  # Σ exp(logit - top) · (logit - top)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < VOCABULARY
        value = _shaped(tl.load(logits_ptr + at, mask=live, other=0.0), softcap, scale, temperature, CAPPED)
        higher = tl.maximum(top, tl.max(tl.where(live, value, float("-inf")), 0))
        shift = tl.where(top == float("-inf"), 0.0, top - higher)
        shrink = tl.exp(shift)
        below = value - higher
        weight = tl.where(live, tl.exp(below), 0.0)
        # A weight of 0 may stand beside an infinite distance.
        moment = (moment + shift * mass) * shrink + tl.sum(tl.where(weight > 0, weight * below, 0.0), 0)
        mass = mass * shrink + tl.sum(weight, 0)
        top = higher
    target = tl.load(targets_ptr + row)
    chosen = _shaped(tl.load(logits_ptr + target), softcap, scale, temperature, CAPPED)
    log_mass = tl.log(mass)
    tl.store(lse_ptr + row, top + log_mass)
    tl.store(logprobs_ptr + row, (chosen - top) - log_mass)  # in this order: the log-sum-exp of large logits is coarse
    tl.store(entropy_ptr + row, log_mass - moment / mass)


@triton.jit
def _differentiate_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    softcap,
    scale,
    temperature,
    VOCABULARY: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < VOCABULARY
    place = logits_ptr + row * VOCABULARY + at
    value = _shaped(tl.load(place, mask=live, other=0.0), softcap, scale, temperature, CAPPED)
    by_logprob = tl.load(grad_logprobs_ptr + row)
    by_entropy = tl.load(grad_entropy_ptr + row)
    log_p = value - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    # d logprob_target / d logit = 1[target] - p ; d entropy / d logit = -p (log p + entropy)
    surprise = tl.where(p > 0, log_p + tl.load(entropy_ptr + row), 0.0)
    grad = tl.where(at == tl.load(targets_ptr + row), by_logprob, 0.0) - p * (by_logprob + by_entropy * surprise)
    if CAPPED:
        squashed = value * temperature / softcap
        grad = grad * (1 - squashed * squashed)
    grad = grad * (scale / temperature)
    tl.store(place, grad.to(logits_ptr.dtype.element_ty), mask=live)


@triton.jit
def _chunk_kernel(logits_ptr, temperature_ptr, peak_ptr, mass_ptr, best_ptr, V, CHUNKS, BLOCK: tl.constexpr):
    """Compute the largest logit, its index, and the sum of exponentials of one chunk of one row."""
    await_input()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
    if (temperature > 0) & (temperature != 1):  # divisions take longer than the read
        logits = logits / temperature
    peak = tl.max(logits, 0)
    tl.store(peak_ptr + row * CHUNKS + chunk, peak)
    tl.store(mass_ptr + row * CHUNKS + chunk, tl.sum(tl.exp(logits - peak), 0))
    if temperature == 0:
        tl.store(best_ptr + row * CHUNKS + chunk, chunk * BLOCK + tl.argmax(logits, 0))


@triton.jit
def _pick_kernel(
    logits_ptr,
    ids_ptr,
    temperature_ptr,
    peak_ptr,
    mass_ptr,
    logprobs_ptr,
    V,
    CHUNKS,
    BLOCK: tl.constexpr,
):
    await_input()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    c = tl.arange(0, BLOCK)
    peaks = tl.load(peak_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=-float("inf"))
    peak = tl.max(peaks, 0)
    masses = tl.load(mass_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp(peaks - peak)
    chosen = tl.load(logits_ptr + row * V + tl.load(ids_ptr + row)).to(tl.float32)
    chosen = chosen / tl.where(temperature > 0, temperature, 1.0)
    tl.store(logprobs_ptr + row, (chosen - peak) - tl.log(tl.sum(masses, 0)))
