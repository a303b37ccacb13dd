from __future__ import annotations

import datetime
from collections import OrderedDict, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from types import MappingProxyType

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


def test_subclasses_come_back_as_their_base():
    values = [
        OrderedDict(a=1),
        MappingProxyType({1: (2,)}),
        namedtuple("Two", "a b")(1, [2]),
        type("List", (list,), {})([(3,)]),
        type("Name", (str,), {})("n"),
        {type("Name", (str,), {})("k"): IntEnum("One", "a").a},
        np.float64(0.5),
    ]
    back = wire.loads(wire.dumps(values))
    assert back == [{"a": 1}, {1: (2,)}, (1, [2]), [(3,)], "n", {"k": 1}, 0.5]
    assert [type(one) for one in back] == [dict, dict, tuple, list, str, dict, float]


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"a\[1\].b is a object, which cannot be sent"):
        wire.dumps({"a": [0, {"b": object()}]})
    with pytest.raises(TypeError, match=r"^messages\[0\].content is a object, which cannot be sent"):
        wire.dumps(Prompt("t/1", ({"role": "user", "content": object()},), "7"))  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match=r"^a.\(1, 2\)\[1\] is a Sub, which cannot be sent"):
        wire.dumps({"a": {(1, 2): (Decimal(1), type("Sub", (Decimal,), {})(1))}})
    with pytest.raises(TypeError, match=r"^the value is a object, which cannot be sent"):
        wire.dumps(object())
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(TypeError, match="contains itself"):
        wire.dumps(ring)


def test_prompts_and_grades():
    prompt = Prompt("t/1", ({"role": "user", "content": "?"},), "7", "t", {"a": (1,)}, "[]")
    assert wire.loads(wire.dumps(prompt)) == prompt
    grade = Grade(0.5, {"correct": 0.0}, "7", "boxed", None)
    assert wire.loads(wire.dumps([grade, {"a": grade}])) == [grade, {"a": grade}]
