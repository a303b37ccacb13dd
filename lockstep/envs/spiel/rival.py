"""Plays whole games against a frozen policy; a second engine samples its moves, batched over many games."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from lockstep.config import schema
from lockstep.envs.runners import Answer, Fault
from lockstep.envs.spiel.game import SpielGame
from lockstep.envs.spiel.play import random_mover
from lockstep.envs.spiel.states import moves_of
from lockstep.envs.spiel.text import read_move
from lockstep.envs.turns import fault_of
from lockstep.types import Message, Prompt, Turn
from lockstep.user_code import describe

SEED_BITS = 62


class Sampler(Protocol):
    """Samples replies of a frozen policy. A reply depends on the question and the seed alone."""

    @property
    def note(self) -> str:
        """Remark for the reader."""

    def ask(self, key: str, question: Sequence[Message], seed: int) -> None:
        """Request a reply; the key belongs to this question alone."""

    def poll(self, seconds: float) -> list[tuple[str, str]]:
        """Return keys and finished replies; waits at most `seconds` for the first. Raises LockstepError if the sampler failed."""


class RivalGame(SpielGame):
    """A game whose opponent gets the same question as the player would: each state separately, in the player's words."""

    def asked(self) -> tuple[tuple[Message, ...], int]:
        """Question to the opponent, and the seed of its reply."""
        return self._question(), self._numbers.getrandbits(SEED_BITS)

    def hear(self, reply: str) -> Turn | None:
        """Make the opponent's move from its reply. A reply without a legal move is replaced by a random one, and counted."""
        moves, move = moves_of(self._state), read_move(reply, self._settings.answer)
        action = moves.get(move or "")
        illegal = self._noted.get("rival_illegal", 0.0) + float(action is None)
        self._noted["rival_illegal"] = illegal
        return self.play(random_mover(self._state, self._numbers) if action is None else action)


class RivalRunner:
    """Runner of a run's games, in its own process: each takes microseconds between two questions to the opponent."""

    def __init__(self, settings: schema.OpenSpielTask, sampler: Sampler) -> None:
        self._settings, self._sampler = settings, sampler
        self._games: dict[str, RivalGame] = {}
        self._asked: dict[str, tuple[str, RivalGame]] = {}
        """Keys of games, and those games, by the key of the question."""
        self._questions = 0
        self._answers: list[Answer] = []

    def begin(self, key: str, prompt: Prompt, seed: int) -> None:
        def started() -> Turn:
            self._games[key] = RivalGame(self._settings, prompt, random_mover)
            return self._games[key].start(seed)

        self._follow(key, started)

    def step(self, key: str, reply: str) -> None:
        self._follow(key, lambda: self._games[key].take(reply))

    def poll(self, seconds: float) -> list[Answer]:
        until = time.monotonic() + seconds
        while True:
            wait = 0.0 if self._answers or not self._asked else max(0.0, until - time.monotonic())
            for question, reply in self._sampler.poll(wait) if self._asked else ():
                key, game = self._asked.pop(question)
                if self._games.get(key) is game:  # it has not ended meanwhile
                    self._follow(key, partial(game.hear, reply))
            if self._answers or not self._asked or time.monotonic() >= until:
                answers, self._answers = self._answers, []
                return answers

    def end(self, key: str) -> None:
        self._games.pop(key, None)

    def close(self) -> None:
        self._games.clear()

    def _follow(self, key: str, move: Callable[[], Turn | None]) -> None:
        """Make a move, and ask the opponent for the next one if it is its turn. An error costs this episode alone."""
        try:
            if (turn := move()) is not None:
                fault = fault_of(turn)
                self._answers.append((key, Fault("error", fault) if fault else turn))
                return
            question, seed = self._games[key].asked()
            self._questions += 1
            name = f"{key}/rival/{self._questions}"
            self._sampler.ask(name, question, seed)
            self._asked[name] = (key, self._games[key])
        except Exception as error:
            self._answers.append((key, Fault("error", describe(error, None))))
