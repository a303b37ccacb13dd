"""Chooses the native engine for the model's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lockstep.models.decoder import Decoder
from lockstep.types import RolloutEngine


def native_engine(
    model: nn.Module,
    *,
    slots: int,
    stop_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str],
    routes: bool = False,
) -> RolloutEngine:
    """Return the paged and captured engine on a GPU; on a CPU the one whose samples are bit-identical in any batch.

    That one also runs, on a GPU, models whose layers differ in the size of their heads, or carry states: pages have one size.
    So it does where `routes` are recorded, which captured steps do not.
    """
    if next(model.parameters()).device.type == "cuda" and Decoder.of(model).head_size and not routes:
        from lockstep.rollout.paged.engine import PagedEngine

        return PagedEngine(model, slots=slots, stop_ids=stop_ids, decode=decode)
    from lockstep.rollout.native import NativeEngine

    return NativeEngine(model, slots=slots, stop_ids=stop_ids, decode=decode, routes=routes)
