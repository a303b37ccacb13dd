"""Moves chosen at random, by search or by a user's function, and the value of a finished game. All randomness is seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lockstep.envs.spiel.cases import pyspiel
from lockstep.envs.spiel.states import moves_of, play_chances
from lockstep.errors import TaskError
from lockstep.user_code import load_callable
from lockstep.verifiers.python import check_call

Mover = Callable[[Any, random.Random], int]
"""Chooses an action in a state in which a player must move."""
EXPLORATION = 2.0
"""Constant of UCT."""
MEMORY_MB = 64
SEED_BITS = 31


def random_mover(state: Any, numbers: random.Random) -> int:
    return int(numbers.choice(state.legal_actions()))


def mcts_mover(simulations: int) -> Mover:
    """Return OpenSpiel's Monte Carlo tree search with random playouts; a new tree for every move."""
    package = pyspiel()

    def move(state: Any, numbers: random.Random) -> int:
        seed = numbers.getrandbits(SEED_BITS)
        evaluator = package.RandomRolloutEvaluator(1, seed)
        game = state.get_game()
        bot = package.MCTSBot(game, evaluator, EXPLORATION, simulations, MEMORY_MB, True, seed, False)
        return int(bot.step(state))

    return move


def own_mover(path: str) -> Mover:
    """Return a user's function, file.py:function. Raises TaskError if it is not one, or in play if it gives no legal action."""
    function = load_callable(path, fix="give a function with the parameters (state, numbers), written file.py:function")
    check_call(function, ("state", "numbers"), path)

    def move(state: Any, numbers: random.Random) -> int:
        chosen, legal = function(state.clone(), numbers), state.legal_actions()
        if isinstance(chosen, str):
            chosen = moves_of(state).get(chosen, chosen)
        if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen not in legal:
            raise TaskError(
                f"the function chose the move {chosen!r}, which is not legal",
                where=path,
                fix=f"return one of state.legal_actions(): {legal}",
            )
        return chosen

    return move


def mover_of(name: str, simulations: int) -> Mover:
    """Return the mover for random, mcts, or file.py:function."""
    if name == "random":
        return random_mover
    return mcts_mover(simulations) if name == "mcts" else own_mover(str(Path(name).expanduser()))


def play_out(state: Any, move: Mover, numbers: random.Random) -> None:
    """Play to the end of the game, both sides alike."""
    play_chances(state, numbers)
    while not state.is_terminal():
        state.apply_action(move(state, numbers))
        play_chances(state, numbers)


def value(state: Any, player: int) -> float:
    """Return the result of a finished game for a player: 0 is the least that the game can give, 1 the most."""
    low, high = state.get_game().min_utility(), state.get_game().max_utility()
    share = float((state.returns()[player] - low) / (high - low))
    return min(1.0, max(0.0, share))  # rounding in games whose utilities are sums


def scaled_reward(share: float, reward_range: Literal["zero_one", "signed"]) -> float:
    """Return a share of the best result as a reward."""
    return share if reward_range == "zero_one" else 2 * share - 1
