"""A user-defined estimator of advantages: def advantages(replies, **settings) in a Python file. It runs in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.algorithms.user_loss import load_function
from lockstep.config.algorithm import PythonAdvantage
from lockstep.config.section import Json
from lockstep.errors import LearnerError
from lockstep.types import TrainSequence
from lockstep.user_code import describe

_RETURN = "return a finite number for each reply, or for each token of its ids, in the order of the replies"


@dataclass(frozen=True, slots=True)
class UserAdvantage:
    """Credit by the user's function. Raises LearnerError, with the function's name, for an unusable result."""

    function: Callable[..., object]
    path: str
    settings: Mapping[str, Json]

    def __call__(self, replies: Sequence[TrainSequence]) -> list[TrainSequence]:
        try:
            result = self.function(tuple(replies), **self.settings)
        except Exception as error:
            what = f"the estimator fails: {describe(error, Path(self.path.rpartition(':')[0]).expanduser())}"
            raise LearnerError(what, where=self.path, fix="correct the function") from error
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, list | tuple) or len(values) != len(replies):
            found = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
            raise LearnerError(
                f"the estimator returned {found} for {len(replies)} replies", where=self.path, fix=_RETURN
            )
        return [
            self._given(reply, value, number) for number, (reply, value) in enumerate(zip(replies, values, strict=True))
        ]

    def _given(self, reply: TrainSequence, value: object, number: int) -> TrainSequence:
        row: Any = value.tolist() if hasattr(value, "tolist") else value
        row = [row] * len(reply.ids) if isinstance(row, int | float) else row
        right = isinstance(row, list | tuple) and len(row) == len(reply.ids)
        if not right or not all(isinstance(one, int | float) and abs(one) <= sys.float_info.max for one in row):
            raise LearnerError(f"the advantage of reply {number} is {str(value)[:80]}", where=self.path, fix=_RETURN)
        counts = reply.reward is not None
        return replace(
            reply,
            advantages=tuple(float(a) if own and counts else 0.0 for a, own in zip(row, reply.trained, strict=True)),
        )


def load_estimator(settings: PythonAdvantage) -> UserAdvantage:
    """Load the function at the settings' path and try it on six made-up replies. Raises LearnerError if it cannot be used."""
    found = UserAdvantage(load_function(settings.path, "replies", settings.settings), settings.path, settings.settings)
    found(
        [
            _reply(group, reward)
            for group, rewards in enumerate(((1.0, 0.0, 0.5), (0.0, 0.0, None)))
            for reward in rewards
        ]
    )
    return found


def _reply(group: int, reward: float | None) -> TrainSequence:
    return TrainSequence(
        (1, 2), (3, 4, 5), (True, False, True), (-1.0, -1.0, -1.0), (0.0,) * 3, 0.0, group=group, reward=reward
    )
