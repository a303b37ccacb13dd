"""Serves one episode's environment in its own process, forked from one that has imported the task's code without torch.

If one process hangs, dies or uses too much memory, only its episode ends. Each has its own random numbers.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from lockstep.config.task import Task
from lockstep.config.tools import Turns
from lockstep.envs.make import env_maker
from lockstep.envs.turns import fault_of
from lockstep.types import Env, Turn


def load(settings: str) -> Callable[[Mapping[str, Any]], Turn | str]:
    """Import the code of a task, given as JSON; returns what answers calls: the turn, or why what was returned is none.

    The first call has the prompt and the seed, the others have a reply.
    """
    task: Task = TypeAdapter(Task).validate_json(settings)
    make = env_maker(task)
    episode: list[Env] = []

    def answer(call: Mapping[str, Any]) -> Turn | str:
        if episode:
            turn = episode[0].step(call["reply"])
        else:
            _limit_memory(task)
            _seed_globals(call["seed"])
            episode.append(make(call["prompt"]))
            turn = episode[0].start(call["seed"])
        return fault_of(turn) or turn

    return answer


def _limit_memory(task: Task) -> None:
    turns = getattr(task, "turns", None)
    if isinstance(turns, Turns):
        size = int(turns.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _seed_globals(seed: int) -> None:
    """Seed the global random numbers of Python and NumPy, for environments that draw from them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
