from __future__ import annotations

import datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.types import Grade, Prompt
from lockstep.workers import wire

LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple), max_leaves=20
)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    line = wire.dumps(value)
    assert line.isascii()
    assert line.count(b"\n") == 1
    back = wire.loads(line)
    assert back == value
    assert type(back) is type(value)


def test_types_that_json_lacks():
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    values = [
        now,
        now.date(),
        now.time(),
        Decimal("1.10"),
        Fraction(1, 3),
        {1, 2},
        frozenset("a"),
        {"!": 1},
        float("inf"),
        "\ud800",
    ]
    assert wire.loads(wire.dumps(values)) == values
    assert wire.loads(wire.dumps([np.float32(0.5), np.int64(3), np.arange(3)])) == [0.5, 3, [0, 1, 2]]


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"a\[1\].b is a object, which cannot be sent"):
        wire.dumps({"a": [0, {"b": object()}]})
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(TypeError, match="contains itself"):
        wire.dumps(ring)


def test_prompts_and_grades():
    prompt = Prompt("t/1", ({"role": "user", "content": "?"},), "7", "t", {"a": (1,)}, "[]")
    assert wire.loads(wire.dumps(prompt)) == prompt
    grade = Grade(0.5, {"correct": 0.0}, "7", "boxed", None)
    assert wire.loads(wire.dumps([grade, {"a": grade}])) == [grade, {"a": grade}]
