"""Builds a task from its settings."""

from __future__ import annotations

from typing import TypeVar, assert_never

from pydantic import BaseModel

from lockstep.config import schema
from lockstep.tasks.base import BuiltTask, Grader, NoQuestions
from lockstep.tasks.file import build_file_task
from lockstep.tasks.mixed import Mixed, MixedGrader
from lockstep.tasks.multi_turn import AgentQuestions, Guessing, SeededEpisodes, ToolQuestions, build_own
from lockstep.tasks.open_spiel import build_spiel
from lockstep.tasks.python import build_python_task, user_grader
from lockstep.tasks.reasoning_gym import ReasoningGym
from lockstep.tasks.verifiers_env import VerifiersEnvTask
from lockstep.verifiers.build import build_verifier

Limits = TypeVar("Limits", bound=BaseModel)


def build_task(settings: schema.Task, seed: int) -> BuiltTask:
    """Return the task that the settings describe; `seed` is the run's and orders the questions.

    Raises TaskError or DataError for anything that would fail in the run: names, rows, answers, overlap.
    """
    match settings:
        case schema.ReasoningGymTask():
            return ReasoningGym(settings, seed)
        case schema.FileTask():
            return build_file_task(settings, seed)
        case schema.PythonTask():
            return build_python_task(settings, seed)
        case schema.ToolTask():
            return ToolQuestions(settings, build_task(settings.questions, seed))
        case schema.AgentTask():
            return AgentQuestions(settings, build_task(settings.questions, seed))
        case schema.VerifiersTask():
            return VerifiersEnvTask(settings, seed)
        case schema.GuessNumberTask():
            return Guessing(settings, seed)
        case schema.EnvTask():
            return build_own(settings, seed)
        case schema.GymnasiumTask():
            return SeededEpisodes(settings, settings.env.rpartition(":")[2], seed)
        case schema.TextArenaTask():
            return SeededEpisodes(settings, settings.game, seed)
        case schema.OpenEnvTask():
            return SeededEpisodes(settings, "openenv", seed, most=settings.sessions)
        case schema.OpenSpielTask():
            return build_spiel(settings, seed)
        case schema.NoTask():
            return NoQuestions()
        case schema.MixedTask():
            return Mixed(settings, {name: build_task(share.task, seed) for name, share in settings.tasks.items()})
        case _:
            assert_never(settings)


def build_grader(settings: schema.Task, seed: int, places: int) -> BuiltTask:
    """Return what grades replies to the prompts that the task's `apart` returns, beside one of `places` engines.

    It has no questions of its own. The places share the grader's processes, but each has two if the recipe asks for as many.
    """
    match settings:
        case schema.FileTask():
            return Grader(build_verifier(_shared(settings.verifier, places)))
        case schema.PythonTask():
            grading = _shared(settings.grading, places)
            return Grader(user_grader(settings.model_copy(update={"grading": grading}), seed))
        case schema.ReasoningGymTask():
            verifier = _shared(settings.verifier, places)
            return ReasoningGym(settings.model_copy(update={"verifier": verifier}), seed)
        case schema.MixedTask():
            return MixedGrader({name: build_grader(one.task, seed, places) for name, one in settings.tasks.items()})
        case _:
            return NoQuestions()


def _shared(settings: Limits, places: int) -> Limits:
    """Return the settings of a grader with its part of the worker processes."""
    if isinstance(settings, schema.CompositeVerifier):
        parts = [one.model_copy(update={"verifier": _shared(one.verifier, places)}) for one in settings.parts]
        return settings.model_copy(update={"parts": parts})
    if (workers := getattr(settings, "workers", None)) is None:
        return settings
    return settings.model_copy(update={"workers": min(workers, max(2, -(-workers // places)))})
