"""How large a recipe's adapter will be, before any model is loaded."""

from __future__ import annotations

from typing import assert_never

from lockstep.config.adapter import ATTENTION, REGEX, Adapter, Lora, NoAdapter, OtherPeft, Targets
from lockstep.plan.shapes import Linear, ModelShape

USUAL_RANK = 8
"""PEFT's default for its other methods; with it the plan is an upper bound for those without ranks."""


def adapter_size(adapter: Adapter, shape: ModelShape) -> tuple[int, int]:
    """Rank and parameters of all layers together; (0, 0) for full training."""
    match adapter:
        case NoAdapter():
            return 0, 0
        case Lora(rank=rank):
            chosen = targeted(adapter.targets, shape)
            lengths = shape.layers * sum(linear.outputs for linear in chosen) if adapter.dora else 0
            return rank, shape.adapter_parameters(rank, [linear.name for linear in chosen]) + lengths
        case OtherPeft():
            asked = adapter.options.get("r")
            rank = asked if isinstance(asked, int) and asked > 0 else USUAL_RANK
            return rank, shape.adapter_parameters(rank, [linear.name for linear in targeted(adapter.targets, shape)])
        case _:
            assert_never(adapter)


def packed_parameters(adapter: Adapter, shape: ModelShape) -> int:
    """Parameters of the base that are kept in 4 bits."""
    if not isinstance(adapter, Lora) or adapter.base == "full":
        return 0
    return shape.layers * sum(linear.inputs * linear.outputs for linear in targeted(adapter.targets, shape))


def targeted(targets: Targets, shape: ModelShape) -> list[Linear]:
    """The linear layers of one decoder layer that get an adapter; a regular expression counts those that it spells out."""
    match targets:
        case "auto" if not shape.experts:
            return list(shape.linears)
        case "auto" | "attention":
            return [linear for linear in shape.linears if linear.name in ATTENTION]
        case "all-linear":
            return list(shape.linears)
        case list():
            names = {target.rsplit(".", 1)[-1] for target in targets if not target.startswith(REGEX)}
            patterns = [target for target in targets if target.startswith(REGEX)]
            return [x for x in shape.linears if x.name in names or any(x.name in pattern for pattern in patterns)]
        case _:
            assert_never(targets)
