"""Runs the experts of a mixture with our kernels, instead of the model's own loop over experts.

Few rows, as in decoding, take four launches: sort, gate and up with their activation, down, and the sum over a token's experts.
Many rows take torch's grouped matrix multiplications. Both round at the same places, so a token's result does not depend on
which of them ran. Routers and experts are recognised by their code, as in fused_layers.

Legend: T tokens, K experts of each, R = T · K rows, E experts, H hidden, I inner width, O outputs, X inputs, L rank of adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from lockstep.models import exact
from lockstep.models.activation_kernels import Activation, Unsummed, activate, activate_back, combine
from lockstep.models.expert_kernels import gate_up, low_rank_rows, outer, product
from lockstep.models.known import kind_of_experts, only_sums_experts, reference, same
from lockstep.models.low_rank import LowRank, adapters_of
from lockstep.models.mxfp4 import Packed
from lockstep.models.mxfp4_kernels import Low, opened
from lockstep.models.route_kernels import Sorted, choose, route, sort_rows

MANY = 128
"""Rows for each expert, on average, from which grouped products are used."""
FEW = 1024
"""Tokens up to which a router's product is made in parts: few sums that each run over all inputs leave most of a GPU idle."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Quantised operands of a product. Gradients pass straight through to its own matrices and rows."""

    weight_EOX: Tensor
    activation: Callable[[Tensor], Tensor] | None = None
    """Function of the rows that enter; None leaves them as they are."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The tensors of a layer's experts: matrices [E, outputs, inputs] in any order in memory, or kept in MXFP4, and how they are
    activated.
    """

    gate_up_EOX: Tensor | Packed
    down_EOX: Tensor | Packed
    activation: Activation
    bias_EO: Tensor | None = None
    down_bias_EO: Tensor | None = None
    used: tuple[Operands | None, Operands | None] = (None, None)
    """Those of the products with gate and up, and with down, where they are quantised."""
    adapters: tuple[LowRank | None, LowRank | None] = (None, None)
    """Those of the same products. They see the unquantised rows."""

    @property
    def experts(self) -> int:
        both = self.gate_up_EOX
        return both.experts if isinstance(both, Packed) else len(both)

    @staticmethod
    def of(module: Any) -> Experts | None:
        """Return those of a module of transformers; None for a form that is not known here."""
        adapters = adapters_of(module)
        match kind := kind_of_experts(module):
            case "paired" | "packed":
                activation = Activation(True, float(module.limit), float(module.alpha))
                both, down = (
                    (module.gate_up, module.down)
                    if kind == "packed"
                    else (module.gate_up_proj.transpose(1, 2), module.down_proj.transpose(1, 2))
                )
                biases = module.gate_up_proj_bias, module.down_proj_bias
                return Experts(both, down, activation, *biases, adapters=adapters)
            case "gated":
                return Experts(module.gate_up_proj, module.down_proj, Activation(), adapters=adapters)
            case None:
                return None
            case other:
                assert_never(other)

    def __call__(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts, [T, H]; differentiable."""
        if torch.is_grad_enabled() or index_TK.numel() >= MANY * self.experts:
            function: Any = _Mixture
            tensors = self.gate_up_EOX, self.down_EOX, self.bias_EO, self.down_bias_EO
            pairs = [(None, None) if one is None else (one.down_ERX, one.up_EOR) for one in self.adapters]
            result: Tensor = function.apply(x_TH, index_TK, weight_TK, *tensors, *pairs[0], *pairs[1], self)
            return result
        return self.unsummed(x_TH, index_TK, weight_TK).summed()

    def unsummed(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Unsummed:
        """Return each token's results of its experts, for few rows; no gradient."""
        rows, (first, second) = sort_rows(index_TK, self.experts), self.used
        low_RL = _low(self.adapters[0], x_TH, rows, tokens=True)
        used_TH, matrices = _rows(first, x_TH), _matrices(first, self.gate_up_EOX)
        inner_RI = gate_up(used_TH, matrices, self.bias_EO, rows, self.activation, low_RL)
        low_RL = _low(self.adapters[1], inner_RI, rows, tokens=False)
        out_RH = product(_rows(second, inner_RI), _matrices(second, self.down_EOX), rows, low_RL)
        return Unsummed(out_RH, self.down_bias_EO, rows, weight_TK)


def _low(adapter: LowRank | None, x_RX: Tensor, rows: Sorted, *, tokens: bool) -> Low | None:
    if adapter is None:
        return None
    return Low(low_rank_rows(x_RX, adapter.down_ERX, rows, adapter.scaling, tokens=tokens), adapter.up_EOR)


class _Mixture(torch.autograd.Function):
    """Keeps the inputs, the products with gate and up, and those of adapters' first matrices; everything else is computed again.

    Matrices in MXFP4 are dequantised for one product at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up_EOX: Tensor | Packed, down_EOX: Tensor | Packed,
        bias_EO: Tensor | None, down_bias_EO: Tensor | None, *adapters: Any,
    ) -> Tensor:  # fmt: skip
        """`adapters`: the matrices that gradients go to, A and B of the first product and of the second; then the experts."""
        *low_rank, experts = adapters
        rows = sort_rows(index_TK, experts.experts)
        (first, second), (adapter, down_adapter) = experts.used, experts.adapters
        token_R, activation = _tokens(rows), experts.activation
        gate_up_EOX, down_EOX = _matrices(first, gate_up_EOX), _matrices(second, down_EOX)
        low_RL = down_low_RL = None
        both_RO = _grouped(_rows(first, x_TH)[token_R], _dense(gate_up_EOX, x_TH), rows)
        if adapter is not None:
            low_RL = _grouped(x_TH[token_R], adapter.down_ERX, rows) * adapter.scaling
            both_RO += _grouped(low_RL, adapter.up_EOR, rows)
        inner_RI = activate(both_RO, bias_EO, rows, activation)
        out_RH = _grouped(_rows(second, inner_RI), _dense(down_EOX, x_TH), rows)
        if down_adapter is not None:
            down_low_RL = _grouped(inner_RI, down_adapter.down_ERX, rows) * down_adapter.scaling
            out_RH += _grouped(down_low_RL, down_adapter.up_EOR, rows)
        out_TH = combine(out_RH, down_bias_EO, rows, weight_TK)
        matrices = [None if isinstance(one, Packed) else one for one in (gate_up_EOX, down_EOX)]
        kept = x_TH, index_TK, weight_TK, *matrices, bias_EO, down_bias_EO, both_RO, low_RL, down_low_RL, *low_rank
        ctx.save_for_backward(*kept)
        ctx.packed = tuple(one if isinstance(one, Packed) else None for one in (gate_up_EOX, down_EOX))
        ctx.rows, ctx.experts = rows, experts
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *kept, a_ELX, b_EOL, down_a_ELX, down_b_EOL = ctx.saved_tensors
        x_TH, index_TK, weight_TK, *matrices, bias_EO, down_bias_EO, both_RO, low_RL, down_low_RL = kept
        gate_up_EOX, down_EOX = (packed or dense for packed, dense in zip(ctx.packed, matrices, strict=True))
        rows, need, experts = ctx.rows, ctx.needs_input_grad, ctx.experts
        activation, (first, second) = experts.activation, experts.used
        token_R, grad_TH = _tokens(rows), grads[0].contiguous()
        factor_R1 = weight_TK.reshape(-1)[rows.order_R, None].to(grad_TH.dtype)
        grad_RH = grad_TH[token_R]
        own_grad_RI = inner_grad_RI = _grouped(grad_RH, _dense(down_EOX, x_TH).transpose(1, 2), rows)
        low_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        down_low_grads = low_grads
        if down_low_RL is not None:
            scaling = experts.adapters[1].scaling
            low_grad_RL = _grouped(grad_RH, down_b_EOL.transpose(1, 2), rows) * scaling
            inner_grad_RI = own_grad_RI + _grouped(low_grad_RL, down_a_ELX.transpose(1, 2), rows)
            inner_RI = activate(both_RO, bias_EO, rows, activation)
            down_low_grads = _pair(low_grad_RL * factor_R1, inner_RI, grad_RH, down_low_RL * factor_R1, rows)
        both_grad_RO, share_R = activate_back(both_RO, bias_EO, rows, activation, inner_grad_RI, weight_TK)
        if second is not None and second.activation is not None:  # what the router weighs was made of other numbers
            inner_RI = activate(both_RO, bias_EO, rows, activation)
            change_RI = second.activation(inner_RI).float() - inner_RI.float()
            share_R[rows.order_R] += (own_grad_RI.float() * change_RI).sum(1)
        del inner_grad_RI, own_grad_RI
        share_TK = share_R.view_as(weight_TK)
        if down_bias_EO is not None:
            share_TK = share_TK + (grad_TH @ down_bias_EO.T).gather(1, index_TK)
        x_grad_RH = _grouped(both_grad_RO, _dense(gate_up_EOX, x_TH).transpose(1, 2), rows) if need[0] else None
        if low_RL is not None:
            low_grad_RL = _grouped(both_grad_RO, b_EOL.transpose(1, 2), rows) * experts.adapters[0].scaling
            if x_grad_RH is not None:
                x_grad_RH += _grouped(low_grad_RL, a_ELX.transpose(1, 2), rows)
            low_grads = _pair(low_grad_RL, x_TH[token_R], both_grad_RO, low_RL, rows)
        x_grad_TH = None if x_grad_RH is None else combine(x_grad_RH, None, rows, None)
        both_grad = outer(both_grad_RO, _rows(first, x_TH)[token_R], rows) if need[3] else None
        bias_grad = _by_expert(both_grad_RO, bias_EO, rows) if need[5] else None
        down_grad = down_bias_grad = None
        if need[4] or need[6]:
            grad_RH = grad_RH * factor_R1
            if need[4]:
                down_grad = outer(grad_RH, _rows(second, activate(both_RO, bias_EO, rows, activation)), rows)
            down_bias_grad = _by_expert(grad_RH, down_bias_EO, rows) if need[6] else None
        weight_grad_TK = share_TK.to(weight_TK.dtype) if need[2] else None
        own = x_grad_TH, None, weight_grad_TK, both_grad, down_grad, bias_grad, down_bias_grad
        return *own, *low_grads, *down_low_grads, None


def _pair(
    low_grad_RL: Tensor, x_RX: Tensor, grad_RO: Tensor, low_RL: Tensor, rows: Sorted
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an adapter's two matrices."""
    return outer(low_grad_RL, x_RX, rows), outer(grad_RO, low_RL, rows)


def _matrices(used: Operands | None, own: Tensor | Packed) -> Tensor | Packed:
    return own if used is None else used.weight_EOX


def _rows(used: Operands | None, own_RX: Tensor) -> Tensor:
    return own_RX if used is None or used.activation is None else used.activation(own_RX)


def _dense(matrix: Tensor | Packed, like: Tensor) -> Tensor:
    return opened(matrix, like.dtype) if isinstance(matrix, Packed) else matrix


def _tokens(rows: Sorted) -> Tensor:
    return rows.order_R // rows.top


def _by_expert(grad_RO: Tensor, bias_EO: Tensor, rows: Sorted) -> Tensor:
    return (
        torch.zeros_like(bias_EO, dtype=torch.float32).index_add_(0, rows.expert_R, grad_RO.float()).to(bias_EO.dtype)
    )


def _grouped(x_RX: Tensor, weight_EOX: Tensor, rows: Sorted) -> Tensor:
    """Compute sorted rows times the matrix of their expert, by torch's grouped product where it serves."""
    served = x_RX.is_cuda and x_RX.dtype == torch.bfloat16 and not any(n % 8 for n in weight_EOX.shape[1:])
    if served and exact.keeps_order(_theirs, product, x_RX, weight_EOX, rows):
        return _theirs(x_RX, weight_EOX, rows)
    return product(x_RX, weight_EOX, rows)


def _theirs(x_RX: Tensor, weight_EOX: Tensor, rows: Sorted) -> Tensor:
    result: Tensor = torch._grouped_mm(x_RX, weight_EOX.transpose(1, 2), offs=rows.bounds_E[1:])
    return result


# --- a model's modules ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Router:
    """The choice of experts by the largest products with a weight."""

    weight_EH: Tensor
    bias_E: Tensor | None
    top: int
    shared: bool
    """The weights of a token's experts sum to 1."""
    rounded: bool
    """They are rounded to the dtype of the hidden states; else they stay fp32."""

    @staticmethod
    def of(module: Any) -> Router | None:
        """Return that of a module of transformers; None for another rule."""
        forward = type(module).forward
        for family, name in (("qwen3_moe", "Qwen3Moe"), ("mixtral", "Mixtral"), ("gpt_oss", "GptOss")):
            if same(forward, reference(family, f"{name}TopKRouter").forward):
                shared = bool(getattr(module, "norm_topk_prob", True))
                bias = getattr(module, "bias", None)
                return Router(module.weight, bias, int(module.top_k), shared, family != "mixtral")
        return None

    def __call__(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits [T, E], and weights and numbers of the chosen experts, [T, K]."""
        dtype = x_TH.dtype if self.rounded else torch.float32
        function: Any = _Route
        found: tuple[Tensor, Tensor, Tensor] = function.apply(
            x_TH, self.weight_EH, self.bias_E, self.top, self.shared, dtype
        )
        return found


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, top: int, shared: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        half = x_TH.is_cuda and x_TH.dtype == torch.bfloat16 == weight_EH.dtype
        if half and (exact.enabled() or len(x_TH) <= FEW):
            logits_TE, weight_TK, index_TK = route(x_TH, weight_EH, bias_E, top, shared=shared, dtype=dtype)
        else:
            logits_TE = nn.functional.linear(x_TH, weight_EH, bias_E)
            weight_TK, index_TK = choose(logits_TE, top, shared=shared, dtype=dtype)
        ctx.save_for_backward(x_TH, weight_EH, logits_TE, index_TK)
        ctx.shared = shared
        ctx.mark_non_differentiable(logits_TE, index_TK)
        return logits_TE, weight_TK, index_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_EH, logits_TE, index_TK = ctx.saved_tensors
        grad_TK, logits_TE32 = grads[1].float(), logits_TE.float()
        grad_TE = torch.zeros_like(logits_TE32)
        if ctx.shared:  # the softmax over the chosen
            weight_TK = logits_TE32.gather(1, index_TK).softmax(1)
            grad_TE.scatter_(1, index_TK, weight_TK * (grad_TK - (weight_TK * grad_TK).sum(1, keepdim=True)))
        else:
            all_TE = logits_TE32.softmax(1)
            grad_TE.scatter_(1, index_TK, grad_TK)
            grad_TE = all_TE * (grad_TE - (all_TE * grad_TE).sum(1, keepdim=True))
        rounded_TE, (need_x, need_weight, need_bias) = grad_TE.to(logits_TE.dtype), ctx.needs_input_grad[:3]
        return (
            rounded_TE @ weight_EH if need_x else None,
            rounded_TE.T @ x_TH if need_weight else None,
            rounded_TE.sum(0) if need_bias else None,
            *[None] * 3,
        )


class ExpertsForward:
    """Replacement of an experts module's forward. It is a class so that a copy of the model copies it, too."""

    by_kernels = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = Experts.of(self.module)
        assert experts is not None
        return experts(hidden_states, top_k_index, top_k_weights)


def before_the_sum(mixture: Any, x_TH: Tensor) -> Unsummed | None:
    """Return the results of each token's experts for a layer of few tokens; None for a layer that only its module can compute."""
    experts = Experts.of(mixture.experts) if only_sums_experts(mixture) else None
    if experts is None or not isinstance(mixture.experts.__dict__.get("forward"), ExpertsForward):
        return None
    router = mixture.gate if hasattr(mixture, "gate") else mixture.router
    if len(x_TH) * router.top_k >= MANY * experts.experts:
        return None
    _, weight_TK, index_TK = router(x_TH)
    return experts.unsummed(x_TH, index_TK, weight_TK)


class RouterForward:
    """Replacement of a router's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router = Router.of(self.module)
        assert router is not None
        return router(hidden_states.reshape(-1, hidden_states.shape[-1]))


def fuse_experts(module: nn.Module) -> bool:
    """Replace the forward of an experts module or a router, if it is of a known form."""
    replaced: Any = module
    if "forward" not in module.__dict__ and Experts.of(module) is not None:
        replaced.forward = ExpertsForward(module)
        return True
    if "forward" not in module.__dict__ and Router.of(module) is not None:
        replaced.forward = RouterForward(module)
    return False
