"""Games of TextArena (https://github.com/LeonGuertler/TextArena), alone or against one opponent."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from lockstep.config import schema
from lockstep.envs.packages import package
from lockstep.errors import TaskError
from lockstep.text import did_you_mean, reason_of
from lockstep.types import Message, Turn
from lockstep.user_code import load_callable

MAX_OPPONENT_TURNS = 200
"""Most actions of the opponent in a row; a game that never returns to the player is broken."""
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LISTED = re.compile(r"(?:available|valid|legal|possible)[^\n:]*:(.*(?:\n[ \t]*[-*'\"\[].*)*)", re.IGNORECASE)

Opponent = Callable[[str, random.Random], str]


class Arena:
    """One game. The player gets all new messages after each of its actions; rewards come at the end, from -1 to 1.

    Random numbers are Python's global ones, which the game seeds: it must run in a separate process.
    """

    def __init__(self, game: Any, players: int, seat: int, opponent: Opponent) -> None:
        self._game, self._players, self._seat, self._opponent = game, players, seat, opponent
        self._numbers = random.Random()
        self._shown: list[str] = []

    def start(self, seed: int) -> Turn:
        self._numbers.seed(seed)
        self._game.reset(num_players=self._players, seed=seed % 2**31)
        done = self._opponent_plays()
        return Turn(self._said(), done=done)

    def step(self, reply: str) -> Turn:
        done, _ = self._game.step(_bracketed(reply))
        if done or self._opponent_plays():
            rewards, info = self._game.close()
            reward = float((rewards or {}).get(self._seat, 0.0))
            invalid = float(bool(info.get(self._seat, {}).get("invalid_move")))
            return Turn(
                (), reward, True, metrics={"correct": float(reward >= 1), "tool_errors": invalid}, extracted=reply[-80:]
            )
        return Turn(self._said(), extracted=reply[-80:])

    def _opponent_plays(self) -> bool:
        """Let the opponent act until it is the player's turn; returns whether the game is over."""
        for _ in range(MAX_OPPONENT_TURNS):
            player, seen = self._game.get_observation()
            text = _text(seen)
            if player == self._seat:
                self._shown.append(text)
                return False
            done, _ = self._game.step(self._opponent(text, self._numbers))
            if done:
                return True
        raise RuntimeError(f"the opponent acted {MAX_OPPONENT_TURNS} times in a row, and the policy never got a turn")

    def _said(self) -> tuple[Message, ...]:
        text = "\n".join(part for part in self._shown if part).strip()
        self._shown.clear()
        return (Message(role="user", content=text or "Your turn."),)


def _text(seen: object) -> str:
    """Return the text of an observation given as (sender, text, kind) messages, or already as text."""
    if isinstance(seen, str):
        return seen
    if isinstance(seen, list | tuple):
        return "\n".join(str(entry[1]) if isinstance(entry, tuple) else str(entry) for entry in seen)
    return str(seen)


def _bracketed(reply: str) -> str:
    """Put a reply without square brackets into them, as TextArena's own wrapper does: games read actions in brackets."""
    text = reply.strip()
    return text if "[" in text and "]" in text else f"[{text}]"


def random_move(text: str, numbers: random.Random) -> str:
    """Return one of the moves that the game listed in the opponent's last observation. Raises ValueError if it lists none."""
    listed = _LISTED.findall(text)
    moves = _MOVE.findall(listed[-1]) if listed else []
    if not moves:
        raise ValueError("the game lists no moves for a random opponent to take: give task.opponent=file.py:function")
    return str(numbers.choice(moves))


def arena_maker(settings: schema.TextArenaTask) -> Callable[[], Arena]:
    """Return a function that makes the game. Raises TaskError for a missing game, or one for more than two players."""
    ta, where = package("textarena", "textarena"), f"task.game={settings.game}"
    name = _raw_name(settings.game, ta.envs.registration.ENV_REGISTRY, where)
    opponent: Opponent = random_move
    if settings.opponent != "random":
        fix = "give a function with the parameters (text, numbers), written file.py:function"
        opponent = load_callable(settings.opponent, fix=fix)

    def make() -> Arena:
        return Arena(ta.make(name, **settings.settings), players, settings.seat if players == 2 else 0, opponent)

    players = _players(ta, name, settings, where)
    return make


def _players(ta: Any, name: str, settings: schema.TextArenaTask, where: str) -> int:
    """Return 1 or 2: the smallest number of players with which the game begins."""
    refused = ""
    for players in (1, 2):
        try:
            ta.make(name, **settings.settings).reset(num_players=players, seed=0)
        except Exception as error:
            refused = reason_of(error)
        else:
            return players
    raise TaskError(
        f"the game can be started with neither one nor two players: {refused}", where=where, fix="choose another game"
    )


def _raw_name(game: str, registry: Any, where: str) -> str:
    """Return the game's name without TextArena's wrappers, which repeat the whole history in every observation."""
    for name in (game if game.endswith("-raw") else f"{game}-raw", game):
        if name in registry:
            return name
    games = [known for known in registry if not known.endswith(("-raw", "-train"))]
    hint = did_you_mean(game, games, "textarena.envs.registration.ENV_REGISTRY lists the games", most=3)
    raise TaskError(f"TextArena has no game {game!r}", where=where, fix=hint)
