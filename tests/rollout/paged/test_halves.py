"""Products of few rows, and those whose halves are added by the next norm, on a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.paged.plain import PlainOps, RowNorm

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
FEATURES, OUTPUTS = 8960, 1536


@pytest.mark.parametrize(
    ("outputs", "inputs", "halved"), [(1536, 1536, 32), (1536, 8960, 32), (4096, 4096, 0), (6144, 256, 0)]
)
@pytest.mark.parametrize("rows", [3, 16, 17, 32, 33, 64, 65])
def test_products_of_few_rows(rows: int, outputs: int, inputs: int, halved: int) -> None:
    from lockstep.rollout.paged.ops import TritonOps

    torch.manual_seed(0)
    ops = TritonOps()
    x, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, inputs), (outputs,)))
    weight = (torch.randn(outputs, inputs + 64, device="cuda") * inputs**-0.5).bfloat16()[:, :inputs]
    expected = x.double() @ weight.double().T
    for found, right in (
        (ops.product(x, weight, bias), expected + bias.double()),
        (ops.product(x, weight, None), expected),
    ):
        torch.testing.assert_close(found, right.bfloat16(), atol=0.04, rtol=0.02)
    product = ops.before_norm(x, weight, None)
    assert product.shape == ((2, rows, outputs) if rows <= halved else (rows, outputs))
    whole = product.sum(0) if product.dim() == 3 else product
    torch.testing.assert_close(whole.bfloat16(), expected.bfloat16(), atol=0.04, rtol=0.02)
    assert torch.equal(ops.before_norm(x, weight, None), product)


@pytest.mark.parametrize("ranks", [0, 32])
@pytest.mark.parametrize(("rows", "halved"), [(80, False), (96, True), (256, True), (512, True), (544, False)])
def test_halves_are_the_product(rows: int, halved: bool, ranks: int) -> None:
    from lockstep.rollout.paged.ops import TritonOps

    torch.manual_seed(0)
    size = FEATURES + ranks
    x = torch.randn(rows, size, device="cuda").bfloat16()
    weight = (torch.randn(OUTPUTS, size + 64, device="cuda") * size**-0.5).bfloat16()[:, :size]
    residual, norm = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, OUTPUTS), (OUTPUTS,)))
    ops, given = TritonOps(), RowNorm(norm, 1e-6)
    product = ops.before_norm(x, weight, None)
    assert product.shape == ((2, rows, OUTPUTS) if halved else (rows, OUTPUTS))
    found = ops.add_norm(product, residual, given)
    expected = PlainOps().add_norm((x.double() @ weight.double().T).bfloat16(), residual, given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.04, rtol=0.02)
    assert torch.equal(ops.add_norm(ops.before_norm(x, weight, None), residual, given)[0], found[0])
    assert ops.before_norm(x, weight, norm).shape == (rows, OUTPUTS)
    assert ops.before_norm(x[:, :2048], weight[:, :2048].contiguous(), None).shape == (rows, OUTPUTS)
