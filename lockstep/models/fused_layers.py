"""Runs norms, gated activations and rotary embeddings of a loaded model with the kernels of layer_kernels and norm_kernels.

Layers are recognised by their code, not by their name: a module is replaced if its class has the code of a known layer.
Families that share the code of Llama's layers are served without being listed, and a family whose code differs by a cast or an
offset never gets the wrong kernel. Only module instances are changed, no class of transformers or PEFT; the engine, which runs
the same modules, gets the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lockstep.models.known import reference, same
from lockstep.models.one_input import ATTENTION, GATED, AttentionInputs, OneInput

_MARK = "lockstep_fused_layers"
_ROTARY = (("llama", "rotate_half"), ("gpt_oss", "_apply_rotary_emb"))
"""Families whose rotary embedding the kernel computes, and the function that their `apply_rotary_pos_emb` calls."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Layers that were replaced in a model."""

    norms: int = 0
    gates: int = 0
    rotary: int = 0
    """Attention modules whose rotary embedding is fused."""
    experts: int = 0
    """Layers whose experts run in groups."""
    reason: str = ""
    """Reason if nothing was replaced."""

    @property
    def line(self) -> str:
        """Summary for the log."""
        if self.reason:
            return f"fused layers: none, {self.reason}"
        counts = (
            f"{self.norms} norms, {self.gates} gated activations, rotary embeddings of {self.rotary} attention layers"
        )
        return f"fused layers: {counts}" + (f", experts of {self.experts} layers" if self.experts else "")


def fuse_layers(model: nn.Module) -> FusedLayers:
    """Replace what can be, in place. Meant for a model on a GPU; a second call changes nothing and says the same."""
    done: FusedLayers | None = getattr(model, _MARK, None)
    if done is not None:
        return done
    kernels = _kernels()
    if kernels is None:
        result = FusedLayers(reason="Triton is not installed")
    else:
        modules = list(model.modules())
        parts = (_norm, _gate, _rotary, _experts)
        norms, gates, rotary, experts = (sum([replace(m, kernels) for m in modules]) for replace in parts)
        result = FusedLayers(norms, gates, rotary, experts)
        if result == FusedLayers():
            result = FusedLayers(reason=f"no layer of {type(model).__name__} is of a known kind")
    setattr(model, _MARK, result)
    return result


def gated_forward(module: Any, x: Tensor) -> Tensor:
    """Run a gated MLP whose activation is the function given to `set_gate`."""
    result: Tensor = module.down_proj(module.lockstep_gate(*module.lockstep_inputs(x)))
    return result


def set_gate(module: nn.Module, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Have a gated MLP compute down(gate(gate_proj(x), up_proj(x)))."""
    replaced: Any = module
    replaced.lockstep_gate = gate
    replaced.lockstep_inputs = OneInput(module, GATED)
    replaced.forward = MethodType(gated_forward, module)


def is_fused(module: nn.Module) -> bool:
    """Return whether the module is a norm or gated MLP with a fused kernel, which keeps only its inputs for the backward pass."""
    return getattr(module, "lockstep_fused", False)


def is_gated(module: nn.Module) -> bool:
    """Return whether the module computes down(act(gate_proj(x)) * up_proj(x))."""
    return same(type(module).forward, reference("llama", "LlamaMLP").forward)


# --- replacing ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Kernels:
    RmsNorm: Any
    SiluGate: Any
    GeluGate: Any
    Rotary: Any
    fuse_experts: Callable[[nn.Module], bool]


@cache
def _kernels() -> _Kernels | None:
    try:
        from lockstep.models.experts import fuse_experts
        from lockstep.models.layer_kernels import GeluGate, Rotary, SiluGate
        from lockstep.models.norm_kernels import RmsNorm
    except ImportError:
        return None
    return _Kernels(RmsNorm, SiluGate, GeluGate, Rotary, fuse_experts)


@dataclass(frozen=True, slots=True)
class NormKind:
    """A known RMS norm."""

    family: str
    layer: str
    epsilon: str
    """Its attribute."""
    offset: float
    """Added to the weight."""
    late: bool
    """It rounds once, after the weight; else before it, too."""


_NORMS = (
    NormKind("llama", "LlamaRMSNorm", "variance_epsilon", 0.0, False),
    NormKind("gemma", "GemmaRMSNorm", "eps", 1.0, True),
    NormKind("gpt_oss", "GptOssRMSNorm", "variance_epsilon", 0.0, True),
)


def norm_kind(module: nn.Module) -> NormKind | None:
    """Return the known norm whose code a module's class has."""
    for kind in _NORMS:
        layer = reference(kind.family, kind.layer)
        inner = getattr(type(module), "_norm", None)  # Gemma's does half of it
        if same(type(module).forward, layer.forward) and same(inner, getattr(layer, "_norm", None)):
            return kind
    return None


def _norm(module: nn.Module, kernels: Any) -> bool:
    kind = norm_kind(module)
    if kind is None:
        return False
    replaced: Any = module
    replaced.forward = _FusedNorm(kernels.RmsNorm, module, kind)
    replaced.lockstep_fused = True
    return True


class _FusedNorm:
    """Stands in for a norm's forward. A class, so that a copy of the model copies it along."""

    def __init__(self, function: Any, module: nn.Module, kind: NormKind) -> None:
        self._function, self._module, self._kind = function, module, kind

    def __call__(self, x: Tensor) -> Tensor:
        kind, module = self._kind, self._module
        epsilon = getattr(module, kind.epsilon)
        result: Tensor = self._function.apply(x, module.weight, epsilon, kind.offset, kind.late)
        return result


def _gate(module: Any, kernels: Any) -> bool:
    if not is_gated(module):
        return False
    match type(module.act_fn).__name__:
        case "SiLU" | "SiLUActivation":
            set_gate(module, kernels.SiluGate.apply)
        case "GELUTanh" | "PytorchGELUTanh":
            set_gate(module, kernels.GeluGate.apply)
        case _:
            return False
    module.lockstep_fused = True
    return True


def _experts(module: nn.Module, kernels: Any) -> bool:
    fused: bool = kernels.fuse_experts(module)
    return fused


def _rotary(module: nn.Module, kernels: Any) -> bool:
    """Give an attention module its class's own forward with another function of the name apply_rotary_pos_emb."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    theirs = forward.__globals__
    outer = "apply_rotary_pos_emb"
    if outer not in forward.__code__.co_names or not any(
        all(same(theirs.get(name), reference(family, name)) for name in (outer, inner)) for family, inner in _ROTARY
    ):
        return False

    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1:
            plain: tuple[Tensor, Tensor] = theirs["apply_rotary_pos_emb"](q, k, cos, sin, unsqueeze_dim)
            return plain
        rotated: tuple[Tensor, Tensor] = kernels.Rotary.apply(q, k, cos, sin)
        return rotated

    names = {**theirs, "apply_rotary_pos_emb": fused}
    clone = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    clone.__kwdefaults__ = forward.__kwdefaults__
    replaced: Any = module
    joins = all(name in forward.__code__.co_names and module._modules.get(name) is not None for name in ATTENTION)
    replaced.forward = MethodType(clone, AttentionInputs(module) if joins else module)
    return True
