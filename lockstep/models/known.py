"""Recognises a layer by its code, which is compared with that of a known layer of transformers."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import CodeType
from typing import Any, Literal

from torch import nn

from lockstep.models.mxfp4_experts import Mxfp4Experts


@cache
def reference(family: str, layer: str) -> Any:
    """Return a layer's class, or a function of its file. Example: reference("llama", "LlamaMLP")."""
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), layer)


def same(one: Any, other: Any) -> bool:
    """Return whether two functions are equal up to names of locals and texts."""
    codes = getattr(one, "__code__", None), getattr(other, "__code__", None)
    return one is other or (all(codes) and _meaning(codes[0]) == _meaning(codes[1]))


def has_experts(model: nn.Module) -> bool:
    """Return whether a model is a mixture of experts, of whatever form."""
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def kind_of_experts(module: Any) -> Literal["gated", "paired", "packed"] | None:
    """Return which known form the experts of a mixture have: that of Qwen3-MoE and most others, or gpt-oss's, dense or kept in
    MXFP4. None for another one, such as gates that are clamped (DeepSeek V4).
    """
    if isinstance(module, Mxfp4Experts):
        return "packed"
    if not all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj")):
        return None
    forward = _own_forward(type(module))
    if forward is None:
        return None
    oss = reference("gpt_oss", "GptOssExperts")
    if same(forward, _own_forward(oss)):
        return "paired" if same(type(module)._apply_gate, oss._apply_gate) else None
    plain = same(forward, _own_forward(reference("qwen3_moe", "Qwen3MoeExperts")))
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return "gated" if plain and silu else None


def only_sums_experts(mixture: Any) -> bool:
    """Return whether a mixture's result is the weighted sum over its experts, with nothing beside it such as a shared expert."""
    forward = _own_forward(type(mixture))
    layers = ("qwen3_moe", "Qwen3MoeSparseMoeBlock"), ("mixtral", "MixtralSparseMoeBlock"), ("gpt_oss", "GptOssMLP")
    return forward is not None and any(same(forward, _own_forward(reference(*layer))) for layer in layers)


def _own_forward(layer: type) -> Any:
    """Return the forward that a class's own file defines, without decorators; None if none is found behind them."""
    owner = next(base for base in layer.__mro__ if "forward" in vars(base))
    forward = inspect.unwrap(vars(owner)["forward"])
    return forward if getattr(forward, "__globals__", {}).get("__name__") == owner.__module__ else None


def _meaning(code: CodeType | None) -> tuple[object, ...]:
    assert code is not None
    return code.co_code, code.co_names, tuple(c for c in code.co_consts if not isinstance(c, str))
