from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import batch_indices


def test_an_epoch_takes_every_index_once():
    taken = [i for step in range(10) for i in batch_indices(step, 10, 100, seed=7)]
    assert sorted(taken) == list(range(100))
    assert taken != list(range(100))


def test_epochs_and_seeds_have_their_own_order():
    first = [batch_indices(step, 10, 100, seed=7) for step in range(10)]
    second = [batch_indices(step, 10, 100, seed=7) for step in range(10, 20)]
    other = [batch_indices(step, 10, 100, seed=8) for step in range(10)]
    assert first != second
    assert first != other


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(0, 30), st.integers(0, 2**31))
def test_batches_are_pure_and_without_repeats(step, size, extra, seed):
    batch = batch_indices(step, size, size + extra, seed)
    assert len(set(batch)) == size
    assert all(0 <= i < size + extra for i in batch)
    assert batch == batch_indices(step, size, size + extra, seed)


def test_indices_left_out_change_from_epoch_to_epoch():
    # 10 indices in batches of 4: two steps an epoch, two indices left out.
    left_out = [
        frozenset(range(10)) - {*batch_indices(2 * e, 4, 10, 0), *batch_indices(2 * e + 1, 4, 10, 0)} for e in range(50)
    ]
    assert all(len(rest) == 2 for rest in left_out)
    assert frozenset().union(*left_out) == frozenset(range(10))


def test_positions_are_uniform():
    # Of 2000 epochs each index should come first in about 200; 5 standard deviations are 67.
    firsts = [batch_indices(epoch, 10, 10, seed=1)[0] for epoch in range(2000)]
    assert all(abs(firsts.count(i) - 200) < 67 for i in range(10))


def test_the_order_is_pinned():
    # Changing it changes every run: a resumed run would no longer equal an unbroken one.
    assert batch_indices(0, 4, 1000, seed=0) == (482, 749, 158, 655)


@pytest.mark.parametrize(("step", "size", "pool"), [(-1, 1, 1), (0, 0, 1), (0, 2, 1)])
def test_impossible_batches(step, size, pool):
    with pytest.raises(ValueError, match="cannot draw"):
        batch_indices(step, size, pool, seed=0)
