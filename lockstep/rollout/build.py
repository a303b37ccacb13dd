"""Choice of the native engine for the model's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lockstep.types import RolloutEngine


def native_engine(
    model: nn.Module, *, slots: int, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str]
) -> RolloutEngine:
    """Return the paged and captured engine on a GPU; on a CPU the one whose samples are bit-identical in any batch."""
    if next(model.parameters()).device.type == "cuda":
        from lockstep.rollout.paged.engine import PagedEngine

        return PagedEngine(model, slots=slots, stop_ids=stop_ids, decode=decode)
    from lockstep.rollout.native import NativeEngine

    return NativeEngine(model, slots=slots, stop_ids=stop_ids, decode=decode)
