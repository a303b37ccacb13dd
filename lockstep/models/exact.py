"""Batch-invariant arithmetic (`numerics.exact`): its switch in this process, and its matrix multiplications.

While it is on, every sum behind a token's log-probability has one fixed order, whatever else is in the batch: matrix
multiplications add over K from first to last, attention over keys block by block, norms row by row, the head over fixed parts
of the vocabulary. cuBLAS keeps that order wherever it does not split K, which cuBLASLt can be told. That is tested, not assumed:
the first product of each shape is compared with the ordered kernel's, bit by bit. Where cuBLAS differs cuBLASLt takes its place,
and where that differs, too, the kernel.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Way: TypeAlias = Literal["cuBLAS", "cuBLASLt", "kernel"]
"""Library, or kernel of ours, that computes the products of a shape."""
STREAM_MULTIPLE = 128
"""Packed streams are padded to a multiple of this many tokens: each number of rows is tested once, so there should be few."""
TRIED = 2**24
"""Numbers of an input up to which a product is tested on random numbers; beyond, on those at hand."""
SMALL = 1024
"""Rows up to which every number of them is tested; beyond, multiples of STREAM_MULTIPLE."""
LONG = 4096
"""Inputs from which an adapter's first product is summed in parts."""
OUTPUTS, MOST_TRIALS = 2**14, 64
"""Fewest outputs that a test compares, and most trials: another order changes about one rounded output in a hundred."""
ALIGNED = 64
"""Columns behind a row are a multiple of this many."""
COLUMNS = 8192
"""Outputs that a test computes at once."""
MANY, WIDE = 128, 512
"""Rows and outputs from which cuBLASLt is asked for kernels that do not split K; with fewer they take up to ten times as long as
ours.
"""


@dataclass(slots=True)
class _State:
    on: bool = False
    line: str = ""
    repeatable: bool = False
    complete: bool = True
    ways: dict[tuple[Any, ...], Way] = field(default_factory=dict)
    """By shape: the first one that keeps the order."""
    room: int = 0


_state = _State()


def enabled() -> bool:
    """Return whether sums have one fixed order in this process."""
    return _state.on


def complete() -> bool:
    """Return whether all of them have, so that sampling and training must agree to the last bit."""
    return _state.on and _state.complete


def line() -> str:
    """Return the line of a run's log: exactness is on, or the reason why it is not; empty if the recipe does not ask for it."""
    return _state.line


def enable(line: str, *, on: bool = True, repeatable: bool = False, complete: bool = True) -> None:
    """Turn exactness on, or off. Captured steps of an engine keep what they were captured with.

    `repeatable`: updates, too, shall give the same bits each time. Not `complete`: the engine's attention has another order.
    """
    _state.on, _state.line, _state.repeatable, _state.complete = on, line, repeatable, complete


@contextmanager
def on_trial(*, repeatable: bool = False) -> Iterator[None]:
    """Turn exactness on for a test of the device; afterwards it is as it was."""
    before = _state.line, _state.on, _state.repeatable, _state.complete
    enable("", repeatable=repeatable)
    try:
        yield
    finally:
        line, on, again, whole = before
        enable(line, on=on, repeatable=again, complete=whole)


@contextmanager
def repeated() -> Iterator[None]:
    """Have backward passes add in a fixed order, if updates shall be repeatable."""
    if not _state.repeatable:
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def replaced_products() -> tuple[str, ...]:
    """Return the products that run on the ordered kernel because cuBLAS splits K. Example: "8 x 1536 x 8960"."""
    return tuple(f"{key[1]} x {key[2]} x {key[3]}" for key, way in sorted(_state.ways.items()) if way == "kernel")


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear in order; differentiable."""
    way = _way("linear", x_MK, weight_NK, bias_N)
    if way == "kernel":
        function: Any = _Ordered
        result: Tensor = function.apply(x_MK, weight_NK, bias_N)
        return result
    return _cublas(way, "linear", x_MK, weight_NK, bias_N, None, 1.0)


def product_into(out_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, alpha: float = 1.0) -> None:
    """Write alpha · x @ weight.T to `out_MN`, in order. No gradient."""
    rest = x_MK.shape[0] % STREAM_MULTIPLE if x_MK.shape[0] > SMALL else 0
    if rest:  # cuBLAS serves what is left
        product_into(out_MN[:rest], x_MK[:rest], weight_NK, alpha)
        out_MN, x_MK = out_MN[rest:], x_MK[rest:]
    form = "scaled" if alpha != 1 else "plain"
    way = _way(form, x_MK, weight_NK, None, out_MN)
    if way == "kernel":
        _ordered(x_MK, weight_NK, None, alpha, out_MN)
    else:
        _cublas(way, form, x_MK, weight_NK, None, out_MN, alpha)


def adapter_into(out_MR: Tensor, x_MK: Tensor, down_RK: Tensor, scaling: float) -> None:
    """Write scaling · x @ down.T to `out_MR`, an adapter's first product. No gradient.

    With many inputs its few outputs are sums of fixed parts in order: one chain of sums would leave most of the device idle.
    """
    if x_MK.shape[1] < LONG:
        product_into(out_MR, x_MK, down_RK, scaling)
        return
    from lockstep.models.ordered_product_kernel import narrow_product, narrow_tile

    narrow_product(x_MK, down_RK, scaling, out_MR, narrow_tile(x_MK.shape[0]))


def ask_for_room(columns: int) -> None:
    """Have gated activations leave this many columns free behind each row from now on, rounded up.

    An adapter's first product is written there; else the activation would have to be copied beside it.
    """
    _state.room = max(_state.room, -(-columns // ALIGNED) * ALIGNED)


def room() -> int:
    """Return the number of columns to leave free; none while exactness is off."""
    return _state.room if _state.on else 0


def order_products(model: nn.Module) -> None:
    """Have a model's linear layers, except its head, compute in order while exactness is on."""
    outer: Any = model
    head = outer.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            replaced: Any = module
            replaced.forward = MethodType(_forward, module)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer has its class's own forward pass, or that of `order_products`."""
    forward = layer.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is _forward


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if not _state.on:
        return nn.functional.linear(x, module.weight, module.bias)
    flat_MK = x.reshape(-1, x.shape[-1])
    return linear(flat_MK, module.weight, module.bias).view(*x.shape[:-1], -1)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return _ordered(x_MK, weight_NK, bias_N, 1.0, x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MN,) = grads
        x_MK, weight_NK = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            grad_MN @ weight_NK if need_x else None,
            grad_MN.T @ x_MK if need_weight else None,
            grad_MN.sum(0) if need_bias else None,
        )


def keeps_order(
    theirs: Callable[..., Tensor], ours: Callable[..., Tensor], x_MK: Tensor, weights: Tensor, rows: Any
) -> bool:
    """Return whether another product of these operands may stand for ours: it has the same bits, or exactness is off."""
    if not _state.on:
        return True
    key = (theirs.__name__, x_MK.shape[0], *weights.shape, *weights.stride())
    if key not in _state.ways:
        if torch.cuda.is_current_stream_capturing():
            return False
        trial = torch.randn_like(x_MK) if x_MK.numel() <= TRIED else x_MK
        equal = torch.equal(theirs(trial, weights, rows), ours(trial, weights, rows))
        _state.ways[key] = "cuBLAS" if equal else "kernel"
    return _state.ways[key] != "kernel"


# --- which kernel ---------------------------------------------------------------------------------------------------
def _cublas(
    way: Way, form: str, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor | None, alpha: float
) -> Tensor:
    with _without_splits() if way == "cuBLASLt" else nullcontext():
        if out_MN is None:
            return nn.functional.linear(x_MK, weight_NK, bias_N)
        if form == "plain":
            return torch.mm(x_MK, weight_NK.T, out=out_MN)
        return torch.addmm(out_MN, x_MK, weight_NK.T, beta=0, alpha=alpha, out=out_MN)


@contextmanager
def _without_splits() -> Iterator[None]:
    """Have torch call cuBLASLt, and let it choose among the kernels that do not split K."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(library)


def _way(form: str, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor | None = None) -> Way:
    """Return what keeps the order at this shape; tested at the first call that is not part of a capture."""
    rows = x_MK.shape[0]
    if rows > SMALL and rows % STREAM_MULTIPLE:
        return "kernel"
    strides = x_MK.stride(0), weight_NK.stride(0), 0 if out_MN is None else out_MN.stride(0)
    aligned = tuple(t.data_ptr() % 16 == 0 for t in (x_MK, weight_NK, x_MK if out_MN is None else out_MN))
    key = (form, rows, *weight_NK.shape, *strides, *aligned, bias_N is not None)
    if key not in _state.ways:
        if torch.cuda.is_current_stream_capturing():
            return "kernel"
        lt = x_MK.is_cuda and x_MK.dtype == torch.bfloat16 and rows >= MANY and weight_NK.shape[0] >= WIDE
        ways: tuple[Way, ...] = ("cuBLAS", "cuBLASLt") if lt else ("cuBLAS",)
        serves = (way for way in ways if _tested(way, form, x_MK, weight_NK, bias_N, out_MN))
        _state.ways[key] = next(serves, "kernel")
    return _state.ways[key]


@torch.no_grad()
def _tested(way: Way, form: str, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor | None) -> bool:
    """Compare on trial; `out_MN` is overwritten, as it will be by the product itself."""
    random = x_MK.numel() <= TRIED
    outputs = x_MK.shape[0] * weight_NK.shape[0]
    for _ in range(min(-(-OUTPUTS // outputs), MOST_TRIALS) if random else 1):
        if random:
            x_MK = torch.empty_strided(x_MK.shape, x_MK.stride(), dtype=x_MK.dtype, device=x_MK.device).normal_()
        if not _agree(way, form, x_MK, weight_NK, bias_N, out_MN):
            return False
    return True


def _agree(way: Way, form: str, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor | None) -> bool:
    alpha = 0.37 if form == "scaled" else 1.0
    found_MN = _cublas(way, form, x_MK, weight_NK, bias_N, out_MN, alpha)
    for start in range(0, weight_NK.shape[0], COLUMNS):
        part = slice(start, start + COLUMNS)
        weight, bias = weight_NK[part], None if bias_N is None else bias_N[part]
        right = _ordered(x_MK, weight, bias, alpha, x_MK.new_empty(x_MK.shape[0], weight.shape[0]))
        if not torch.equal(right, found_MN[:, part]):
            return False
    return True


def _ordered(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, alpha: float, out_MN: Tensor) -> Tensor:
    from lockstep.models.ordered_product_kernel import product, tile_of

    return product(x_MK, weight_NK, bias_N, alpha, out_MN, tile_of(x_MK.shape[0], weight_NK.shape[0]))
