"""Draws different states of a game by random moves from its start; each is stored as the moves that lead to it."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.envs.spiel.cases import load, pyspiel
from lockstep.errors import DEFECT, TaskError
from lockstep.seeds import seed_for
from lockstep.tasks.generator import Side, side_of

PATIENCE = 300
"""Number of draws without a new state, or 3 for each one found if that is more, before all states are enumerated."""
ENUMERATED = 30_000
"""Most states visited in an enumeration."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GO_HEADER = re.compile(r"^\s*GoState\([^\n]*\)\s*\n")


@dataclass(frozen=True, slots=True)
class StateDraw:
    """Different states of one side, and how they were found."""

    histories: tuple[tuple[int, ...], ...]
    """For each state, OpenSpiel's numbers of the moves that lead to it, chance events included."""
    draws: int
    enumerated: bool
    """True if draws brought no new states any more, so that all states were listed."""
    complete: bool
    """True if there are no more on this side within the number of moves."""


def state_at(game: str, history: Sequence[int]) -> Any:
    """Return the state that the moves lead to. Raises TaskError if they are not moves of the game."""
    package, state = pyspiel(), load(game).new_initial_state()
    try:
        for action in history:
            state.apply_action(action)
    except package.SpielError as error:
        raise TaskError(
            f"the stored moves of a state are not legal: {error}", where=f"a state of {game}", fix=DEFECT
        ) from error
    return state


def shown(state: Any) -> str:
    """Return the view of the player to move: the board or, in a game with hidden cards, that player's own view."""
    kind = state.get_game().get_type()
    if kind.information == pyspiel().GameType.Information.PERFECT_INFORMATION:
        text = str(state)
    elif kind.provides_information_state_string:
        text = state.information_state_string(state.current_player())
    else:
        text = state.observation_string(state.current_player())
    return _COLOURS.sub("", _GO_HEADER.sub("", text)).strip("\n")


def identity(state: Any) -> str:
    """Return a text that is equal for two states that are the same to their player, however they were reached.

    Chess is compared without the clocks, go without the number of moves.
    """
    text = shown(state)
    if state.get_game().get_type().short_name == "chess":
        text = " ".join(text.split()[:4])
    return f"{state.get_game()}\n{state.current_player()}\n{text}"


@lru_cache(maxsize=4096)
def moves_at(game: str, history: tuple[int, ...]) -> dict[str, int]:
    """Return the legal moves of a state by name. Raises TaskError if two have the same name."""
    return moves_of(state_at(game, history))


def moves_of(state: Any) -> dict[str, int]:
    """Return the legal moves of a loaded state. Names are without the spaces that some games put around them."""
    actions = state.legal_actions()
    moves = {state.action_to_string(action).strip(): action for action in actions}
    if len(moves) < len(actions):
        raise TaskError(
            "two legal moves of this state have the same name",
            where=f"a state of {state.get_game()}",
            fix="choose another game",
        )
    return moves


def draw(game: str, stream: str, side: Side, want: int, max_random_steps: int) -> StateDraw:
    """Return the first `want` different states of a stream that belong to one side; a state's side is a bit of its hash.

    Each draw makes a number of random moves, from none to `max_random_steps`. When draws bring no new states any more, the
    reachable ones are enumerated and the rest is taken in the order of their hashes.
    """
    found: dict[str, tuple[int, ...]] = {}
    draws, idle = 0, 0
    while len(found) < want and idle < max(PATIENCE, 3 * len(found)):
        state = _walk(game, random.Random(seed_for("open_spiel", game, stream, draws)), max_random_steps)
        draws, key = draws + 1, identity(state)
        if key in found or _side(key) is not side:
            idle += 1
            continue
        idle, found[key] = 0, tuple(state.history())
    if len(found) == want:
        return StateDraw(tuple(found.values()), draws, False, False)
    everything, complete = _enumerate(game, max_random_steps)
    rest = {key: history for key, history in everything.items() if _side(key) is side and key not in found}
    for key in sorted(rest, key=_digest)[: want - len(found)]:
        found[key] = rest[key]
    return StateDraw(tuple(found.values()), draws, True, complete)


def play_chances(state: Any, numbers: random.Random) -> None:
    """Draw chance events, until a player must move or the game is over."""
    while state.is_chance_node():
        outcomes, weights = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(numbers.choices(outcomes, weights)[0])


def _walk(game: str, numbers: random.Random, max_random_steps: int) -> Any:
    """Return a state in which a player must move. If the game ended too early, it is one of those before its end."""
    state, steps = load(game).new_initial_state(), numbers.randint(0, max_random_steps)
    play_chances(state, numbers)
    lengths = [len(state.history())]
    for _ in range(steps):
        state.apply_action(numbers.choice(state.legal_actions()))
        play_chances(state, numbers)
        if state.is_terminal():
            return state_at(game, state.history()[: numbers.choice(lengths)])
        lengths.append(len(state.history()))
    return state


def _enumerate(game: str, max_random_steps: int) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return the states within `max_random_steps` moves, nearest first, and whether these are all."""
    found: dict[str, tuple[int, ...]] = {}
    level = [load(game).new_initial_state()]
    for step in range(max_random_steps + 1):
        after = level if step == 0 else [_child(state, action) for state in level for action in state.legal_actions()]
        level = []
        for state in (later for one in after for later in _after_chances(one)):
            key = identity(state)
            if key in found:
                continue
            if len(found) == ENUMERATED:
                return found, False
            found[key] = tuple(state.history())
            level.append(state)
    return found, True


def _after_chances(state: Any) -> list[Any]:
    """Return the players' states that chance events lead to; none if the game is over."""
    if state.is_terminal():
        return []
    if not state.is_chance_node():
        return [state]
    return [
        later
        for action, share in state.chance_outcomes()
        if share > 0
        for later in _after_chances(_child(state, action))
    ]


def _child(state: Any, action: int) -> Any:
    child = state.clone()
    child.apply_action(action)
    return child


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _side(key: str) -> Side:
    return side_of(_digest(key))
