"""Token log-probabilities and entropies from hidden states, without a tokens × vocabulary matrix.

The head runs over a few hundred rows at a time; only one number per token is kept, and the backward pass computes each
block of logits again. Peak memory is one block, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError

BLOCK_BYTES = {"cpu": 10 * 2**20, "cuda": 256 * 2**20}
"""Size of one block of fp32 logits: on a CPU it should stay in the cache, on a GPU it should fill the machine."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a decoder: logits = cap(hidden @ weight.T + bias) * scale."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    """Gemma 2: softcap * tanh(logits / softcap)."""
    scale: float = 1.0
    """Cohere multiplies (logit_scale), Granite divides (logits_scaling)."""

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] in fp32 (in fp64 for a float64 model)."""
        logits_TV = torch.nn.functional.linear(hidden_TH, self.weight_VH, self.bias_V)
        if logits_TV.dtype != torch.float64:
            logits_TV = logits_TV.float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.softcap is not None:
            logits_TV = self.softcap * torch.tanh(logits_TV / self.softcap)
        return logits_TV


def head_of(model: nn.Module) -> Head:
    """The head of a transformers causal language model.

    Raises ModelError if the model has none that Lockstep knows.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"the model's head is {type(layer).__name__}, not a linear layer", where=type(model).__name__)
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


def token_logprobs(head: Head, hidden_TH: Tensor, targets_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) of each distribution softmax(logits / temperature).

    hidden_TH predicts targets_T row by row. Returns fp32 logprobs_T, with gradient to the hidden states and to the head's
    weight and bias, and fp32 entropy_T, with gradient likewise.
    """
    logprobs_T, entropy_T = _TokenLogprobs.apply(
        hidden_TH, head.weight_VH, head.bias_V, targets_T, temperature, head.softcap, head.scale
    )
    return logprobs_T, entropy_T


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
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight_VH, bias_V, softcap, scale)
        tokens = hidden_TH.shape[0]
        dtype = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        logprobs_T = hidden_TH.new_empty(tokens, dtype=dtype)
        entropy_T = hidden_TH.new_empty(tokens, dtype=dtype)
        lse_T = hidden_TH.new_empty(tokens, dtype=dtype)
        for rows in _blocks(hidden_TH, weight_VH.shape[0]):
            logits_BV = _tempered(head, hidden_TH[rows], temperature)
            top_B1 = logits_BV.amax(-1, keepdim=True)
            logits_BV -= top_B1  # in place: a fresh block costs more than the arithmetic on it
            target_B = logits_BV.gather(-1, targets_T[rows, None])[:, 0]
            mass_BV = logits_BV.exp()
            total_B = mass_BV.sum(-1)
            lse_B = total_B.log()
            lse_T[rows] = lse_B + top_B1[:, 0]
            logprobs_T[rows] = target_B - lse_B
            entropy_T[rows] = lse_B - torch.linalg.vecdot(mass_BV, logits_BV) / total_B
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
        grad_hidden_TH = torch.empty_like(hidden_TH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=lse_T.dtype) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=lse_T.dtype) if need_bias else None
        for rows in _blocks(hidden_TH, weight_VH.shape[0]):
            logits_BV = _tempered(head, hidden_TH[rows], ctx.temperature)
            slope_BV = _cap_slope(head, logits_BV, ctx.temperature)
            logits_BV -= lse_T[rows, None]  # log p
            # d logprob_target / d logit = 1[target] - p ; d entropy / d logit = -p (log p + entropy)
            entropy_part = None
            if with_entropy:
                entropy_part = grad_entropy_T[rows, None] * logits_BV.exp() * (logits_BV + entropy_T[rows, None])
            grad_BV = logits_BV.exp_().mul_(-grad_logprobs_T[rows, None])
            grad_BV.scatter_add_(1, targets_T[rows, None], grad_logprobs_T[rows, None])
            if entropy_part is not None:
                grad_BV -= entropy_part
            grad_BV = (grad_BV if slope_BV is None else grad_BV.mul_(slope_BV)).to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                grad_hidden_TH[rows] = grad_BV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_BV.T @ hidden_TH[rows]
            if grad_bias_V is not None:
                grad_bias_V += grad_BV.sum(0)
        weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TH, weight, bias, None, None, None, None


def _tempered(head: Head, hidden_BH: Tensor, temperature: float) -> Tensor:
    logits_BV = head.logits(hidden_BH)
    return logits_BV if temperature == 1.0 else logits_BV / temperature


def _cap_slope(head: Head, tempered_BV: Tensor, temperature: float) -> Tensor | None:
    """Derivative of the tempered logits with respect to hidden @ weight.T; None stands for 1."""
    factor = head.scale / temperature
    if head.softcap is None:
        return None if factor == 1.0 else tempered_BV.new_tensor(factor)
    return (1 - (tempered_BV * (temperature / head.softcap)) ** 2) * factor


def _blocks(hidden_TH: Tensor, vocabulary: int) -> list[slice]:
    tokens = hidden_TH.shape[0]
    size = max(16, BLOCK_BYTES.get(hidden_TH.device.type, 2**26) // (4 * vocabulary) // 16 * 16)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
