"""What an environment may return."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.envs.turns import fault_of
from lockstep.types import Turn


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (Turn(reward=1.0, extracted="7"), ""),
        (7, "returned int"),
        (Turn(({"role": "system", "content": "x"},)), "has the role system"),
        (Turn(reward=None), "no reward and no error"),
        (Turn(metrics={"a": float("nan")}), "the a is nan"),
        (Turn(extracted=3), "the field extracted is 3, not a text"),  # type: ignore[arg-type]
        (Turn(reward=None, error=KeyError("x")), "the field error is KeyError"),  # type: ignore[arg-type]
    ],
)
def test_what_no_turn_can_be_is_named(turn: Any, why: str) -> None:
    found = fault_of(turn)
    assert why in found
    assert bool(found) == bool(why)
