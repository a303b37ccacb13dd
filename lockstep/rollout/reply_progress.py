"""Reports the tokens of unfinished replies to the clients that stream them. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.types import ClientRequest, NativeRollouts, RolloutEngine


def report_progress(engine: RolloutEngine, asks: Iterable[ClientRequest]) -> None:
    """Give each client that streams its reply the tokens that are sampled so far."""
    seen = {ask.id: ask.seen for ask in asks if ask.seen is not None}
    if seen and isinstance(engine, NativeRollouts):
        for id, sampled in engine.sampled(seen).items():
            seen[id](sampled)
