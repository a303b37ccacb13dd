"""Progress of replies that are not done, for those who stream them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.types import NativeRollouts, RolloutEngine, SampleAsk


def tell_sampled(engine: RolloutEngine, asks: Iterable[SampleAsk]) -> None:
    """Tell those who want to see their replies grow what is sampled so far."""
    seen = {ask.id: ask.seen for ask in asks if ask.seen is not None}
    if seen and isinstance(engine, NativeRollouts):
        for id, sampled in engine.sampled(seen).items():
            seen[id](sampled)
