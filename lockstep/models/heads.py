"""Token log-probabilities and entropies from hidden states, without a tokens × vocabulary matrix.

The head runs over a tile of rows and vocabulary entries at a time; only a few numbers per token are kept, and the backward
pass computes each tile of logits again. Peak memory is one tile, whatever the number of tokens. GPUs with Triton have the
kernels of head_kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.models import exact

TILES = {"cpu": (512, 2048), "cuda": (4096, 32768)}
"""Rows × vocabulary entries of logits that exist at once. On a CPU such a tile and its slice of the weight stay in the cache."""
FAINTEST = -80.0
"""Log-probabilities are counted as at least this. exp of less is a denormal number, which takes a CPU ten times as long, and
adds nothing to a sum of 1."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a decoder: logits = cap(scale * (hidden @ weight.T + bias))."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    """Gemma 2: softcap * tanh(logits / softcap)."""
    scale: float = 1.0
    """Cohere, Falcon-H1 and HyperCLOVA X multiply (logit_scale, lm_head_multiplier, logits_scaling), Granite divides."""

    def slice(self, entries: slice) -> Head:
        """Return the head of a part of the vocabulary."""
        bias = None if self.bias_V is None else self.bias_V[entries]
        return Head(self.weight_VH[entries], bias, self.softcap, self.scale)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return logits [T, V] in fp32 (in fp64 for a float64 model)."""
        logits_TV = torch.nn.functional.linear(hidden_TH, self.weight_VH, self.bias_V)
        if logits_TV.dtype != torch.float64:
            logits_TV = logits_TV.float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.softcap is not None:
            logits_TV = self.softcap * torch.tanh(logits_TV / self.softcap)
        return logits_TV


def head_of(model: nn.Module) -> Head:
    """Return the head of a transformers causal language model.

    Raises ModelError if the model has none that Lockstep knows.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"the model's head is {type(layer).__name__}, not a linear layer",
            where=type(model).__name__,
            fix="choose a model with a linear head",
        )
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    multiplied = _factor(config, "logit_scale") * _factor(config, "lm_head_multiplier")
    scaling = _factor(config, "logits_scaling")
    scale = multiplied * scaling if config.model_type == "hyperclovax" else multiplied / scaling
    return Head(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


def _factor(config: Any, name: str) -> float:
    """Return a factor that a config may name."""
    return float(getattr(config, name, None) or 1.0)


def token_logprobs(
    head: Head, hidden_TH: Tensor, targets_T: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and entropy (nats) of each distribution softmax(logits / temperature).

    hidden_TH predicts targets_T row by row. Returns fp32 logprobs_T, with gradient to the hidden states and to the head's
    weight and bias, and fp32 entropy_T, with gradient likewise; without `entropy` that one is empty.
    """
    function = _function(hidden_TH)
    settings = (temperature, head.softcap, head.scale, *((entropy,) if function is _TokenLogprobs else ()))
    logprobs_T, entropy_T = function.apply(hidden_TH, head.weight_VH, head.bias_V, targets_T, *settings)
    return logprobs_T, entropy_T if entropy else entropy_T[:0].detach()


def logits_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Log-probability of each target under softmax(logits), [T] fp32, as `token_logprobs` would give it."""
    if not exact.enabled():
        return logits_TV.float().log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]
    from lockstep.models.head_kernels import pick_logprobs, summaries

    logprobs_T, ones_T = (logits_TV.new_ones(len(logits_TV), dtype=torch.float32) for _ in range(2))
    peak_TC, mass_TC, _ = summaries(logits_TV, ones_T)
    pick_logprobs(logits_TV, targets_T, ones_T, peak_TC, mass_TC, logprobs_T)
    return logprobs_T


def _function(hidden_TH: Tensor) -> Any:
    fused = _fused() if hidden_TH.is_cuda and hidden_TH.dtype != torch.float64 else None
    return _TokenLogprobs if fused is None else fused


@cache
def _fused() -> Any | None:
    try:
        from lockstep.models.head_kernels import FusedTokenLogprobs
    except ImportError:  # no Triton: tiles of the vocabulary, by torch's own operations
        return None
    return FusedTokenLogprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
        entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Compute tile by tile; without `entropy`, every entropy is 0."""
        head = Head(weight_VH, bias_V, softcap, scale)
        dtype = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        lse_T, logprobs_T, entropy_T = (hidden_TH.new_empty(hidden_TH.shape[0], dtype=dtype) for _ in range(3))
        for rows in _spans(hidden_TH.shape[0], _tile(hidden_TH)[0]):
            summary = _Summary(hidden_TH[rows], targets_T[rows], dtype, entropy)
            for entries in _spans(weight_VH.shape[0], _tile(hidden_TH)[1]):
                summary.add(_tempered(head.slice(entries), hidden_TH[rows], temperature), entries)
            lse_T[rows], logprobs_T[rows], entropy_T[rows] = summary.result()
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropy_T)
        ctx.temperature, ctx.softcap, ctx.scale = temperature, softcap, scale
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropy_T = grads
        hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropy_T = ctx.saved_tensors
        head = Head(weight_VH, bias_V, ctx.softcap, ctx.scale)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        with_entropy = bool(grad_entropy_T.count_nonzero())
        # Sums over tiles are kept wide: a bf16 running sum would lose small terms.
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=lse_T.dtype) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=lse_T.dtype) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=lse_T.dtype) if need_bias else None
        for rows in _spans(hidden_TH.shape[0], _tile(hidden_TH)[0]):
            for entries in _spans(weight_VH.shape[0], _tile(hidden_TH)[1]):
                logits_BC = _tempered(head.slice(entries), hidden_TH[rows], ctx.temperature)
                slope_BC = _cap_slope(head, logits_BC, ctx.temperature)
                logits_BC.sub_(lse_T[rows, None]).clamp_(min=FAINTEST)  # log p
                # d logprob_target / d logit = 1[target] - p ; d entropy / d logit = -p (log p + entropy)
                entropy_part = None
                if with_entropy:
                    entropy_part = grad_entropy_T[rows, None] * logits_BC.exp() * (logits_BC + entropy_T[rows, None])
                grad_BC = logits_BC.exp_().mul_(-grad_logprobs_T[rows, None])
                row_K, column_K = _targets_within(targets_T[rows], entries)
                grad_BC[row_K, column_K] += grad_logprobs_T[rows][row_K]
                if entropy_part is not None:
                    grad_BC -= entropy_part
                grad_BC = (grad_BC if slope_BC is None else grad_BC.mul_(slope_BC)).to(hidden_TH.dtype)
                if grad_hidden_TH is not None:
                    grad_hidden_TH[rows] += grad_BC @ weight_VH[entries]
                if grad_weight_VH is not None:
                    grad_weight_VH[entries] += grad_BC.T @ hidden_TH[rows]
                if grad_bias_V is not None:
                    grad_bias_V[entries] += grad_BC.sum(0)
        hidden = None if grad_hidden_TH is None else grad_hidden_TH.to(hidden_TH.dtype)
        weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return hidden, weight, bias, None, None, None, None, None


class _Summary:
    """Running logsumexp, target logit and entropy of a block of rows, tile by tile over the vocabulary."""

    def __init__(self, hidden_BH: Tensor, targets_B: Tensor, dtype: torch.dtype, entropy: bool) -> None:
        rows = hidden_BH.shape[0]
        self._targets_B, self._entropy = targets_B, entropy
        self._top_B = hidden_BH.new_full((rows,), -torch.inf, dtype=dtype)
        self._mass_B = hidden_BH.new_zeros(rows, dtype=dtype)
        """Σ exp(logit - top)"""
        self._moment_B = hidden_BH.new_zeros(rows, dtype=dtype)
        """Σ exp(logit - top) · (logit - top)"""
        self._target_B = hidden_BH.new_zeros(rows, dtype=dtype)

    def add(self, logits_BC: Tensor, entries: slice) -> None:
        """Take in one tile, which is overwritten."""
        row_K, column_K = _targets_within(self._targets_B, entries)
        self._target_B[row_K] = logits_BC[row_K, column_K]
        top_B = torch.maximum(self._top_B, logits_BC.amax(-1))
        shift_B = torch.where(self._top_B.isinf(), 0.0, self._top_B - top_B)
        shrink_B = shift_B.exp()
        logits_BC.sub_(top_B[:, None]).clamp_(min=FAINTEST)
        if self._entropy:
            mass_BC = logits_BC.exp()
            self._moment_B = (self._moment_B + shift_B * self._mass_B) * shrink_B
            self._moment_B += torch.linalg.vecdot(mass_BC, logits_BC)
        else:
            mass_BC = logits_BC.exp_()
        self._mass_B = self._mass_B * shrink_B + mass_BC.sum(-1)
        self._top_B = top_B

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return logsumexp, log-probability of the target, entropy."""
        log_mass_B = self._mass_B.log()
        logprob_B = (
            self._target_B - self._top_B
        ) - log_mass_B  # in this order: the logsumexp of large logits is coarse
        entropy_B = log_mass_B - self._moment_B / self._mass_B if self._entropy else torch.zeros_like(logprob_B)
        return self._top_B + log_mass_B, logprob_B, entropy_B


def _targets_within(targets_B: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Return the rows whose target lies in a tile, and its column there."""
    row_K = ((targets_B >= entries.start) & (targets_B < entries.stop)).nonzero()[:, 0]
    return row_K, targets_B[row_K] - entries.start


def _tempered(head: Head, hidden_BH: Tensor, temperature: float) -> Tensor:
    logits_BC = head.logits(hidden_BH)
    return logits_BC if temperature == 1.0 else logits_BC / temperature


def _cap_slope(head: Head, tempered_BC: Tensor, temperature: float) -> Tensor | None:
    """Return the derivative of the tempered logits with respect to hidden @ weight.T; None stands for 1."""
    factor = head.scale / temperature
    if head.softcap is None:
        return None if factor == 1.0 else tempered_BC.new_tensor(factor)
    return (1 - (tempered_BC * (temperature / head.softcap)) ** 2) * factor


def _tile(hidden_TH: Tensor) -> tuple[int, int]:
    return TILES.get(hidden_TH.device.type, TILES["cuda"])


def _spans(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
