"""Every Triton kernel compiles for an H200, in the shapes of a 1.5B model; this needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from lockstep.learner import merge_kernel, sum_kernel  # noqa: E402
from lockstep.models import (  # noqa: E402
    activation_kernels,
    expert_kernels,
    head_kernels,
    layer_kernels,
    low_rank_kernel,
    mxfp4_kernels,
    norm_kernels,
    ordered_attention,
    ordered_gradients,
    ordered_product_kernel,
    route_kernels,
)
from lockstep.rollout.paged import attention_kernels, ordered_kernels  # noqa: E402

WIDE = (
    "lse",
    "delta",
    "rms",
    "sums",
    "entropy",
    "logprobs",
    "grad_logprobs",
    "grad_entropy",
    "peak",
    "mass",
    "share",
    "scalings",
)
WHOLE = {
    "targets": "*i64",
    "ids": "*i64",
    "index": "*i64",
    "best": "*i32",
    "arrived": "*i32",
    "tiles": "*i32",
    "tasks": "*i32",
    "shared": "*i32",
}
WHOLE |= dict.fromkeys(("order", "place", "expert", "bounds", "table", "position"), "*i32")
WHOLE |= {"offset_ptr": "*i64", "layers_ptr": "*i64", "first_step": "i64", "word": "*i32", "power": "*i16"}
FACTORS = ("limit", "softcap", "scale", "scaling", "temperature", "epsilon", "eps", "offset", "factor", "alpha")
TILE = {"EXPERTS": 128, "EVEN": True, "WHOLE": True, "BOXED": False, "ROWS": 128, "HALF": 64, "SIDE": False}
TILE |= {"COLUMNS": 64, "DEPTH": 64, "RANK": 0, "PRECISION": "ieee"}
SIDE = TILE | {"WHOLE": False, "ROWS": 64, "HALF": 32, "SIDE": True}
ROWS = {"TOP": 0, "SCALED": False}
ADAPTED = {"RANK": 16}
MERGED = {"FIELDS": 11, "EVEN": True, "DITHERED": False, "RANK": 32, "ROWS": 64, "COLUMNS": 128}
FOUR_BITS = {"EXPERTS": 32, "STEPS": 45, "ROWS": 128, "COLUMNS": 64, "DEPTH": 64, "RANK": 0, "PRECISION": "ieee"}
PAIRS = {"HALF": 32, "INTERLEAVED": False}
PAGES = {"ROWS": 16, "P": 64, "ONES": 16, "BLOCKS": 16}
TILES = {"QUERIES": 128, "KEYS": 64, "ONES": 16, "FIELDS": 8, "BLOCKS": 16}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "route": (
        route_kernels._route_kernel,
        {"TOP": 8, "SHARED": True, "SUMS": False, "BIAS": False, "EXPERTS": 128, "TOPS": 8},
    ),
    "route, sums": (
        route_kernels._route_kernel,
        {"TOP": 4, "SHARED": True, "SUMS": True, "BIAS": True, "EXPERTS": 32, "TOPS": 4},
    ),
    "sum over experts, and norm": (
        activation_kernels._combine_norm_kernel,
        {"TOP": 4, "BIAS": True, "FACTOR": True, "LATE": True, "BLOCK": 4096},
    ),
    "sort": (route_kernels._sort_kernel, {"BLOCK": 4096}),
    "gate and up": (expert_kernels._gate_up_kernel, {"TOP": 8, "PAIRED": False, "BIAS": False, **TILE}),
    "gate and up, paired": (expert_kernels._gate_up_kernel, {"TOP": 4, "PAIRED": True, "BIAS": True, **TILE}),
    "gate and up, adapted": (
        expert_kernels._gate_up_kernel,
        {"TOP": 8, "PAIRED": False, "BIAS": False, **SIDE, "BOXED": True, **ADAPTED},
    ),
    "gate and up, paired and adapted": (
        expert_kernels._gate_up_kernel,
        {"TOP": 4, "PAIRED": True, "BIAS": True, **TILE, **ADAPTED},
    ),
    "experts' product": (expert_kernels._product_kernel, TILE | ROWS),
    "experts' product, adapted": (expert_kernels._product_kernel, SIDE | ROWS | ADAPTED),
    "adapter's first product": (
        expert_kernels._product_kernel,
        TILE | {"TOP": 8, "SCALED": True, "COLUMNS": 16, "DEPTH": 128},
    ),
    "gate and up, left": (expert_kernels._gate_up_kernel, {"TOP": 8, "PAIRED": True, "BIAS": True, **SIDE}),
    "gate and up, boxed": (
        expert_kernels._gate_up_kernel,
        {"TOP": 8, "PAIRED": False, "BIAS": False, **SIDE, "BOXED": True},
    ),
    "experts' product, left": (expert_kernels._product_kernel, SIDE | ROWS),
    "experts' product, boxed": (expert_kernels._product_kernel, SIDE | ROWS | {"BOXED": True}),
    "experts' outer product": (expert_kernels._outer_kernel, {"SIZE": 64, "ROWS": 32, "PRECISION": "ieee"}),
    "gate and up, in four bits": (mxfp4_kernels._gate_up_kernel, {"TOP": 4, "HALVES": False, **FOUR_BITS}),
    "experts' product, in four bits": (mxfp4_kernels._product_kernel, {"HALVES": False, **FOUR_BITS}),
    "gate and up, in packed bf16": (mxfp4_kernels._gate_up_kernel, {"TOP": 4, "HALVES": True, **FOUR_BITS}),
    "experts' product, in packed bf16": (mxfp4_kernels._product_kernel, {"HALVES": True, **FOUR_BITS}),
    "gate and up, in four bits, adapted": (
        mxfp4_kernels._gate_up_kernel,
        {"TOP": 4, "HALVES": True, **FOUR_BITS, **ADAPTED},
    ),
    "experts' product, in four bits, adapted": (
        mxfp4_kernels._product_kernel,
        {"HALVES": True, **FOUR_BITS, **ADAPTED},
    ),
    "experts, dequantised": (mxfp4_kernels._open_kernel, {"STEPS": 45, "OUTPUTS": 64, "DEPTH": 64}),
    "activate": (activation_kernels._activate_kernel, {"PAIRED": False, "BIAS": False, "BLOCK": 1024}),
    "activate, back": (activation_kernels._activate_back_kernel, {"PAIRED": True, "BIAS": True, "BLOCK": 4096}),
    "combine": (activation_kernels._combine_kernel, {"TOP": 8, "BIAS": True, "FACTOR": True, "BLOCK": 1024}),
    "sum of gradients": (sum_kernel._sum_kernel, {"COUNT": 2, "BEGUN": True, "BLOCK": 4096}),
    "summarise": (head_kernels._summarise_kernel, {"VOCABULARY": 151936, "CAPPED": False, "BLOCK": 8192}),
    "summarise, capped": (head_kernels._summarise_kernel, {"VOCABULARY": 50257, "CAPPED": True, "BLOCK": 8192}),
    "differentiate": (head_kernels._differentiate_kernel, {"VOCABULARY": 151936, "CAPPED": True, "BLOCK": 8192}),
    "norm": (norm_kernels._norm_kernel, {"SIZE": 1536, "LATE": False, "ROWS": 2, "BLOCK": 2048}),
    "head norm": (norm_kernels._norm_kernel, {"SIZE": 128, "LATE": True, "ROWS": 32, "BLOCK": 128}),
    "norm, back": (
        norm_kernels._norm_grad_kernel,
        {"SIZE": 1536, "EACH": 16, "LATE": False, "WEIGHT": True, "ROWS": 2, "BLOCK": 2048},
    ),
    "norm, back, frozen": (
        norm_kernels._norm_grad_kernel,
        {"SIZE": 1536, "EACH": 16, "LATE": True, "WEIGHT": False, "ROWS": 2, "BLOCK": 2048},
    ),
    "row norm": (
        norm_kernels._row_norm_kernel,
        {"ADD": True, "HALVES": False, "INNER": True, "KEEP": True, "LATE": True, "SIZE": 1536, "BLOCK": 2048},
    ),
    "row norm of halves": (
        norm_kernels._row_norm_kernel,
        {"ADD": True, "HALVES": True, "INNER": False, "KEEP": False, "LATE": False, "SIZE": 1536, "BLOCK": 2048},
    ),
    "parts of the vocabulary": (head_kernels._chunk_kernel, {"BLOCK": 4096}),
    "pick": (head_kernels._pick_kernel, {"BLOCK": 64}),
    "attention in order": (
        ordered_attention.stream_kernel,
        {"H": 12, "K": 2, "D": 128, "WINDOWED": False, "SUNK": False, "PARTED": False} | TILES,
    ),
    "attention in order, in parts, windowed, with sinks": (
        ordered_attention.stream_kernel,
        {"H": 64, "K": 8, "D": 64, "WINDOWED": True, "SUNK": True, "PARTED": True} | TILES,
    ),
    "attention of a decode step in order": (
        ordered_kernels.ordered_attend_kernel,
        {"H": 64, "K": 8, "D": 64, "PARTED": True, "SHARED": False, "WINDOWED": True, "SUNK": True} | PAGES | PAIRS,
    ),
    "attention of a decode step in order, by several programs": (
        ordered_kernels.ordered_attend_kernel,
        {"H": 12, "K": 2, "D": 128, "PARTED": True, "SHARED": True, "WINDOWED": False, "SUNK": False} | PAGES | PAIRS,
    ),
    "attention of one token": (
        attention_kernels.attend_kernel,
        {
            "H": 32,
            "K": 4,
            "D": 128,
            "BLOCK_D": 128,
            "ROWS": 8,
            "P": 64,
            "BLOCK": 32,
            "SPLITS": 2,
            "WINDOWED": True,
            "CAPPED": True,
            "SINKS": True,
            "NORM": True,
            "LATE": False,
            "PRECISION": "ieee",
        }
        | PAIRS,
    ),
    "product in order": (
        ordered_product_kernel._product_kernel,
        {
            "BIAS": True,
            "EVEN": False,
            "ROWS": 64,
            "COLUMNS": 16,
            "DEPTH": 128,
            "GROUP": 8,
            "PARTS": False,
            "PART": 1024,
        },
    ),
    "halves of a product": (
        ordered_product_kernel._product_kernel,
        {
            "BIAS": False,
            "EVEN": False,
            "ROWS": 32,
            "COLUMNS": 16,
            "DEPTH": 256,
            "GROUP": 8,
            "PARTS": True,
            "PART": 768,
        },
    ),
    "attention's gradients of queries": (
        ordered_gradients._queries_kernel,
        {"H": 12, "K": 2, "D": 128, "QUERIES": 128, "KEYS": 64, "FIELDS": 8},
    ),
    "attention's gradients of keys": (
        ordered_gradients._keys_kernel,
        {"H": 12, "K": 2, "D": 128, "ROWS": 64, "KEYS": 64, "TASK": 5},
    ),
    "attention's gradients, added": (ordered_gradients._add_kernel, {"K": 2, "D": 128, "KEYS": 64}),
    "gate": (layer_kernels._gate_kernel, {"TANH": False, "BLOCK": 2048}),
    "gate, back": (layer_kernels._gate_grad_kernel, {"TANH": True, "BLOCK": 2048}),
    "rotary": (
        layer_kernels._rotary_kernel,
        {
            "HEADS": 12,
            "KEY_HEADS": 2,
            "HALF": 64,
            "BLOCK": 16,
            "KEY_BLOCK": 2,
            "HALF_BLOCK": 64,
            "ANGLES": 128,
            "BACKWARD": False,
        },
    ),
    "rotary, back": (
        layer_kernels._rotary_kernel,
        {
            "HEADS": 12,
            "KEY_HEADS": 2,
            "HALF": 64,
            "BLOCK": 16,
            "KEY_BLOCK": 2,
            "HALF_BLOCK": 64,
            "ANGLES": 64,
            "BACKWARD": True,
        },
    ),
    "merge": (merge_kernel._merge, {"HEADS": 16, "SIZE": 128}),
    "merged weights": (low_rank_kernel._merge_kernel, MERGED),
}


def signature(name: str, dtype: str) -> str:
    """Of an argument: pointers to half precision unless they are to sums, fp32 factors, whole numbers."""
    stem = name.removesuffix("_ptr")
    if stem in WIDE or stem == "more_lse":
        return "*fp32"
    if name in WHOLE or stem in WHOLE:
        return WHOLE.get(name, WHOLE.get(stem, ""))
    if name.endswith("_ptr") or stem in ("output", "more", "weight"):
        return f"*{dtype}"
    return "fp32" if stem in FACTORS else "i32"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    kernel, constants = KERNELS[name]
    assert compiled(kernel, constants, dtype).asm["cubin"]


@pytest.mark.parametrize("even", [False, True])
def test_merged_weights_are_rounded_to_bf16_by_a_dither(even: bool) -> None:
    assert compiled(low_rank_kernel._merge_kernel, MERGED | {"EVEN": even, "DITHERED": True}, "bf16").asm["cubin"]


@pytest.mark.parametrize("rows", [32, 128])
@pytest.mark.parametrize("name", [n for n in KERNELS if "packed bf16" in n])
def test_four_bit_weights_go_to_tensor_cores_in_order_and_from_registers(
    name: str, rows: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Each instruction multiplies the inputs that it does for dense weights, and ends before a register of its weights changes:
    the compiler uses them again for the next step. No weight goes by shared memory after it is dequantised.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    kernel, constants = KERNELS[name]
    columns = 64 if "gate" in name else 128
    built = compiled(kernel, constants | {"ROWS": rows, "COLUMNS": columns}, "bf16", warps=4, aligned=True).asm
    products = [line for line in built["ttgir"].splitlines() if "warp_group_dot " in line]
    assert len(products) == 2  # of a whole block, and of one with at most half the rows
    assert all("opIdx = 0" in line and "kWidth = 2" in line for line in products)
    assert set(re.findall(r"wgmma.wait_group.sync.aligned (\d+)", built["ptx"])) == {"0"}
    loops = built["ttgir"].split("scf.for")[1:]
    assert len(loops) == 2
    assert all("convert_layout" not in loop.split("scf.yield")[0] for loop in loops)


def compiled(kernel: Any, constants: dict[str, Any], dtype: str, warps: int = 8, *, aligned: bool = False) -> Any:
    """`aligned`: pointers and whole numbers are multiples of 16, as those of a model are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "POLICY" in kernel.arg_names:
        constants = {**constants, "POLICY": "evict_last"}
    arguments = {a: "constexpr" if a in constants else signature(a, dtype) for a in kernel.arg_names}
    if constants.get("BOXED"):
        arguments["weight"] = f"tensordesc<{dtype}[1, {constants['COLUMNS']}, {constants['DEPTH']}]>"
    places = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    whole = [i for i, a in enumerate(kernel.arg_names) if aligned and arguments[a] not in ("constexpr", "fp32")]
    divisible = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=kernel, signature=arguments, constexprs=places, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
