"""Fake quantisation of vLLM's linear layers: makes and updates their quantised operands. Does not import vLLM.

vLLM's weight is the weight that was sent: it is fingerprinted, and it may be the learner's own. A second tensor of the same
size holds the operand of the layer: DQ(Q(W)), or W itself while the engine computes in the precision of the weights. Captured
CUDA graphs hold its address, so its content changes and the tensor does not; a flag on the device, which the graphs read, turns
quantisation of the inputs on. Fused matrices (q, k and v; gate and up) are quantised one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import EngineError
from lockstep.numerics.apply import ROUTERS
from lockstep.numerics.linear import Quantiser
from lockstep.numerics.spec import Scale, parse
from lockstep.rollout.vllm.layout import USUAL

WEIGHT = "lockstep_weight"
"""Attribute of a layer that holds its operand."""
NATIVE = "set rollout.engine=native"


@dataclass(frozen=True, slots=True)
class Plan:
    """Numerics that an engine may be set to. Example: Plan(("mxfp4-w4a4",))"""

    numerics: tuple[str, ...]
    scale: Scale = "floor"
    exclude: tuple[str, ...] = ()

    @property
    def inputs(self) -> Quantiser | None:
        """Quantiser of the inputs, when they are quantised. Raises EngineError for two formats: a captured step has one."""
        kinds = sorted({parse(numeric).activations or "" for numeric in self.numerics} - {""})
        if len(kinds) > 1:
            raise EngineError(
                f"vLLM has one format for inputs, but the phases quantise them to {' and '.join(kinds)}",
                where="numerics",
                fix=f"set the same format for all phases, or {NATIVE}",
            )
        return Quantiser(f"{kinds[0]}-w4a4", self.scale) if kinds else None


@dataclass(slots=True)
class Switch:
    """Switch for quantised inputs; one per model, on its device."""

    on: Tensor | None = None
    numeric: str = ""
    """Numeric in which the layers compute now."""

    def ready(self, device: torch.device) -> None:
        if self.on is None:
            self.on = torch.zeros((), dtype=torch.bool, device=device)


@dataclass(eq=False, slots=True)
class FakeQuantised:
    """Arithmetic of a linear layer, to be mixed into vLLM's linear methods. The layers of a model share one switch."""

    plan: Plan
    switch: Switch = field(default_factory=Switch)
    parts: int = 1
    """Number of the checkpoint's matrices in the layer."""

    def attach(self, layer: Any) -> None:
        """Give a layer that has its weight its operand tensor."""
        self.switch.ready(layer.weight.device)
        setattr(layer, WEIGHT, torch.zeros_like(layer.weight.data))

    def product(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b on the present operands."""
        inputs = self.plan.inputs
        if inputs is not None and self.switch.on is not None:
            x = torch.where(self.switch.on, inputs.activation(x), x)
        return nn.functional.linear(x, getattr(layer, WEIGHT), bias)

    def refresh(self, layer: Any, numeric: str) -> None:
        """Update the layer's operand from its present weight."""
        weight, used = layer.weight.data, getattr(layer, WEIGHT)
        if not numeric:
            used.copy_(weight)
            return
        quantiser, sizes = Quantiser(numeric, self.plan.scale), self._sizes(layer)
        for part, out in zip(weight.split(sizes), used.split(sizes), strict=True):
            quantiser.weight(part, out=out)

    def _sizes(self, layer: Any) -> list[int]:
        """Return the rows of each of the checkpoint's matrices in a layer."""
        rows = int(layer.weight.shape[0])
        sizes = list(getattr(layer, "output_sizes", [])) if self.parts > 1 else [rows]
        if len(sizes) != self.parts or sum(sizes) != rows:
            raise EngineError(
                f"a layer of {rows} rows should hold {self.parts} matrices, but vLLM says that they have {sizes} rows",
                where="vLLM",
                fix=NATIVE,
            )
        return sizes


def checkpoint_names(prefix: str, packed: dict[str, list[str]]) -> list[str]:
    """Return the checkpoint's names of the matrices of the layer that vLLM calls `prefix`."""
    parent, _, last = prefix.rpartition(".")
    return [f"{parent}.{child}" for child in (USUAL | packed).get(last, [last])]


def excluded(names: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether a layer stays unquantised: a router, or named in `exclude`.

    Raises EngineError if only some of the matrices that vLLM fuses into one are named.
    """
    if names[0].rpartition(".")[2] in ROUTERS:
        return True
    named = [_named(name, exclude) for name in names]
    if any(named) and not all(named):
        raise EngineError(
            f"numerics.exclude names only some of {', '.join(names)}, which vLLM fuses into one matrix",
            where="numerics.exclude",
            fix=f"list all of these layers or none, or {NATIVE}",
        )
    return all(named)


def set_numeric(model: nn.Module, numeric: str) -> int:
    """Compute in `numeric` from now on (empty: the precision of the weights), with the present weights.

    Returns the number of the checkpoint's linear layers that are quantised. Raises EngineError if that would be none, or if the
    engine was not started for this numeric.
    """
    layers = list(_layers(model))
    plan = layers[0][2].plan if layers else Plan(())
    if numeric and numeric not in plan.numerics:
        raise EngineError(
            f"{numeric} would quantise no layer: vLLM was started "
            + (f"with layers for {', '.join(plan.numerics)} alone" if layers else "without quantised layers"),
            where="numerics",
            fix=f"set numerics.rollout={numeric} (or eval, or train) before vLLM starts, and do not exclude every layer",
        )
    stacked = [name for name, p in model.named_parameters() if p.dim() > 2 and not _named(name, plan.exclude)]
    if numeric and stacked:
        raise EngineError(
            f"in vLLM {numeric} quantises only linear layers, but this model's experts are stacked tensors",
            where=stacked[0],
            fix=f"add experts to numerics.exclude to leave them unquantised, or {NATIVE}",
        )
    inputs = bool(numeric) and parse(numeric).activations is not None
    with torch.no_grad():
        for _, layer, method in layers:
            method.refresh(layer, numeric)
            method.switch.numeric = numeric
            if method.switch.on is not None:
                method.switch.on.fill_(inputs)
    return sum(method.parts for _, _, method in layers) if numeric else 0


def refresh(model: nn.Module) -> None:
    """Update the operands of all layers after the weights changed, in the present numeric."""
    with torch.no_grad():
        for _, layer, method in _layers(model):
            method.refresh(layer, method.switch.numeric)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, FakeQuantised]]:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, FakeQuantised):
            yield name, module, method


def _named(name: str, exclude: Sequence[str]) -> bool:
    """Match a name like numerics.apply does: a whole name, or consecutive parts of one."""
    return any(f".{entry}." in f".{name}." for entry in exclude)
