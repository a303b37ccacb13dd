"""reasoning-gym's own score functions, in a process that may be killed: some evaluate what the answer says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def load() -> Callable[[Any], float]:
    """Scores {"dataset", "settings", "answer", "item"}: what the data set's score_answer gives, from 0 to 1."""
    import reasoning_gym

    @lru_cache(maxsize=128)
    def dataset(name: str, settings: str) -> Any:
        return reasoning_gym.create_dataset(name, seed=1, size=1, **json.loads(settings))

    def score(call: Any) -> float:
        return float(dataset(call["dataset"], call["settings"]).score_answer(answer=call["answer"], entry=call["item"]))

    return score
