"""Gymnasium environments (https://gymnasium.farama.org) whose actions and observations can be written as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lockstep.config import schema
from lockstep.envs.packages import package
from lockstep.errors import TaskError
from lockstep.types import Message, Turn
from lockstep.user_code import load_callable

_NUMBER = re.compile(r"-?\d{1,9}(?!\d)")


class GymText:
    """A gymnasium.Env with text in and out. A reply's last action counts; a reply that names none is told so and costs a turn.

    Supported observations are text, numbers, choices or short arrays of them; an environment with render_mode "ansi" is shown
    as it renders itself.
    """

    def __init__(self, env: Any, instructions: str, actions: list[str], solved: float) -> None:
        self._env, self._instructions, self._actions, self._solved = env, instructions, actions, solved
        self._total = 0.0

    def start(self, seed: int) -> Turn:
        observation, _ = self._env.reset(seed=seed % 2**31)
        self._env.action_space.seed(seed % 2**31)
        text = "\n\n".join(part for part in (self._instructions, self._said(observation), self._choices()) if part)
        return Turn((Message(role="user", content=text),))

    def step(self, reply: str) -> Turn:
        action, name = self._action(reply)
        if action is None:
            return Turn(
                (Message(role="user", content=f"That is no action. {self._choices()}"),),
                metrics={"tool_errors": 1.0},
            )
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        done = bool(terminated or truncated)
        metrics = {"correct": float(self._total >= self._solved)} if done else {}
        said = () if done else (Message(role="user", content=self._said(observation)),)
        return Turn(said, float(reward), done, metrics=metrics, extracted=name)

    def _said(self, observation: object) -> str:
        if getattr(self._env.unwrapped, "render_mode", None) == "ansi":
            return re.sub(r"\x1b\[[0-9;]*m", "*", str(self._env.render()))  # colours mark the player's position
        return observation if isinstance(observation, str) else str(_plain(observation))

    def _choices(self) -> str:
        from gymnasium.spaces import Discrete

        space = self._env.action_space
        if not isinstance(space, Discrete):
            return ""
        first, last = int(space.start), int(space.start + space.n - 1)
        return f"Actions: {', '.join(self._actions) if self._actions else f'{first} to {last}'}."

    def _action(self, reply: str) -> tuple[object, str]:
        """Return the action that a reply names, and its name; None if it names none."""
        from gymnasium.spaces import Discrete

        space = self._env.action_space
        if not isinstance(space, Discrete):
            text = reply.strip()
            return (text, text) if space.contains(text) else (None, "")
        if self._actions:
            text, names = reply.lower(), [name.lower() for name in self._actions]
            found = [(text.rfind(name) + len(name), len(name), i) for i, name in enumerate(names) if name in text]
            if not found:
                return None, ""
            index = max(found)[2]  # where names end alike the longest is meant: northeast, not east
            return space.dtype.type(space.start + index), self._actions[index]
        numbers = _NUMBER.findall(reply)
        number = int(numbers[-1]) if numbers else None
        inside = number is not None and int(space.start) <= number < int(space.start + space.n)
        return (space.dtype.type(number), str(number)) if inside and number is not None else (None, "")


def gym_maker(settings: schema.GymnasiumTask) -> Callable[[], GymText]:
    """Return the environment's maker. Raises TaskError for a missing one, or one whose spaces cannot be put into words."""
    gymnasium = package("gymnasium", "gymnasium")
    factory: Callable[..., Any]
    if ".py:" in settings.env:
        fix = "give a class with the methods reset and step, written file.py:Class"
        factory = load_callable(settings.env, fix=fix)
    else:

        def factory(**arguments: Any) -> Any:
            return gymnasium.make(settings.env, **arguments)

    def make() -> GymText:
        solved = 1.0 if settings.solved is None else settings.solved
        return GymText(factory(**settings.settings), settings.instructions, settings.actions, solved)

    _check(make()._env, settings)
    return make


def _check(env: Any, settings: schema.GymnasiumTask) -> None:
    from gymnasium.spaces import Box, Discrete, Text

    where, action, seen = f"task.env={settings.env}", env.action_space, env.observation_space
    if not isinstance(action, Discrete | Text):
        raise TaskError(
            f"the environment's action space is {action}, but a reply can give only Text or Discrete actions",
            where=where,
            fix="wrap the environment so that its action space is Text or Discrete",
        )
    if isinstance(action, Discrete) and settings.actions and len(settings.actions) != action.n:
        raise TaskError(
            f"the environment has {action.n} actions, but task.actions names {len(settings.actions)}",
            where=where,
            fix="list one name for each action in task.actions",
        )
    shown = getattr(env.unwrapped, "render_mode", None) == "ansi"
    if not shown and isinstance(seen, Box) and len(seen.shape) > 1:
        raise TaskError(
            f"the environment's observations are arrays of shape {seen.shape}, which a model cannot read as text",
            where=where,
            fix="set task.settings.render_mode=ansi if the environment has it, or wrap it to return text",
        )


def _plain(observation: object) -> object:
    """Convert NumPy values to numbers and lists."""
    if isinstance(observation, dict):
        return {key: _plain(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_plain(value) for value in observation)
    return observation.tolist() if hasattr(observation, "tolist") else observation
