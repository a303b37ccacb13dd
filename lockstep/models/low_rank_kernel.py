"""Triton kernel that adds low-rank products to weights, in one pass over the weights: all layers of a model in one launch.

Legend: O outputs, X inputs, R rank.
"""

# Triton has no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.host import on_device

ROWS, COLUMNS = 64, 128
EIGHT, ALIGNMENT = 8, 16
"""Elements and bytes: loads of several elements begin at a multiple of them, if all rows of all matrices do."""


@triton.jit
def _merge_kernel(
    layers_ptr, scalings_ptr, weights_ptr, factors_ptr, first_step, second_step, FIELDS: tl.constexpr, EVEN: tl.constexpr,
    DITHERED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one layer. The table has a row for each layer: its sizes, then of W, A, B and the result the distance in
    elements from a fixed address and that from row to row. An address itself, read here, would have no known alignment.
    """
    at = layers_ptr + tl.program_id(1) * FIELDS
    outputs, inputs, rank = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    base, down, up, out = tl.load(at + 3), tl.load(at + 5), tl.load(at + 7), tl.load(at + 9)
    base_row, down_row, up_row, out_row = tl.load(at + 4), tl.load(at + 6), tl.load(at + 8), tl.load(at + 10)
    if EVEN:
        base, down, up, out = (
            tl.multiple_of(base, 8),
            tl.multiple_of(down, 8),
            tl.multiple_of(up, 8),
            tl.multiple_of(out, 8),
        )
        base_row, down_row = tl.multiple_of(base_row, 8), tl.multiple_of(down_row, 8)
        up_row, out_row, inputs = tl.multiple_of(up_row, 8), tl.multiple_of(out_row, 8), tl.multiple_of(inputs, 8)
    across = tl.cdiv(inputs, COLUMNS)
    if tl.program_id(0) >= across * tl.cdiv(outputs, ROWS):
        return
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    live, inside, ranks = (row < outputs)[:, None], (column < inputs)[None, :], r < rank
    b = tl.load(factors_ptr + up + row[:, None] * up_row + r[None, :], mask=live & ranks[None, :], other=0.0)
    a = tl.load(factors_ptr + down + r[:, None] * down_row + column[None, :], mask=inside & ranks[:, None], other=0.0)
    weight = tl.load(weights_ptr + base + row[:, None] * base_row + column[None, :], mask=live & inside, other=0.0)
    product = tl.dot(b, a, input_precision="ieee")
    total = weight.to(tl.float32) + tl.load(scalings_ptr + tl.program_id(1)) * product
    kind: tl.constexpr = weights_ptr.dtype.element_ty
    if DITHERED:
        first = (row * first_step >> 16) & 0xFFFF
        second = (column * second_step >> 16) & 0xFFFF
        bits = total.to(tl.uint32, bitcast=True) + (first[:, None] ^ second[None, :]).to(tl.uint32)
        rounded = (bits >> 16).to(tl.uint16).to(kind, bitcast=True)
    else:
        rounded = total.to(kind)
    tl.store(weights_ptr + out + row[:, None] * out_row + column[None, :], rounded, mask=live & inside)


def merge_by_kernel(
    merges: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, float]], steps: tuple[int, int], *, dithered: bool
) -> None:
    """Write base + scaling · up·down to the results of all layers, rounded as low_rank.merge says. `merges`: base [O, X], down
    [R, X], up [O, R], result and scaling of each.

    All matrices A and B have one dtype, all others another, and entries of a row are adjacent.
    """
    weights, factors = merges[0][:2]
    rows = [
        (*base_OX.shape, len(down_RX), *_place(base_OX, weights), *_place(down_RX, factors), *_place(up_OR, factors),
         *_place(out_OX, weights))
        for base_OX, down_RX, up_OR, out_OX, _ in merges
    ]  # fmt: skip
    table = np.array(rows, dtype=np.int64)
    aligned = (
        not any(one.data_ptr() % ALIGNMENT for one in (weights, factors))
        and not (table[:, [1, *range(3, 11)]] % EIGHT).any()
    )
    tiles = max(triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, COLUMNS) for outputs, inputs in table[:, :2].tolist())
    scalings = np.array([scaling for *_, scaling in merges], dtype=np.float32)
    _merge_kernel[(tiles, len(merges))](
        on_device(table, weights.device), on_device(scalings, weights.device), weights, factors, *steps, table.shape[1],
        bool(aligned), dithered, max(16, triton.next_power_of_2(int(table[:, 2].max()))), ROWS, COLUMNS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def _place(tensor: Tensor, anchor: Tensor) -> tuple[int, int]:
    """Return the distance of a matrix from the anchor in elements, and that from row to row."""
    return (tensor.data_ptr() - anchor.data_ptr()) // anchor.itemsize, tensor.stride(0)
