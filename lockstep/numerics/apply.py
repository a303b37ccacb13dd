"""Chooses the linear layers and experts of a model that are quantised, and switches the number format in which they compute.

The learner and the native engine run the same modules, so one switch sets the format of the whole model: the learner sets the
default, and an engine overrides it around each of its passes. Weights are never changed: a layer multiplies by a quantised
copy. The copy records the address and the write count (torch's `_version`) of its source and is made again when these change.
`verify` makes every copy again and compares the bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lockstep.config.numerics import Numerics, Phase
from lockstep.errors import EngineError, LearnerError, ModelError
from lockstep.numerics.experts import MATRICES, Stack, find_stacks, mix, mix_by_kernels
from lockstep.numerics.linear import Quantiser, quantised_linear
from lockstep.numerics.spec import Scale

_ATTRIBUTE = "lockstep_numerics"
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last parts of the names of linear layers that choose experts; the gate of a plain MLP is called gate_proj."""


def numerics_of(model: nn.Module, scale: Scale = "floor", exclude: Sequence[str] = ()) -> ModelNumerics:
    """Return the one object of a model, with or without PEFT around it; it is created with these settings if missing."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    there: ModelNumerics | None = base.__dict__.get(_ATTRIBUTE)
    if there is None:
        there = ModelNumerics(base, scale, exclude)
        base.__dict__[_ATTRIBUTE] = there
    return there


def settle(model: nn.Module, settings: Numerics, phase: Phase = "train") -> ModelNumerics:
    """Make a model compute as a recipe says for a phase. Raises the errors of ModelNumerics and of its `settle`."""
    numerics = numerics_of(model, settings.scale, settings.exclude)
    numerics.settle(settings.of(phase))
    return numerics


Layer: TypeAlias = nn.Linear | Stack


@dataclass(slots=True)
class _Copy:
    """A quantised weight."""

    tensor: Tensor
    made_of: tuple[object, ...] = ()
    """State of the weight when it was quantised: address, write count."""


class ModelNumerics:
    """The linear layers and experts of a model's decoder and the numeric in which they compute."""

    def __init__(self, base: Any, scale: Scale = "floor", exclude: Sequence[str] = ()) -> None:
        """Take a transformers model without PEFT around it. Nothing of it changes before a numeric quantises something.

        Raises ModelError for an entry of `exclude` that names no linear layer.
        """
        self._scale: Scale = scale
        stacks, unknown = find_stacks(base)
        self.targets, self.excluded = _layers(base, stacks, unknown, exclude)
        """Layers by their name in the checkpoint: those that a numeric quantises, and those that none does."""
        self._unknown = tuple(name for name in unknown if not any(_names(entry, name) for entry in exclude))
        self._settled = self._current = ""
        self._copies: dict[tuple[str, Layer], _Copy] = {}
        self._wholes: dict[tuple[str, tuple[nn.Linear, ...]], Tensor] = {}
        self._wired = False
        self._last: tuple[str, weakref.ref[Tensor], int, Tensor] | None = None

    # --- switch ---------------------------------------------------------------------------------------------------
    def settle(self, numeric: str) -> int:
        """Compute in `numeric` from now on (empty: the precision of the weights); returns the number of quantised layers.

        Raises LearnerError if a numeric would change none, ModelError for a model whose layers it cannot quantise.
        """
        count = self.prepare(numeric)
        if numeric and not count:
            raise LearnerError(_nothing(numeric), where="numerics", fix=_FIX)
        self._settled = self._current = numeric
        return count

    def serve(self, numeric: str) -> int:
        """Prepare for `computing(numeric)`; returns the number of quantised layers. Raises EngineError if that is 0."""
        count = self.prepare(numeric)
        if numeric and not count:
            raise EngineError(_nothing(numeric), where="numerics", fix=_FIX)
        return count

    def prepare(self, numeric: str) -> int:
        """Prepare for `computing(numeric)`, like `serve`, but return 0 instead of raising."""
        if self.quantiser(numeric) is None:
            return 0
        if self._unknown:
            raise refuse_experts(numeric, self._unknown)
        if not self._wired:
            for layer in self.targets.values():
                replaced: Any = layer.module if isinstance(layer, Stack) else layer
                if isinstance(layer, nn.Linear):
                    replaced.forward = _Forward(self, layer)
                elif not isinstance(replaced.forward, _ExpertsForward):
                    replaced.forward = _ExpertsForward(self, replaced)
            self._wired = True
        return len(self.targets)

    @contextmanager
    def computing(self, numeric: str) -> Iterator[None]:
        """Compute in `numeric`, which was prepared, inside the block."""
        before, self._current = self._current, numeric
        try:
            yield
        finally:
            self._current = before

    @property
    def current(self) -> str:
        """The present numeric; empty is the precision of the weights."""
        return self._current

    def quantiser(self, numeric: str) -> Quantiser | None:
        """Return the quantiser of a numeric; None for the precision of the weights. Raises ValueError for an unknown name."""
        quantiser = Quantiser(numeric, self._scale)
        return None if quantiser.spec.plain else quantiser

    # --- operands -------------------------------------------------------------------------------------------------
    def operands(self, layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return DQ(Q(x)) and DQ(Q(W)) of a target in the present numeric; None for the precision of the weights."""
        quantiser = self.quantiser(self._current)
        if quantiser is None:
            return None
        return self._activation(quantiser, x), self.weight(quantiser, layer)

    def weight(self, quantiser: Quantiser, layer: Layer) -> Tensor:
        """Return DQ(Q(W)) of a layer for its present weight ([E, O, X] of a stack). Always in the same memory, so that captured
        graphs may read it.
        """
        key = (quantiser.spec.weights or "", layer)
        copy = self._copies.get(key)
        made_of = _state(layer.weight)
        if copy is None:
            shape = (layer.weight_EOX if isinstance(layer, Stack) else layer.weight).shape
            copy = self._copies[key] = _Copy(layer.weight.new_empty(shape))
        if copy.made_of != made_of:
            for matrix, out in _matrices(layer, copy.tensor):
                quantiser.weight(matrix, out=out)
            copy.made_of = made_of
        return copy.tensor

    def joined(self, quantiser: Quantiser, layers: Sequence[nn.Linear]) -> Tensor:
        """Return the quantised weights of layers with the same input in one tensor, each quantised by itself; their copies are
        parts of it.

        Always the same tensor for the same layers.
        """
        parts = [self.weight(quantiser, layer) for layer in layers]
        if len(parts) == 1:
            return parts[0]
        kind = quantiser.spec.weights or ""
        key = (kind, tuple(layers))
        if key not in self._wholes:
            whole = self._wholes[key] = torch.cat(parts)
            for layer, part in zip(layers, whole.split([len(p) for p in parts]), strict=True):
                self._copies[kind, layer].tensor = part
        return self._wholes[key]

    def refresh(self, numeric: str) -> None:
        """Update the copies of a numeric, for readers that do not call `weight` (captured graphs)."""
        quantiser = self.quantiser(numeric)
        if quantiser is not None:
            for layer in self.targets.values():
                self.weight(quantiser, layer)

    def changed(self) -> None:
        """Mark trained weights as written. Call it after an optimizer step: torch's fused AdamW does not count its writes."""
        for (_, layer), copy in self._copies.items():
            if layer.weight.requires_grad:
                copy.made_of = ()

    def verify(self) -> int:
        """Quantise every weight again and compare it with its copy, bit by bit; returns the number of copies.

        This finds a write that torch did not count (through `.data`, or a user's kernel). Raises EngineError.
        """
        names = {layer: name for name, layer in self.targets.items()}
        for (kind, layer), copy in self._copies.items():
            if copy.made_of != _state(layer.weight):
                continue  # makes it again before it is read
            again = Quantiser(f"{kind}-w4a16", self._scale)
            if not all(_same_bits(again.weight(matrix), made) for matrix, made in _matrices(layer, copy.tensor)):
                raise EngineError(
                    "the layer's quantised copy differs from its weight: "
                    "the weight was changed in a way that torch does not record",
                    where=names[layer],
                    fix="write weights in place under torch.no_grad(), never through .data",
                )
        return len(self._copies)

    def _activation(self, quantiser: Quantiser, x: Tensor) -> Tensor:
        """Return the quantised activation. Layers that read the same tensor in turn (q, k and v; gate and up) share it."""
        if quantiser.spec.activations is None:
            return x
        last = self._last
        if last is not None and last[0] == quantiser.numeric and last[1]() is x and last[2] == x._version:
            return last[3]
        made = quantiser.activation(x.detach())
        self._last = (quantiser.numeric, weakref.ref(x), x._version, made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelNumerics:
        """Copy for a copy of the model, whose layers replace the layers. Quantised copies are not copied."""
        import copy

        twin = object.__new__(ModelNumerics)
        memo[id(self)] = twin
        twin._scale, twin._unknown, twin._wired = self._scale, self._unknown, self._wired
        twin._settled, twin._current = self._settled, self._settled
        twin.targets = {name: copy.deepcopy(layer, memo) for name, layer in self.targets.items()}
        twin.excluded = self.excluded
        twin._copies, twin._wholes, twin._last = {}, {}, None
        return twin


class _Forward:
    """Replacement of a linear layer's forward. It is a class so that a copy of the model copies it, too."""

    def __init__(self, numerics: ModelNumerics, layer: nn.Linear) -> None:
        self.numerics, self.layer = numerics, layer

    def __call__(self, x: Tensor) -> Tensor:
        layer, numerics = self.layer, self.numerics
        used = numerics.operands(layer, x)
        quantiser = numerics.quantiser(numerics.current)
        if used is None or quantiser is None:
            return nn.functional.linear(x, layer.weight, layer.bias)
        return quantised_linear(x, layer.weight, layer.bias, quantiser, used_x=used[0], used_weight=used[1])


class _ExpertsForward:
    """Replacement of an experts module's forward."""

    def __init__(self, numerics: ModelNumerics, module: nn.Module) -> None:
        self.numerics, self.module = numerics, module
        self.plain: Any = module.forward
        self.mix = mix_by_kernels if getattr(self.plain, "by_kernels", False) else mix
        """On a GPU models.experts has replaced the forward already."""
        stacks = (Stack(module, name) for name in MATRICES)
        self.stacks = tuple(stack if stack in numerics.targets.values() else None for stack in stacks)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        given, quantiser = (hidden_states, top_k_index, top_k_weights), self.numerics.quantiser(self.numerics.current)
        if quantiser is None:
            result: Tensor = self.plain(*given)
            return result
        used = tuple(None if stack is None else self.numerics.weight(quantiser, stack) for stack in self.stacks)
        return self.mix(self.module, quantiser, used, *given)


def operands(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the quantised operands of a linear layer instead of x and its weight; None if it uses these themselves."""
    forward = layer.__dict__.get("forward")
    return forward.numerics.operands(forward.layer, x) if isinstance(forward, _Forward) else None


def _state(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight._version, weight.dtype, weight.device


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def _matrices(layer: Layer, made: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return each matrix that is quantised by itself, with its place in the copy."""
    if isinstance(layer, Stack):
        return zip(layer.weight_EOX.detach(), made, strict=True)
    return [(layer.weight.detach(), made)]


def refuse_experts(numeric: str, names: Sequence[str]) -> ModelError:
    """Make the error for experts that no numeric quantises."""
    return ModelError(
        f"{numeric} cannot quantise the model's experts: they stay in MXFP4, or Lockstep does not know their form",
        where=", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else ""),
        fix="add experts to numerics.exclude to leave them unquantised, or use no four-bit format",
    )


def _layers(
    base: Any, stacks: Mapping[str, Stack], unknown: Sequence[str], exclude: Sequence[str]
) -> tuple[Mapping[str, Layer], tuple[str, ...]]:
    """Return the decoder's linear layers and stacks of experts except routers, adapters and those that `exclude` names."""
    inside = {id(module) for module in base.get_decoder().modules()}
    left = [name for name in stacks if any(_names(entry, name) for entry in exclude)]
    targets: dict[str, Layer] = {name: stack for name, stack in stacks.items() if name not in left}
    names: list[str] = []
    for full, module in base.named_modules():
        parts = full.removesuffix(".base_layer").split(".")
        if not isinstance(module, nn.Linear) or any(part.startswith("lora_") for part in parts):
            continue
        name = ".".join(parts)
        names.append(name)
        if id(module) not in inside or parts[-1] in ROUTERS or any(_names(entry, name) for entry in exclude):
            left.append(name)
        else:
            targets[name] = module
    known = [*names, *unknown, *(name for name, _ in base.named_parameters())]
    for entry in exclude:
        if not any(_names(entry, name) for name in known):
            raise ModelError(
                f"{entry!r} names no linear layer of {type(base).__name__}",
                where="numerics.exclude",
                fix=f"choose among its linear layers: {', '.join(sorted({name.rsplit('.', 1)[-1] for name in names}))}",
            )
    return targets, tuple(left)


def _names(entry: str, name: str) -> bool:
    """Return whether an entry of `exclude` is a layer's name, consecutive parts of it, or its last part."""
    return f".{entry}." in f".{name}."


def _nothing(numeric: str) -> str:
    return f"{numeric} would quantise no layer: the model has no linear layer outside numerics.exclude"


_FIX = "check numerics.exclude, or train a model of nn.Linear layers"
