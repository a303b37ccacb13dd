"""Selects the OpenSpiel games (https://github.com/google-deepmind/open_spiel) of a task, by their names."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.config import schema
from lockstep.config.section import Json
from lockstep.envs.packages import package
from lockstep.errors import TaskError
from lockstep.text import did_you_mean

BOARD = (
    "tic_tac_toe",
    "connect_four",
    "hex(board_size=5)",
    "hex(board_size=7)",
    "hex(board_size=9)",
    "go(board_size=9)",
    "go(board_size=13)",
    "breakthrough(columns=6,rows=6)",
    "breakthrough(columns=8,rows=8)",
    "dots_and_boxes(num_cols=3,num_rows=3)",
    "dots_and_boxes(num_cols=4,num_rows=4)",
    "dots_and_boxes(num_cols=5,num_rows=5)",
    "clobber(columns=5,rows=5)",
    "clobber(columns=6,rows=6)",
    "clobber(columns=7,rows=7)",
    "othello",
    "chess",
    "checkers",
)
"""Load strings of the default suite, in the form in which OpenSpiel prints them."""
TRIAL_SECONDS = 60
_TRIAL = """
import random, sys, pyspiel
state, numbers = pyspiel.load_game(sys.argv[1]).new_initial_state(), random.Random(1)
for _ in range(200):
    if state.is_terminal() or state.current_player() < -1:
        break
    chance = state.is_chance_node()
    actions = [a for a, p in state.chance_outcomes() if p > 0] if chance else state.legal_actions()
    state.apply_action(numbers.choice(actions))
    str(state)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One game with its parameters. Example: Case("hex-5", "hex(board_size=5)")"""

    name: str
    """Name in ids and in metrics."""
    game: str
    """OpenSpiel's load string."""


def pyspiel() -> Any:
    """Return the package. Raises TaskError if it is not installed."""
    return package("pyspiel", "open_spiel", name="open_spiel")


def select(settings: schema.OpenSpielTask) -> tuple[Case, ...]:
    """Return the cases of a task, each once, in the order in which they are named.

    Raises TaskError for an unknown name, with the nearest; for one that begins several games outside the suite, with all of
    them; and for a game that cannot be loaded or played by one reply at a time.
    """
    if settings.game_list:
        texts = _configured(settings.game_list, settings.game_configs)
    elif settings.games:
        texts = [text for name in settings.games for text in _named(name)]
    else:
        texts = list(BOARD)
    games = list(dict.fromkeys(str(_tried(text)).removesuffix("()") for text in texts))
    short = [_short(game) for game in games]
    names = [name if short.count(name) == 1 else _plain(game) for name, game in zip(short, games, strict=True)]
    return tuple(Case(name, game) for name, game in zip(names, games, strict=True))


@lru_cache(maxsize=256)
def load(game: str) -> Any:
    """Return the game of a load string. Raises TaskError if there is none, or if it cannot be played by one reply at a time."""
    spiel, where = pyspiel(), f"task.games: {game}"
    try:
        found = spiel.load_game(game)
    except (spiel.SpielError, IndexError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise TaskError(
            f"OpenSpiel rejects this game or its parameters: {reason}", where=where, fix=_hint(game)
        ) from error
    if why := _unplayable(spiel, found):
        raise TaskError(why, where=where, fix="choose another game, or leave task.games out to take the built-in suite")
    return found


def _unplayable(spiel: Any, game: Any) -> str:
    """Return why a game cannot be played one move at a time; empty if it can."""
    kind, utilities = game.get_type(), (game.min_utility(), game.max_utility())
    if kind.dynamics != spiel.GameType.Dynamics.SEQUENTIAL:
        return "the players do not move one after the other"
    if kind.chance_mode == spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return "the game's chance events are drawn inside OpenSpiel: its states cannot be rebuilt from their moves"
    if not all(map(math.isfinite, utilities)) or utilities[0] >= utilities[1]:
        return f"the game's results go from {utilities[0]} to {utilities[1]}, which cannot be scaled to a reward"
    if kind.information == spiel.GameType.Information.PERFECT_INFORMATION:
        return ""
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        return "the game has no text that describes what a player sees"
    return ""


# --- names ------------------------------------------------------------------------------------------------------------
def _named(name: str) -> list[str]:
    """Return the load strings that a name stands for: all of the suite that begin with it, or one other game."""
    if "(" in name:
        return [name]
    if found := [game for game in BOARD if game.startswith(name)]:
        return found
    registered = pyspiel().registered_names()
    matches = [name] if name in registered else [known for known in registered if known.startswith(name)]
    if len(matches) > 1:
        raise TaskError(
            f"{name!r} is ambiguous: the names of {len(matches)} games begin with it: {', '.join(matches)}",
            where="task.games",
            fix="give the full name of one game",
        )
    if not matches:
        raise TaskError(
            f"OpenSpiel has no game whose name begins with {name!r}", where="task.games", fix=_nearest(name)
        )
    return matches


def _configured(names: Sequence[str], configs: Mapping[str, Sequence[Mapping[str, Json]]]) -> list[str]:
    """Return one load string for each set of parameters of each game; a game without any has its own defaults."""
    registered = pyspiel().registered_names()
    for name in names:
        if name not in registered:
            raise TaskError(f"OpenSpiel has no game {name!r}", where="task.game_list", fix=_nearest(name))
    return [_load_string(name, config) for name in names for config in configs.get(name, [{}])]


def _load_string(name: str, config: Mapping[str, Json]) -> str:
    settings = [f"{key}={value}" for key, value in sorted(config.items())]  # OpenSpiel writes booleans like Python
    return f"{name}({','.join(settings)})" if settings else name


def _nearest(name: str) -> str:
    known = dict.fromkeys((*BOARD, *pyspiel().registered_names()))
    return did_you_mean(name, known, "pyspiel.registered_names() lists the games", most=3, cutoff=0.5)


def _hint(game: str) -> str:
    name = game.partition("(")[0]
    if name in pyspiel().registered_names():
        return f"give parameters that {name} has, as in {BOARD[2]}"
    return _nearest(name)


def _tried(text: str) -> Any:
    """Return a game after playing it in a separate process: some parameters make OpenSpiel end its process.

    The suite is known to be sound.
    """
    game = load(text)
    if text in BOARD:
        return game
    where = f"task.games: {text}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, text], capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        what = f"the game is too slow: a trial of some moves needed more than {TRIAL_SECONDS} s"
        raise TaskError(what, where=where, fix="give the game other parameters, or choose another game") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = (
            lines[-1][:200]
            if lines and done.returncode > 0
            else f"a process that tried it ended with status {done.returncode}"
        )
        raise TaskError(
            f"the game cannot be played with these parameters: {why}", where=where, fix="give the game other parameters"
        )
    return game


def _short(game: str) -> str:
    """Return a short name: hex(board_size=5) → hex-5, breakthrough(columns=6,rows=6) → breakthrough-6x6; nested games in full."""
    name, _, rest = game.partition("(")
    values = re.findall(r"=([^,()=]+)", rest)
    return _plain(f"{name}-{'x'.join(values)}" if values and rest.count("=") == len(values) else game)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")
