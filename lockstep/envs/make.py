"""Turns a task's settings into a function from a prompt to its environment. It runs in environment processes, without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never, cast

from lockstep.config import task as tasks
from lockstep.config.openenv import OpenEnvTask
from lockstep.config.spiel import OpenSpielTask
from lockstep.envs.guess import GuessNumber
from lockstep.envs.tool_env import ToolEnv
from lockstep.envs.tools import build_tools
from lockstep.errors import DEFECT, TaskError
from lockstep.types import Env, EnvTask, Prompt, Turn
from lockstep.verifiers.python import check_call, load_class, make_object

Make = Callable[[Prompt], Env]
ENV_METHODS = {"start": ("seed",), "step": ("reply",)}
SEED = "seed"
"""Key of a prompt's data that holds the seed of its episode."""


class Seeded:
    """An environment whose opening is a function of its prompt's seed: all samples of the prompt get the same episode."""

    def __init__(self, env: Env, seed: int) -> None:
        self._env, self._seed = env, seed

    def start(self, seed: int) -> Turn:
        return self._env.start(self._seed)

    def step(self, reply: str) -> Turn:
        return self._env.step(reply)


def env_maker(settings: tasks.Task) -> Make:
    """Return the function that makes the environments of a task. Raises TaskError for missing code or games."""
    match settings:
        case tasks.ToolTask():
            tools = build_tools(settings.tools)
            return lambda prompt: ToolEnv(tools, settings.format)
        case tasks.GuessNumberTask():
            return lambda prompt: GuessNumber(int(prompt.answer), settings.low, settings.high, settings.progress)
        case tasks.EnvTask():
            return _own(settings)
        case tasks.GymnasiumTask():
            from lockstep.envs.gym_text import gym_maker

            return _seeded(gym_maker(settings))
        case tasks.TextArenaTask():
            from lockstep.envs.textarena import arena_maker

            return _seeded(arena_maker(settings))
        case OpenEnvTask():
            from lockstep.envs.openenv import openenv_maker

            return _seeded(openenv_maker(settings))
        case OpenSpielTask():
            from lockstep.envs.spiel.game import spiel_maker

            return spiel_maker(settings)
        case (
            tasks.ReasoningGymTask()
            | tasks.FileTask()
            | tasks.PythonTask()
            | tasks.AgentTask()
            | tasks.VerifiersTask()
            | tasks.MixedTask()
            | tasks.NoTask()
        ):
            raise TaskError("tasks of this kind have no environment", where=f"task.kind={settings.kind}", fix=DEFECT)
        case _:
            assert_never(settings)


def is_env_task(made: type) -> bool:
    """Return whether a class has the methods of an EnvTask, rather than those of a single Env."""
    return callable(getattr(made, "env", None))


def own_class(path: str) -> type:
    """Return the user's class. Raises TaskError unless it is a class with the methods of an Env or of an EnvTask."""
    made = load_class(path)
    methods: dict[str, tuple[str, ...]] = {"env": ("prompt",)} if is_env_task(made) else dict(ENV_METHODS)
    for method, parameters in methods.items():
        function = getattr(made, method, None)
        if not callable(function):
            raise TaskError(
                f"the class has no method {method}",
                where=path,
                fix="define start(self, seed) and step(self, reply) for an Env, or env(self, prompt) for an EnvTask",
            )
        check_call(function, ("self", *parameters), f"{path}.{method}")
    return made


def _own(settings: tasks.EnvTask) -> Make:
    made = own_class(settings.path)
    if not is_env_task(made):
        return _seeded(lambda: cast(Env, make_object(made, settings.settings, settings.path)))
    task = cast(EnvTask, make_object(made, settings.settings, settings.path))

    def make(prompt: Prompt) -> Env:
        env = task.env(prompt)
        if env is None:
            raise TaskError("env(prompt) returned None", where=settings.path, fix="return an Env for every prompt")
        return env

    return make


def _seeded(make: Callable[[], Env]) -> Make:
    return lambda prompt: Seeded(make(), int(cast(int, prompt.data[SEED])))
