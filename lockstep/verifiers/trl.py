"""Calls reward functions written for TRL's GRPOTrainer (https://huggingface.co/docs/trl) as TRL 1.16 calls them."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt, ReplyText
from lockstep.user_code import load_callable, signature_of
from lockstep.verifiers.base import unscored
from lockstep.verifiers.python import RewardFunctions, as_number

if TYPE_CHECKING:  # a worker has no use for the settings
    from lockstep.config import schema

TRAINER_ONLY = ("trainer_state", "environments")
"""Arguments of TRL that have no counterpart here: a grade depends on the prompt and the replies alone."""
NONE_APPLIES = "every reward function returned None for it"
"""Reason of a reply that no function applies to; the metric `not_applicable` counts them."""

Reward = Callable[..., Any]


class TrlRewards(RewardFunctions):
    """The weighted sum of TRL's reward functions. Settings: config.schema.TrlVerifier."""

    def __init__(self, settings: schema.TrlVerifier) -> None:
        """Raises TaskError if a process cannot load a function, or if it needs what only a trainer has."""
        weights = settings.weights or [1.0] * len(settings.paths)
        arguments = {"paths": settings.paths, "weights": weights, "completions": settings.completions}
        super().__init__(__name__, arguments, settings.paths[0], settings)
        self.reads = settings.call


def load(paths: Sequence[str], weights: Sequence[float], completions: str) -> Callable[[Any], list[Grade]]:
    """Load the functions; returns what grades all replies of a call. Raises TaskError if one cannot be used."""
    functions = _named([(path.rpartition(":")[2], _load(path)) for path in paths])
    weight_of = dict(zip(functions, weights, strict=True))
    loop = asyncio.new_event_loop()  # one for all calls: a client that an async function keeps belongs to its loop

    def answer(call: Any) -> list[Grade]:
        columns = _columns(call["prompt"], call["replies"], completions)
        log = Log(len(call["replies"]))
        found = _call_all(functions, columns, log, loop)
        rows = [{name: values[i] for name, values in found.items()} for i in range(log.count)]
        return [grade_of(row, weight_of, log.metrics(i)) for i, row in enumerate(rows)]

    return answer


class Log:
    """Numbers that functions report by `log_metric` and `log_extra`, which become metrics of the replies of the call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._single: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a number of the whole call; several under one name are averaged, and NaN and infinity are left out."""
        if (number := as_number(float(value))) is not None:
            self._single.setdefault(metric_name(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a column with a value for each reply; only numbers become metrics."""
        self._columns[metric_name(column)] = list(values)

    def metrics(self, index: int) -> dict[str, float]:
        """Return the metrics of one reply."""
        found = {name: sum(values) / len(values) for name, values in self._single.items()}
        for name, column in self._columns.items():
            value = as_number(column[index]) if index < len(column) else None
            found |= {} if value is None else {name: value}
        return found


def grade_of(values: Mapping[str, object], weights: Mapping[str, float], logged: Mapping[str, float]) -> Grade:
    """Sum what the functions returned for one reply; None is left out. Anything that is not a number leaves it unscored."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        number = as_number(value)
        if number is not None:
            numbers[name] = number
        elif value is not None:
            return unscored(f"{name} returned {value!r}"[:200] + " for it, not a finite number or None")
    missing = float(len(values) - len(numbers))
    if not numbers:
        return Grade(None, {"not_applicable": missing}, error=NONE_APPLIES)
    correct = next(iter(numbers.values())) >= 1
    parts = {f"part_{name}": value for name, value in numbers.items()} if len(values) > 1 else {}
    metrics = {"correct": float(correct), "not_applicable": missing, **parts}
    return Grade(sum(weights[name] * value for name, value in numbers.items()), {**logged, **metrics})


def metric_name(name: str) -> str:
    """Return a name that a metric may have."""
    return re.sub(r"\W+", "_", str(name)).strip("_") or "value"


def _call_all(
    functions: Mapping[str, Reward], columns: Mapping[str, Any], log: Log, loop: asyncio.AbstractEventLoop
) -> dict[str, list[Any]]:
    """Call every function, then wait for the async ones together, as TRL does: a plain function may run a loop of its own.

    Raises ValueError for a list of another length than the replies.
    """
    found = {
        name: function(**columns, log_metric=log.log_metric, log_extra=log.log_extra)
        for name, function in functions.items()
    }
    waiting = {name: value for name, value in found.items() if inspect.isawaitable(value)}
    if waiting:
        found |= dict(zip(waiting, loop.run_until_complete(_together(list(waiting.values()))), strict=True))
    lists = {name: list(values) for name, values in found.items()}
    for name, values in lists.items():
        if len(values) != log.count:
            raise ValueError(f"{name} returned {len(values)} rewards for {log.count} completions")
    return lists


async def _together(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*waiting))


def _columns(prompt: Prompt, replies: Sequence[ReplyText], form: str) -> dict[str, Any]:
    """Return TRL's keyword arguments: a list for each column, as long as there are replies."""
    row, texts = dict(prompt.data), [reply.text for reply in replies]
    own = row.pop("prompt", None)
    row = {"answer": prompt.answer, "ground_truth": prompt.answer} | row
    columns = {name: [value] * len(texts) for name, value in row.items() if name not in ("completion", *TRAINER_ONLY)}
    completions: list[Any] = texts
    asked: Any = own if isinstance(own, str) else prompt.messages[-1]["content"]
    if form == "messages" or (form == "auto" and not isinstance(own, str)):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        asked = [dict(message) for message in prompt.messages]
    ids = [list(reply.ids) for reply in replies]
    return {**columns, "prompts": [asked] * len(texts), "completions": completions, "completion_ids": ids}


def _load(path: str) -> Reward:
    function = load_callable(path)
    for name, parameter in signature_of(function, path).parameters.items():
        if name in TRAINER_ONLY and parameter.default is inspect.Parameter.empty:
            raise TaskError(
                f"the reward function requires the argument {name}, which only TRL's trainer can give; "
                "here a reward depends on the prompt and the replies alone",
                where=path,
                fix=f"give the parameter {name} a default, or remove it",
            )
    return function


def _named(functions: Sequence[tuple[str, Reward]]) -> dict[str, Reward]:
    """Return the functions by name; a name that is taken gets _2."""
    found: dict[str, Reward] = {}
    for name, function in functions:
        while name in found:
            name += "_2"
        found[name] = function
    return found
