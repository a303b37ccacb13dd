"""Settings of OpenSpiel's games."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Json, Section
from lockstep.config.tools import Turns


class Rival(Section):
    """A frozen adapter that moves for the opponent, sampled by a model of its own on the CPU."""

    path: str = Field(min_length=1)
    """An adapter in PEFT's layout, a checkpoint of a run that trained one, or the run, whose newest checkpoint is taken. It
    must have been made for this recipe's model."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of its moves; 0 takes the likeliest tokens."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest reply."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Games in which it moves at once."""


class OpenSpielTask(Section):
    """States of OpenSpiel's games to move in, or whole games. Needs pip install 'lockstep-rl[envs]'."""

    kind: Literal["open_spiel"] = "open_spiel"
    games: list[str] = Field(default_factory=list)
    """Names or load strings; a name stands for all cases of the suite that begin with it. None takes the 18 cases of the suite.
    Example: [hex, go, "connect_four(rows=5,columns=5)"]"""
    game_list: list[str] = Field(default_factory=list)
    """Instead of games: OpenSpiel's names, with parameters in game_configs."""
    game_configs: dict[str, list[dict[str, Json]]] = Field(default_factory=dict)
    """Parameters of each game in game_list, one set for each case. Example: {hex: [{board_size: 5}, {board_size: 7}]}"""
    num_tasks_per_case: int = Field(default=100, ge=1)
    """Different states of each case to train on; a case that has fewer is refused. Half of all states are held out."""
    max_random_steps: int = Field(default=20, ge=0)
    """Number of random moves before each state, drawn evenly from 0 to this."""
    seed: int = Field(default=1, ge=0)
    """Seed of the training states and of the playouts; held-out states are the same for every seed."""
    reward_mode: Literal["legal", "outcome", "game"] = "legal"
    """legal: full reward for a legal move; outcome: what playouts from the move bring; game: the game is played to its end."""
    reward_range: Literal["zero_one", "signed"] = "zero_one"
    """From the game's worst to its best result: 0 to 1, or -1 to 1. An illegal move earns the lowest."""
    playouts: int = Field(default=8, ge=1)
    """Playouts of an outcome, averaged."""
    playout: Literal["random", "mcts"] = "random"
    """Policy of both sides in a playout."""
    workers: int = Field(default=2, ge=1, le=64)
    """Processes for playouts."""
    opponent: str = Field(default="random", pattern=r"^(random|mcts|adapter|.+\.py:\w+)$")
    """Opponent in whole games: random, mcts, adapter (see rival), or file.py:function, which is called with a pyspiel state and a
    random.Random and returns an action or its name."""
    rival: Rival | None = None
    """The adapter of opponent: adapter."""
    simulations: int = Field(default=64, ge=2)
    """Simulations for each move of mcts."""
    illegal_moves: int = Field(default=0, ge=0)
    """Illegal replies that a whole game forgives, and asks again; the next one loses it."""
    answer: Literal["tag", "line", "reply"] = "tag"
    """Place of the move, alone: in <move>…</move> at the end, in the last line, or it is the whole reply."""
    show_moves: bool = True
    """List the legal moves in the prompt, all of them."""
    turns: Turns = Turns(limit=200)
    """Limits of whole games."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.games and self.game_list:
            raise ValueError("games and game_list both name games: set one of them")
        if strange := sorted(set(self.game_configs) - set(self.game_list)):
            raise ValueError(f"game_configs has {strange[0]!r}, which is not in game_list")
        if empty := [name for name in (*self.games, *self.game_list) if not name.strip()]:
            raise ValueError(f"{empty[0]!r} is not the name of a game")
        for name, config in ((name, config) for name, configs in self.game_configs.items() for config in configs):
            for key, value in config.items():
                if not isinstance(value, str | int | float):
                    raise ValueError(f"game_configs.{name}: {key} must be text, a number or a boolean")
        modes = dict.fromkeys(("playouts", "playout", "workers"), "outcome")
        modes |= dict.fromkeys(("opponent", "rival", "illegal_moves", "turns"), "game")
        for name, mode in modes.items():
            field = type(self).model_fields[name]
            if self.reward_mode != mode and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ValueError(f"{name} applies to reward_mode={mode} only, not to {self.reward_mode}")
        if (self.opponent == "adapter") is not (self.rival is not None):
            has = "needs an adapter: set rival.path" if self.rival is None else "is not adapter: rival has no effect"
            raise ValueError(f"opponent={self.opponent} {has}")
        return self
