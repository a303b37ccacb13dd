"""An environment that plays a whole OpenSpiel game, with one move per reply."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

from lockstep.config import schema
from lockstep.envs.spiel.play import Mover, mover_of, scaled_reward, value
from lockstep.envs.spiel.states import moves_of, play_chances, state_at
from lockstep.envs.spiel.text import question, read_move
from lockstep.seeds import seed_for
from lockstep.types import Message, Prompt, Turn

GAME, CASE, HISTORY = "game", "case", "history"
"""Keys of a prompt's data: OpenSpiel's load string, the case's name, and the moves that lead to its state."""


class SpielGame:
    """One game from a given state, against one opponent in all other seats.

    The first reply is charged the lowest reward, and the end of the game gives the rest: a game that never ends, because turns
    or tokens run out, scores the same as a lost one.
    """

    def __init__(self, settings: schema.OpenSpielTask, prompt: Prompt, opponent: Mover) -> None:
        self._settings, self._case, self._opponent = settings, str(prompt.data[CASE]), opponent
        self._state = state_at(*place_of(prompt))
        self._player = self._state.current_player()
        self._numbers = random.Random()
        self._low = scaled_reward(0.0, settings.reward_range)
        self._due = self._low
        self._forgiven = settings.illegal_moves
        self._noted: dict[str, float] = {}
        """Metrics of the present turn."""
        self._moved = ""

    def start(self, seed: int) -> Turn:
        self._numbers.seed(seed_for("open_spiel game", seed))
        return Turn(self._question())

    def step(self, reply: str) -> Turn:
        turn = self.take(reply)
        while turn is None:
            turn = self.play(self._opponent(self._state, self._numbers))
        return turn

    def take(self, reply: str) -> Turn | None:
        """Return the turn after a reply; None if an opponent must move first, by `play`."""
        moves, move = moves_of(self._state), read_move(reply, self._settings.answer)
        if move is None or move not in moves:
            return self._illegal(move)
        self._noted, self._moved = {"legal_moves": 1.0}, move
        return self.play(moves[move])

    def play(self, action: int) -> Turn | None:
        """Make a move; returns the player's next turn, None if an opponent's move comes first."""
        self._state.apply_action(action)
        play_chances(self._state, self._numbers)
        if not self._state.is_terminal():
            if self._state.current_player() != self._player:
                return None
            return Turn(self._question(), self._charge(), metrics=self._noted, extracted=self._moved)
        share = value(self._state, self._player)
        metrics = self._noted | {"correct": float(share > 0.5), "finished": 1.0, "value": share}
        return self._over(scaled_reward(share, self._settings.reward_range), metrics, self._moved)

    def _illegal(self, text: str | None) -> Turn:
        metrics = {"tool_errors": 1.0}
        if self._forgiven == 0:
            return self._over(self._low, metrics | {"correct": 0.0, "finished": 0.0, "value": 0.0}, text)
        self._forgiven -= 1
        (asked,) = self._question()
        again = Message(role="user", content=f"That is no legal move.\n{asked['content']}")
        return Turn((again,), self._charge(), metrics=metrics, extracted=text)

    def _over(self, reward: float, metrics: dict[str, float], text: str | None) -> Turn:
        """Return the last turn, such that the rewards add up to `reward`."""
        return Turn((), self._charge() + reward - self._low, True, metrics=metrics, extracted=text)

    def _charge(self) -> float:
        due, self._due = self._due, 0.0
        return due

    def _question(self) -> tuple[Message, ...]:
        s = self._settings
        return question(self._state, self._case, s.answer, show_moves=s.show_moves)


def spiel_maker(settings: schema.OpenSpielTask) -> Callable[[Prompt], SpielGame]:
    """Return a function that makes games. Raises TaskError if the opponent is missing."""
    opponent = mover_of(settings.opponent, settings.simulations)
    return lambda prompt: SpielGame(settings, prompt, opponent)


def place_of(prompt: Prompt) -> tuple[str, tuple[int, ...]]:
    """Return the state of a prompt: its game, and the moves that lead to it."""
    return str(prompt.data[GAME]), tuple(int(action) for action in cast(Sequence[int], prompt.data[HISTORY]))
