"""What vLLM is asked for, and where a reply is cut off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import EngineError, StaleWeightsError
from lockstep.rollout.requests import check_groups, stopped_at
from lockstep.rollout.vllm.requests import (
    STRIDE,
    Asked,
    Pending,
    asked_of,
    check_servable,
    completion_of,
    look,
    streams,
)
from lockstep.types import FinishReason, Request, Sampling
from tests.rollout.engines import request, spelled


def test_everything_that_changes_a_sample_is_asked_for():
    sampling = Sampling(17, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    assert asked_of(request("a", (1, 2), sampling, seed=12), (7, 9), seeded=True) == Asked(
        max_tokens=17,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        seed=12,
        stop_token_ids=[7, 9],
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def test_without_seeds_and_without_ends():
    asked = asked_of(request("a", (1,), Sampling(3, ignore_eos=True), seed=12), (7, 9), seeded=False)
    assert (asked.seed, asked.stop_token_ids) == (None, [])


def test_seeds_fit_a_signed_64_bit_integer():
    assert asked_of(request("a", (1,), Sampling(3), seed=2**64 - 1), (), seeded=True).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (request("a", (), Sampling(3)), "has an empty prompt"),
        (request("a", (1,), Sampling(0)), "allows no new token"),
        (request("a", (1, 2), Sampling(3), prefix=2), "shared prefix has 2"),
        (request("a", (1, 2), Sampling(3), prefix=-1), "shared prefix has -1"),
        (request("a", (1,) * 60, Sampling(41)), "context of 100"),
        (request("a", (1,), Sampling(3, temperature=2.5)), "temperature 2.5"),
        (request("a", (1,), Sampling(3, temperature=0.001)), "temperature 0.001"),
    ],
)
def test_what_cannot_be_served_is_refused(bad: Request, told: str):
    with pytest.raises(EngineError, match=told):
        check_servable(bad, 0, 100)


def test_what_can_be_served_is_not():
    for sampling in (
        Sampling(40),
        Sampling(1, temperature=0),
        Sampling(1, temperature=2),
        Sampling(1, temperature=0.01),
    ):
        check_servable(request("a", (1,) * 60, sampling, prefix=59), 0, 100)


def test_another_version_is_refused():
    with pytest.raises(StaleWeightsError, match="needs version 3 of the weights, but the engine holds version 2"):
        check_servable(request("a", (1,), Sampling(3), version=3), 2, 100)


def test_a_group_has_one_prompt():
    there = {"g": (1, 2)}
    check_groups([request("a", (1, 2), Sampling(1), group="g"), request("b", (3,), Sampling(1), group="h")], there)
    with pytest.raises(EngineError, match="group h have different prompts"):
        check_groups([request("c", (4,), Sampling(1), group="h")], there)


# --- stop strings ---------------------------------------------------------------------------------------------------
def brute(ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """The first number of tokens whose text holds a stop string."""
    return next((n for n in range(1, len(ids) + 1) if any(stop in spelled(ids[:n]) for stop in stops)), None)


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    stops=st.lists(st.text("01234,", min_size=1, max_size=6), min_size=1, max_size=3),
    growth=st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_a_reply_is_cut_at_the_token_that_completes_a_stop_string(ids: list[int], stops: list[str], growth: list[int]):
    """However the reply grows, and whatever was sampled beyond."""
    pending, seen = Pending(request("a", (1,), Sampling(60, stop=tuple(stops)))), 0
    found = None
    for more in growth:
        seen = min(len(ids), seen + more)
        found = look(pending, ids[:seen], False, spelled)
        if found is not None:
            break
    if found is None:
        found = look(pending, ids, True, spelled)
    assert found == brute(ids, stops)


def test_a_running_reply_is_looked_at_every_few_tokens():
    looked = []

    def decode(ids: Sequence[int]) -> str:
        looked.append(len(ids))
        return spelled(ids)

    pending = Pending(request("a", (1,), Sampling(60, stop=("never",))))
    for length in range(1, 41):
        assert look(pending, [1] * length, False, decode) is None
    assert len(looked) == 40 // STRIDE


def test_a_stop_string_across_the_place_where_was_looked_before():
    ids = [1] * 7 + [2, 3] + [1] * 7
    pending = Pending(request("a", (1,), Sampling(60, stop=("2,003",))))
    assert look(pending, ids[:8], False, spelled) is None
    assert pending.searched == 8
    assert look(pending, ids, False, spelled) == 9


def test_characters_that_are_not_whole_yet():
    """One character of three bytes, a token each: only the third shows it."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    ids = list("abc \u20ac stop".encode())
    assert stopped_at(ids, 0, ["\u20ac"], decode) == 7
    assert stopped_at(ids, 0, ["\u20ac s"], decode) == 9
    assert stopped_at(ids[:6], 0, ["\u20ac"], decode) is None


def test_a_stop_string_longer_than_the_window():
    ids = list(range(150))
    stop = spelled(ids[10:130])
    assert stopped_at(ids, 0, [stop], spelled) == brute(ids, [stop]) == 130


def test_what_ignores_the_end_is_not_looked_at():
    assert not streams(request("a", (1,), Sampling(3, stop=("x",), ignore_eos=True)))
    assert not streams(request("a", (1,), Sampling(3)))
    assert streams(request("a", (1,), Sampling(3, stop=("x",))))
    pending = Pending(request("a", (1,), Sampling(3, stop=("0",), ignore_eos=True)))
    assert look(pending, [1, 2, 3], True, spelled) is None


# --- completions ----------------------------------------------------------------------------------------------------
def test_a_completion_is_cut_in_ids_and_logprobs():
    pending = Pending(request("a", (1,), Sampling(9, stop=("x",))))
    done = completion_of(pending, [5, 6, 7], [-1.0, -2.0, -3.0], 2, None, 4)
    assert (done.ids, done.logprobs, done.finish, done.version) == ((5, 6), (-1.0, -2.0), FinishReason.STOP, 4)
    assert done.request is pending.request


@pytest.mark.parametrize(("reason", "finish"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
def test_vllms_reasons(reason: str, finish: FinishReason):
    done = completion_of(Pending(request("a", (1,), Sampling(9))), [5], [-1.0], None, reason, 0)
    assert (done.ids, done.finish) == ((5,), finish)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_other_reasons_are_errors(reason: str | None):
    with pytest.raises(EngineError, match="vLLM ended the reply for an unexpected reason"):
        completion_of(Pending(request("a", (1,), Sampling(9))), [5], [-1.0], None, reason, 0)


def test_tokens_without_logprobs_are_an_error():
    with pytest.raises(EngineError, match="1 log-probabilities for a reply of 2 tokens"):
        completion_of(Pending(request("a", (1,), Sampling(9))), [5, 6], [-1.0], None, "stop", 0)
