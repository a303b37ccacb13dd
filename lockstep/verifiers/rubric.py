"""Runs rewards written for the package verifiers (https://github.com/primeintellect-ai/verifiers): a Rubric of versions 0.1.12
to 0.3, or a Task of verifiers.v1 (0.2 and later). The package's own code computes them; only a worker process imports it."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt, ReplyText
from lockstep.user_code import describe, load_object
from lockstep.verifiers.base import Reads, unscored
from lockstep.verifiers.python import RewardFunctions, as_number, make_object
from lockstep.verifiers.trl import metric_name

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

Score = Callable[[Prompt, Sequence[ReplyText]], Awaitable[list[Grade]]]

_FAULTS: ContextVar[list[str]] = ContextVar("_FAULTS")
"""Errors of the reward functions of one scoring: the package itself would count each as a reward of 0."""


class VerifiersRubric(RewardFunctions):
    """The reward of a rubric or task. Settings: config.schema.RubricVerifier."""

    reads: Reads = "group"

    def __init__(self, settings: schema.RubricVerifier) -> None:
        """Raises TaskError if a process cannot load it, or if its rewards need more than a reply."""
        super().__init__(__name__, {"path": settings.path, "settings": settings.settings}, settings.path, settings)


def load(path: str, settings: Mapping[str, Any]) -> Callable[[Any], list[Grade]]:
    """Load the rubric or task; returns what grades the replies of a call. Raises TaskError if it cannot be used."""
    if importlib.util.find_spec("verifiers") is None:
        raise TaskError(
            "the package verifiers is not installed in this Python",
            where=path,
            fix='pip install verifiers; for a vf.Rubric pip install "verifiers>=0.1.12,<0.4"',
        )
    found: Any = load_object(path)
    is_task = inspect.isclass(found) and callable(getattr(found, "data_type", None))
    score = _task_score(found, path) if is_task else _rubric_score(found, settings, path)
    loop = asyncio.new_event_loop()  # one for all calls: a client that an async function keeps belongs to its loop
    return lambda call: loop.run_until_complete(score(call["prompt"], call["replies"]))


# --- a classic Rubric ---------------------------------------------------------------------------------------------
def _rubric_score(found: Any, settings: Mapping[str, Any], path: str) -> Score:
    """Return the scoring by a Rubric: an object, or what makes one, or an environment that has one."""
    if inspect.isclass(found) or inspect.isfunction(found):
        found = make_object(
            found, settings, path, "correct task.verifier.settings; give a Rubric, not one of its functions"
        )
    rubric = getattr(found, "rubric", found)
    if not callable(getattr(rubric, "score_group", None)):
        raise TaskError(
            f"the path names an object of type {type(rubric).__name__}, neither a vf.Rubric nor a vf.Task",
            where=path,
            fix="give a vf.Rubric or a vf.Task, written file.py:name",
        )
    _watch(rubric)
    together = any(rubric._is_group_func(function) for function in rubric._get_reward_funcs())

    async def scored(states: list[Any]) -> list[Grade]:
        faults: list[str] = []
        _FAULTS.set(faults)
        await rubric.score_group(states)
        return [unscored(faults[0]) if faults else _grade(state["reward"], state["metrics"]) for state in states]

    async def score(prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        states = [_state(prompt, reply.text) for reply in replies]
        return await _each(scored, [states] if together else [[state] for state in states])

    return score


def _watch(rubric: Any) -> None:
    """Have the rubric's functions report what they raise, and results that are no numbers."""
    for part in getattr(rubric, "rubrics", ()):
        _watch(part)
    rubric.funcs = [_watched(function, rubric._is_group_func(function)) for function in rubric.funcs]


def _watched(function: Callable[..., Any], of_group: bool) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)  # its signature says which arguments it gets
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:
            _FAULTS.get().append(f"{name} failed: {describe(error, None)}")
            raise
        for value in result if of_group else (result,):
            if as_number(value) is None:
                _FAULTS.get().append(f"{name} returned {value!r}"[:200] + ", not a finite number")
        return result

    call.__name__ = name
    return call


def _state(prompt: Prompt, text: str) -> Any:
    """Return verifiers' state of a finished rollout of one turn."""
    types = importlib.import_module("verifiers.types")
    roles = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    row = {"answer": prompt.answer, "task": prompt.task, "example_id": prompt.id} | dict(prompt.data)
    info = row.get("info") or {}
    row["info"] = json.loads(info) if isinstance(info, str) else info
    row["prompt"] = [roles[message["role"]](content=message["content"]) for message in prompt.messages]
    empty: dict[str, Any] = {"trajectory": [], "reward": None, "metrics": None, "advantage": None, "error": None}
    timing = dict.fromkeys(("generation_ms", "scoring_ms", "total_ms", "start_time"), 0.0)
    ended: dict[str, Any] = {"is_completed": True, "is_truncated": False, "stop_condition": None, "timing": timing}
    completion = [types.AssistantMessage(content=text)]
    return types.State(input=row, task=row["task"], completion=completion, **empty, **ended)


# --- a Task of verifiers.v1 ---------------------------------------------------------------------------------------
def _task_score(made: Any, path: str) -> Score:
    """Return the scoring by the rewards of a Task, each given the trace of a reply."""
    vf = importlib.import_module("verifiers.v1")
    traces = importlib.import_module("verifiers.v1.trace")
    build = traces.VersionInfo(version=importlib.import_module("verifiers").__version__)  # its default would start git
    state = importlib.import_module("verifiers.v1.state").state_cls(made)
    data_type = made.data_type()
    blank = made(data_type.model_construct())
    rewards = blank.hooks("reward")
    if not rewards:
        raise TaskError(
            "the vf.Task has no reward method",
            where=path,
            fix="decorate the method that returns the reward with @vf.reward",
        )
    for hook in (*rewards, *blank.hooks("metric")):
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise TaskError(
                f"{hook.__name__} needs the environment's runtime, but a verifier sees only the reply",
                where=path,
                fix="train on the whole environment instead: task={kind: verifiers, env: NAME}",
            )

    async def scored(reply: tuple[Prompt, str]) -> list[Grade]:
        prompt, text = reply
        messages = [dict(message) for message in prompt.messages]
        own = {"answer": prompt.answer} | dict(prompt.data)
        own = {name: own[name] for name in set(data_type.model_fields) - set(vf.TaskData.model_fields) if name in own}
        task = made(data_type.model_validate({**own, "id": prompt.id, "prompt": messages}))
        said = [*messages, {"role": "assistant", "content": text}]
        nodes = [
            vf.MessageNode.model_validate(
                {"message": message, "parent": i - 1 if i else None, "sampled": i == len(messages)}
            )
            for i, message in enumerate(said)
        ]
        about = vf.TraceTask(type=made.__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=about, agent=agent, state=state(), nodes=nodes, verifiers=build)
        await task.score(trace)
        rewards = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
        return [_grade(trace.reward, {**rewards, **trace.metrics})]

    async def score(prompt: Prompt, replies: Sequence[ReplyText]) -> list[Grade]:
        return await _each(scored, [(prompt, reply.text) for reply in replies])

    return score


# --- both ---------------------------------------------------------------------------------------------------------
async def _each(scored: Callable[[Any], Awaitable[list[Grade]]], parts: Sequence[Any]) -> list[Grade]:
    """Score the parts of a call at the same time; one that raises leaves its own replies unscored."""
    found = await asyncio.gather(*(scored(part) for part in parts), return_exceptions=True)
    grades: list[Grade] = []
    for part, result in zip(parts, found, strict=True):
        if isinstance(result, BaseException):
            failed = unscored(describe(result.__cause__ or result, None))
            grades += [failed] * (len(part) if isinstance(part, list) else 1)
        else:
            grades += result
    return grades


def _grade(reward: object, parts: Mapping[str, object]) -> Grade:
    """Return the grade of one reply. `parts` are the rewards and metrics by the names of their functions."""
    numbers = {metric_name(name): as_number(value) for name, value in parts.items()}
    wrong = [name for name, number in numbers.items() if number is None]
    total = as_number(reward)
    if total is None or wrong:
        what = f"{wrong[0]} gave no finite number" if wrong else f"its reward is {reward!r}"[:200]
        return unscored(what)
    metrics = {name: number for name, number in numbers.items() if number is not None}
    return Grade(total, {"correct": float(total >= 1), **metrics})
