"""Calls a reward function written for verl (https://verl.readthedocs.io), compute_score, as verl's reward manager does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.types import Grade, Prompt
from lockstep.user_code import load_callable, signature_of
from lockstep.verifiers.base import shown, unscored
from lockstep.verifiers.python import RewardFunctions, as_number
from lockstep.verifiers.trl import metric_name

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

ALL = ""
"""Key of a function that scores every data source."""


class VerlScore(RewardFunctions):
    """The score of verl's compute_score. Settings: config.schema.VerlVerifier."""

    def __init__(self, settings: schema.VerlVerifier) -> None:
        """Raises TaskError if a process cannot load a function."""
        paths = {ALL: settings.path} if isinstance(settings.path, str) else dict(settings.path)
        arguments = {"paths": paths, "reward_kwargs": settings.reward_kwargs}
        super().__init__(__name__, arguments, next(iter(paths.values())), settings)


def load(paths: Mapping[str, str], reward_kwargs: Mapping[str, Any]) -> Callable[[Any], list[Grade]]:
    """Load the functions; returns what grades the replies of a call. Raises TaskError if one cannot be used."""
    functions = {source: load_callable(path) for source, path in paths.items()}
    loop = asyncio.new_event_loop()  # one for all calls: a client that an async function keeps belongs to its loop

    def score(prompt: Prompt, text: str) -> Grade:
        arguments = arguments_of(prompt, text)
        source = ALL if ALL in functions else arguments["data_source"]
        if source not in functions:
            known = ", ".join(map(repr, functions))
            return unscored(f"verifier.path has no function for data_source {source!r}; it has {known}")
        if source != ALL:
            arguments = _accepted(functions[source], arguments)
        result = functions[source](**arguments, **reward_kwargs)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(result)
        return grade_of(result)

    return lambda call: [score(call["prompt"], reply.text) for reply in call["replies"]]


def arguments_of(prompt: Prompt, text: str) -> dict[str, Any]:
    """Return verl's four arguments, from a row in verl's layout or from the reference answer."""
    reward_model = prompt.data.get("reward_model")
    truth = prompt.answer
    if isinstance(reward_model, Mapping):
        truth = reward_model.get("ground_truth", truth)
    extra = prompt.data.get("extra_info")
    known: dict[str, object] = {"num_turns": None, "rollout_reward_scores": {}}  # verl's keys, empty for one reply
    return {
        "data_source": prompt.data.get("data_source", prompt.task),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": {**(extra if isinstance(extra, Mapping) else {}), **known},
    }


def grade_of(result: object) -> Grade:
    """Turn what compute_score returned into a grade: a number, a list whose first item is one, or a dict with `score`.

    The other numbers of a dict become metrics; its `acc` says whether the reply is correct (without it a score of 1 or more),
    `pred` is the answer as it was read.
    """
    fields = result if isinstance(result, Mapping) else {}
    value = fields.get("score") if isinstance(result, Mapping) else result
    if isinstance(value, list | tuple) and value:
        value = value[0]
    reward = as_number(value)
    if reward is None:
        what = f"{result!r}"[:200]
        return unscored(f"compute_score returned {what}, not a finite number or a dict with one as 'score'")
    extra = {metric_name(name): as_number(item) for name, item in fields.items() if name not in ("score", "acc")}
    accuracy = as_number(fields.get("acc"))
    correct = reward >= 1 if accuracy is None else accuracy >= 1
    metrics = {name: number for name, number in extra.items() if number is not None}
    predicted = fields.get("pred")
    return Grade(reward, {**metrics, "correct": float(correct)}, None if predicted is None else shown(str(predicted)))


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function names, all of them if it takes any (**kwargs)."""
    parameters = signature_of(function, repr(function)).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
