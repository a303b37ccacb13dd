"""Products of bf16 matrices by way of fp32: each number is the exact product, rounded once."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from lockstep.bf16_products import speed_up_bf16_products

kept = speed_up_bf16_products()
assert speed_up_bf16_products() is kept
draw = torch.Generator().manual_seed(1)
shapes = (7, 5), (7, 16), (16, 5), (2, 7, 5), (2, 7, 16), (2, 16, 5), (5,)
whole = [torch.randint(-8, 9, shape, generator=draw).float() for shape in shapes]
half = [one.bfloat16() for one in whole]  # integers: sums are exact, and what is left is the last rounding


def products(c, a, b, cc, aa, bb, bias):
    yield a @ b
    yield torch.addmm(c, a, b, beta=2, alpha=3)
    yield torch.addmm(bias, a, b)
    yield torch.bmm(aa, bb)
    yield torch.baddbmm(cc, aa, bb, alpha=0.5)
    yield torch.nn.functional.linear(aa, b.T, bias)
    yield c.clone().addmm_(a, b, beta=0.5)
    leaf = a.clone().requires_grad_()
    (leaf @ b).backward(c)
    yield leaf.grad


for exact, found in zip(products(*whole), products(*half), strict=True):
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16()), (found, exact)
total = half[0].clone()
assert total.addmm_(half[1], half[2]).data_ptr() == total.data_ptr()
try:
    half[1] @ half[1]
except RuntimeError as error:
    assert "shapes cannot be multiplied" in str(error), error
else:
    raise AssertionError
"""


def test_each_product_is_rounded_once_and_fp32_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
