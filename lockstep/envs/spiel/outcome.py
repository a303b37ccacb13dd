"""Estimates the value of a move by playouts after it, in a worker process, as one move of a search may take seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lockstep.envs.spiel.play import Mover, mover_of, play_out, value
from lockstep.envs.spiel.states import state_at
from lockstep.seeds import seed_for
from lockstep.workers.pool import Work, WorkerPool

PLAYOUT_SECONDS = 600.0
"""Time limit for all playouts of a move."""


def outcome(game: str, history: Sequence[int], action: int, mover: Mover, playouts: int, seed: int) -> float:
    """Return the mean value of the playouts after a move, for the side that made it: 0 … 1. A function of its arguments alone."""
    before, total = state_at(game, tuple(history)), 0.0
    player = before.current_player()
    key = ",".join(map(str, (*history, action)))
    for index in range(playouts):
        numbers = random.Random(seed_for("playout", seed, game, key, index))
        state = before.clone()
        state.apply_action(action)
        play_out(state, mover, numbers)
        total += value(state, player)
    return total / playouts


@cache
def pool(workers: int) -> WorkerPool:
    """Return one pool for all tasks with the same number of processes."""
    return WorkerPool(Work(__name__, {}, "playouts of OpenSpiel's games", wall_seconds=PLAYOUT_SECONDS), workers)


def load() -> Callable[[Any], float]:
    """Return the function that answers calls in a worker: the arguments of `outcome`, with the mover as its name and
    simulations.
    """
    movers = cache(mover_of)

    def answer(call: Any) -> float:
        mover = movers(call["playout"], call["simulations"])
        return outcome(call["game"], call["history"], call["action"], mover, call["playouts"], call["seed"])

    return answer
