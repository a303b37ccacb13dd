"""Keys and values kept between turns: samples and log-probabilities are bit-equal to those without, with less work."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import schema
from lockstep.rollout.kept import Kept
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.slots import Prefix
from lockstep.tasks.multi_turn import build_own
from lockstep.types import Completion, Sampling, TokenIds
from tests.envs.played import LIMITS, OWN, chat_of, engine_of, play
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import engine_over, finish, request
from tests.rollout.paged.test_engine import paged_over
from tests.rollout.test_determinism import model


def played(engine: NativeEngine, *, keep: bool, turns: int = 4, seed: int = 0) -> list[Completion]:
    """Conversations side by side: each turn is what was said before, the reply, and some new tokens."""
    chance = random.Random(seed)
    ids: dict[str, TokenIds] = {str(i): tokens(chance.randint(1, 150), i) for i in range(3)}
    said: list[Completion] = []
    for turn in range(turns):
        asked = [
            replace(
                request(f"{key}/{turn}", prompt, Sampling(chance.randint(1, 20), ignore_eos=True), seed=turn), keep=keep
            )
            for key, prompt in ids.items()
        ]
        done = finish(engine, asked)
        said += [done[one.id] for one in asked]
        for key in ids:
            ids[key] += done[f"{key}/{turn}"].ids + tokens(chance.randint(1, 60), turn)
        if turn == 2:  # a history that is rewritten in the middle
            ids["1"] = ids["1"][: len(ids["1"]) // 2] + tokens(9, 99)
    return said


@pytest.mark.sampled("bf16", "wide", "gemma2")
@pytest.mark.parametrize("name", ["fp32", "bf16", "wide", "gemma2", "llama-mqa"])
def test_bits_do_not_depend_on_what_is_kept(name: str):
    kept, plainly = engine_over(model(name)), engine_over(model(name))
    with_states, without = played(kept, keep=True), played(plainly, keep=False)
    assert [(c.ids, c.logprobs) for c in with_states] == [(c.ids, c.logprobs) for c in without]
    assert plainly.reused == 0
    assert kept.processed + kept.reused == plainly.processed
    assert 2 * kept.processed < plainly.processed


@given(seed=st.integers(0, 10_000))
def test_bits_of_any_conversation(seed: int):
    kept, plainly = (engine_over(model("fp32")) for _ in range(2))
    one, other = played(kept, keep=True, turns=3, seed=seed), played(plainly, keep=False, turns=3, seed=seed)
    assert [(c.ids, c.logprobs) for c in one] == [(c.ids, c.logprobs) for c in other]


def test_another_version_of_the_weights_uses_nothing_of_the_last():
    engine = engine_over(twin(plain("llama")))
    asked = replace(request("a", tokens(80, 1), Sampling(4)), keep=True)
    finish(engine, [asked])
    engine.load(iter(()), 1)
    finish(engine, [replace(asked, version=1)])
    assert engine.reused == 0
    finish(engine, [replace(asked, version=1)])
    assert engine.reused == 79


def test_the_longest_known_beginning_is_found_and_the_oldest_is_dropped():
    engine = engine_over(twin(plain("llama")))
    prompts = [(1, 2, 3), (1, 2, 3, 4, 5), (7, 8), (1, 2, 9)]
    for ids in prompts:
        finish(engine, [replace(request("a", ids, Sampling(1)), keep=True)])
    kept = engine._kept
    assert list(kept._kept) == [(7, 8), (1, 2, 3, 4, 5), (1, 2, 9)]

    def known(ids: TokenIds, least: int = 1) -> int:
        found = kept.longest(ids, least)
        return found[0] if found else 0

    assert known((1, 2, 3, 4, 6)) == 4
    assert known((1, 2, 3, 4, 5)) == 4  # the last is processed again: its logits are needed
    assert known((1, 2, 9, 9)) == 3
    assert known((9, 9)) == 0
    assert known((1, 2, 8, 8), 3) == 0
    small: Kept[Prefix] = Kept(kept.bytes - 1, lambda prefix: prefix.bytes)
    for ids in [(1, 2, 3, 4, 5), (7, 8), (1, 2, 9)]:
        small.keep(ids, kept._kept[ids])
    assert list(small._kept) == [(7, 8), (1, 2, 9)]
    assert small.bytes <= kept.bytes - 1


@pytest.mark.parametrize("make", [engine_over, paged_over])
def test_a_cancelled_request_frees_its_row_and_changes_no_other(make):
    asked = [
        request(f"{i}", tokens(20 + i // 2, i // 2), Sampling(40, ignore_eos=True), group=f"{i // 2}", seed=i)
        for i in range(8)
    ]
    whole = finish(make(twin(plain("llama"))), asked)
    engine = make(twin(plain("llama")))
    engine.submit(asked)
    steps, gone = 0, ("0", "2", "3", "6", "7")

    def between() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            for id in (*gone, "unknown"):
                engine.cancel(id)
            assert len(engine._active) <= 4 - 3

    done = {one.request.id: one for one in engine.completed(between)}
    assert sorted(done) == ["1", "4", "5"]
    assert engine.held == 0
    for id, one in done.items():
        assert one.ids == whole[id].ids
        assert one.logprobs == pytest.approx(whole[id].logprobs, abs=0 if make is engine_over else 1e-4)
    engine.cancel("1")
    finish(engine, asked[:1])


def test_episodes_of_ten_turns_process_less_than_half(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    settings = schema.EnvTask(path=f"{OWN}:Tool", seeds=8, turns=LIMITS.model_copy(update={"limit": 10}))
    processed, ids = [], []
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(Kept, "keep", lambda self, ids, prefix: None)
        engine, task = engine_of(tiny_model_dir), build_own(settings, 0)
        played = play(engine, chat_of(tiny_model_dir), task, task.batch(0, 3), budget=440)
        assert all(one.rollout.turns >= 8 for one in played.values())
        processed.append(engine.processed)
        ids.append([(one.rollout.ids, one.rollout.logprobs) for one in played.values()])
    print(f"tokens processed: {processed[0]} with kept prompts, {processed[1]} without")
    assert ids[0] == ids[1]
    assert 2 * processed[0] < processed[1]
