"""MXFP4 and NVFP4 against the standards' text, the table of shared figures, torchao, and the laws that they must obey."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.numerics.formats import (
    block_exponents,
    fake_quantise,
    power_of_two,
    round_e2m1,
    round_e4m3,
)
from lockstep.numerics.linear import Quantiser
from lockstep.numerics.spec import parse
from tests.numerics import reference

BLOCK_OF_THE_TABLE = [1, -0.3, 0.74, 0.76, 0.125, 0.374, 0.376, -2.5, 3.49, 3.51, 5, 7.9] + [0] * 20


# --- the table of figures -------------------------------------------------------------------------------------------
def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5])
    assert round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert round_e2m1(-ties).tolist() == [0, -1, -1, -2, -2, -4, -4, -6]


def test_a_block_written_out():
    block = torch.tensor(BLOCK_OF_THE_TABLE)
    expected = [1, -0.5, 0.5, 1, 0, 0.5, 0.5, -2, 3, 4, 4, 6] + [0] * 20
    assert fake_quantise(block, "mxfp4").tolist() == expected
    assert block_exponents(block.abs().amax(), "floor").item() == 0


@dataclass(frozen=True, slots=True)
class Errors:
    relative: float
    """‖e‖ / ‖x‖"""
    decibels: float
    """SQNR"""
    elementwise: float
    """mean |e| / |x|"""
    zeros: float

    @staticmethod
    def of(x: Tensor, result: Tensor) -> Errors:
        error = x - result
        relative = float(error.norm() / x.norm())
        return Errors(
            relative,
            -20 * math.log10(relative),
            float((error.abs() / x.abs()).mean()),
            float((result == 0).float().mean()),
        )


def gaussian() -> Tensor:
    return torch.randn(1536, 1536, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize(
    ("kind", "scale", "decibels", "zeros"),
    [
        ("mxfp4", "floor", 18.9, 0.081),
        ("mxfp4", "rceil", 18.5, 0.11),
        ("mxfp4", "ceil", 17.3, 0.16),
        ("nvfp4", "floor", 20.4, 0.068),
    ],
)
def test_gaussian_weights(kind: str, scale: str, decibels: float, zeros: float):
    errors = Errors.of(gaussian(), fake_quantise(gaussian(), kind, scale=scale))
    assert errors.decibels == pytest.approx(decibels, abs=0.06)
    assert errors.zeros == pytest.approx(zeros, abs=0.005)
    if (kind, scale) == ("mxfp4", "floor"):
        assert errors.relative == pytest.approx(0.114, abs=5e-4)
        assert errors.elementwise == pytest.approx(0.20, abs=5e-3)
    if kind == "nvfp4":
        assert errors.elementwise == pytest.approx(0.18, abs=5e-3)


def test_activations_with_heavy_tails():
    x = torch.from_numpy(np.random.default_rng(0).standard_t(3, (1536, 1536)).astype(np.float32))
    errors = Errors.of(x, fake_quantise(x, "mxfp4"))
    assert errors.decibels == pytest.approx(17.0, abs=0.1)
    assert errors.zeros == pytest.approx(0.17, abs=0.005)


# --- against other implementations ----------------------------------------------------------------------------------
def awkward(rows: int, width: int, seed: int) -> Tensor:
    """Numbers of many magnitudes, exact ties and powers of two among them, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (rows, 1), generator=generator)
    )
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 4.0, 6.0, 7.99])
    x[0, : len(ties)] = ties
    x[1, :32] = 0
    x[2, 0] = 2.0**-149
    x[3, 0] = torch.finfo(torch.bfloat16).max
    return x


@pytest.mark.parametrize("scale", ["floor", "rceil", "ceil"])
@pytest.mark.parametrize("width", [32, 70, 5])
def test_mxfp4_is_the_standards(scale: str, width: int):
    x = awkward(12, max(width, 40), 0)[:, :width]
    if scale != "floor":
        x = x.clamp(-(2.0**126), 2.0**126)  # of more, the standard's result is no fp32 number
    expected = [reference.mxfp4(row, scale) for row in x.double().tolist()]
    assert fake_quantise(x, "mxfp4", scale=scale).double().tolist() == expected


@pytest.mark.parametrize(("per_row", "width"), [(False, 48), (True, 48), (True, 21)])
def test_nvfp4_is_the_standards(per_row: bool, width: int):
    x = torch.randn(6, width) * torch.tensor([[1.0], [30.0], [1e-3], [0.2], [5.0], [0.0]])
    x[3, :16] *= 1e-6
    tops = x.abs().amax(-1) if per_row else x.abs().amax().expand(6)
    expected = [
        reference.nvfp4(row, top, lambda number: float(np.float32(number)))
        for row, top in zip(x.double().tolist(), tops.double().tolist(), strict=True)
    ]
    assert fake_quantise(x, "nvfp4", per_row=per_row).double().tolist() == expected


def test_e4m3_rounds_as_torch_casts():
    y = torch.cat([torch.rand(100_000) * 460, torch.rand(100_000) * 0.02, torch.arange(0, 449, 0.125)]).clamp(max=448)
    assert torch.equal(round_e4m3(y), y.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scale", ["floor", "rceil", "ceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_torchaos(scale: str, dtype: torch.dtype):
    """Bit for bit, for blocks whose scale is a normal number (torchao puts 2^-126 for 2^-127)."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x = torch.randn(64, 256) * torch.exp2(torch.randint(-100, 100, (64, 1)).float())
    x[0, :11] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 4.0, 6.0, 7.99])
    x = x.to(dtype)
    mode = ScaleCalculationMode(scale)
    theirs = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=mode).dequantize(dtype)
    assert torch.equal(fake_quantise(x, "mxfp4", scale=scale).view(torch.uint8), theirs.contiguous().view(torch.uint8))


# --- laws -----------------------------------------------------------------------------------------------------------
tensors = st.builds(
    lambda seed, rows, width, dtype: awkward(max(rows, 4), max(width, 40), seed)[:rows, :width].to(dtype),
    st.integers(0, 10_000),
    st.integers(1, 6),
    st.integers(1, 100),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
scales = st.sampled_from(["floor", "rceil", "ceil"])
kinds = st.sampled_from(["mxfp4", "nvfp4"])


@given(tensors, scales)
def test_mxfp4_twice_is_once(x: Tensor, scale: str):
    once = fake_quantise(x, "mxfp4", scale=scale)
    assert torch.equal(fake_quantise(once, "mxfp4", scale=scale), once)


@given(tensors, scales, kinds)
def test_rows_do_not_know_each_other(x: Tensor, scale: str, kind: str):
    order = torch.randperm(len(x))
    result = fake_quantise(x, kind, scale=scale, per_row=True)
    assert torch.equal(fake_quantise(x[order], kind, scale=scale, per_row=True), result[order])
    assert torch.equal(fake_quantise(x[:1], kind, scale=scale, per_row=True), result[:1])
    whole = fake_quantise(x, kind, scale=scale)
    assert torch.equal(fake_quantise(x[order], kind, scale=scale), whole[order])


@given(tensors, scales, kinds)
def test_the_sign_is_only_a_sign(x: Tensor, scale: str, kind: str):
    assert torch.equal(fake_quantise(-x, kind, scale=scale), -fake_quantise(x, kind, scale=scale))


@given(st.integers(0, 10_000), scales, kinds, st.integers(-30, 30))
def test_powers_of_two_pass_through(seed: int, scale: str, kind: str, power: int):
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(seed))
    result = fake_quantise(x, kind, scale=scale)
    assert torch.equal(fake_quantise(x * 2.0**power, kind, scale=scale), result * 2.0**power)


@given(tensors, kinds)
def test_shape_and_dtype_stay_and_nothing_is_written(x: Tensor, kind: str):
    before = x.clone()
    result = fake_quantise(x, kind)
    assert (result.shape, result.dtype, torch.equal(x, before)) == (x.shape, x.dtype, True)
    assert fake_quantise(x.reshape(-1), kind).shape == (x.numel(),)
    assert fake_quantise(x[None], kind)[0].equal(result)


def test_a_scale_is_exact_beside_every_power_of_two():
    """A float log2 of the number below a power of two is that power's, and the block would be one off."""
    exponents = torch.arange(-120, 128)
    exact = power_of_two(exponents, torch.float32)
    below = torch.nextafter(exact, torch.zeros(()))
    above = torch.nextafter(exact, torch.full((), torch.inf))
    assert block_exponents(exact, "floor").tolist() == (exponents - 2).tolist()
    assert block_exponents(below, "floor").tolist() == (exponents - 3).tolist()
    assert block_exponents(above, "ceil").tolist() == (exponents - 1).tolist()
    assert block_exponents(exact * 0.75, "rceil").tolist() == (exponents - 3).tolist()
    assert block_exponents(torch.nextafter(exact * 0.75, exact), "rceil").tolist() == (exponents - 2).tolist()
    assert exact.double().log2().tolist() == exponents.tolist()


def test_subnormal_and_huge_blocks():
    tiny = torch.full((32,), 2.0**-128)
    assert fake_quantise(tiny, "mxfp4").tolist() == tiny.tolist()  # half of the smallest scale, 2^-127
    assert fake_quantise(tiny / 4, "mxfp4").tolist() == [0.0] * 32
    huge = torch.full((32,), torch.finfo(torch.float32).max)
    assert fake_quantise(huge, "mxfp4").tolist() == [1.5 * 2.0**127] * 32
    for scale, dtype in itertools.product(("rceil", "ceil"), (torch.float32, torch.bfloat16, torch.float16)):
        largest = torch.full((32,), torch.finfo(dtype).max, dtype=dtype)
        assert fake_quantise(largest, "mxfp4", scale=scale).isfinite().all()
    assert fake_quantise(torch.full((32,), 1e300, dtype=torch.float64), "mxfp4")[0] == 6 * 2.0**127


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_went_wrong_stays_wrong(kind: str, wrong: float):
    """All that shares its scale becomes NaN; other blocks (MXFP4) and other rows with a scale of their own do not."""
    x = torch.randn(2, 64)
    x[0, 40] = wrong
    result = fake_quantise(x, kind, per_row=True)
    assert result[0, 32:].isnan().all()
    assert result[1].isfinite().all()
    assert result[0, :32].isfinite().all() == (kind == "mxfp4")
    assert fake_quantise(x, kind)[1].isfinite().all() == (kind == "mxfp4")


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_zeros_and_emptiness(kind: str):
    assert fake_quantise(torch.zeros(3, 40), kind).equal(torch.zeros(3, 40))
    assert fake_quantise(torch.zeros(0, 40), kind).shape == (0, 40)
    assert fake_quantise(torch.zeros(3, 0), kind).shape == (3, 0)


def test_blocks_end_with_the_row():
    """In flattened rows the second row's numbers would share a block with the first's large ones."""
    x = torch.ones(2, 33)
    x[0] = 1000.0
    assert fake_quantise(x, "mxfp4")[1].tolist() == [1.0] * 33


# --- numerics -------------------------------------------------------------------------------------------------------
def test_numerics_name_what_they_quantise():
    assert [parse("mxfp4-w4a4").weights, parse("mxfp4-w4a4").activations] == ["mxfp4", "mxfp4"]
    assert [parse("nvfp4-w4a16").weights, parse("nvfp4-w4a16").activations] == ["nvfp4", None]
    assert all(parse(name).plain for name in ("", "bf16", "fp32"))
    with pytest.raises(ValueError, match="mxfp8"):
        parse("mxfp8-w8a8")


def test_weights_and_activations_of_a_numeric():
    x = torch.randn(4, 64)
    assert Quantiser("").weight(x) is x
    assert Quantiser("mxfp4-w4a16").activation(x) is x
    assert Quantiser("mxfp4-w4a16").weight(x).equal(fake_quantise(x, "mxfp4"))
    assert Quantiser("nvfp4-w4a4").activation(x).equal(fake_quantise(x, "nvfp4", per_row=True))
    assert not Quantiser("nvfp4-w4a4").activation(x).equal(Quantiser("nvfp4-w4a4").weight(x))
    out = torch.empty_like(x)
    assert Quantiser("mxfp4-w4a4").weight(x, out) is out
    assert out.equal(fake_quantise(x, "mxfp4"))
