"""Pages kept between turns: the same samples with less work, every page owned or free, and given up when others need them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import schema
from lockstep.models import exact
from lockstep.rollout.kept import Kept
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.rollout.paged.state import PAGE
from lockstep.serve.thread import EngineThread
from lockstep.tasks.multi_turn import build_own
from lockstep.types import ClientRequest, Completion, Forward, Request, Sampling, TokenIds
from tests.envs.played import LIMITS, OWN, chat_of, engine_of, play
from tests.learner.models import logprobs_of, plain, tokens, twin
from tests.rollout.engines import finish, request
from tests.rollout.paged.test_engine import TOLERANCE, paged_over
from tests.rollout.test_kept import played


def check_pages(engine: PagedEngine) -> None:
    """Every page has exactly its owners, or is free."""
    owners = Counter[int]()
    for pages in engine._pool.kept._kept.values():
        owners.update(pages)
    for prompt in engine._pool.prompts.values():
        owners.update(prompt.pages)
    for row in engine._active:
        owners.update(row.own)
    assert owners == engine._cache._owners
    assert sorted([*owners, *engine._cache._free]) == list(range(1, engine._cache.pages + 1))


def say_the_same(kept: list[Completion], without: list[Completion], tolerance: float = TOLERANCE) -> None:
    assert [one.ids for one in kept] == [one.ids for one in without]
    for one, other in zip(kept, without, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=tolerance)


@pytest.mark.sampled("gemma2", "gpt-oss")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_turns_say_the_same_and_process_less(family: str):
    kept, plainly = paged_over(twin(plain(family))), paged_over(twin(plain(family)))
    say_the_same(played(kept, keep=True), played(plainly, keep=False))
    check_pages(kept)
    assert plainly.reused == 0
    assert kept.processed + kept.reused == plainly.processed
    assert 2 * kept.processed < plainly.processed
    kept.forget()
    assert kept._cache.pages == 0


def test_replies_are_reused_to_the_token_and_pages_are_shared_not_moved():
    engine = paged_over(twin(plain("llama")))
    first = replace(request("a", tokens(100, 1), Sampling(50, ignore_eos=True)), keep=True)
    history = first.prompt_ids + finish(engine, [first])["a"].ids
    (pages,) = engine._pool.kept._kept.values()
    rest = tokens(9, 2)
    asked = [replace(request(str(i), history + rest, Sampling(4), group="g", seed=i), keep=True) for i in range(3)]
    engine.submit(asked)
    engine._admit()
    assert engine.reused == 149  # all but the last sampled token, which no step has fed
    assert engine._pool.prompts["g"].pages[:2] == pages[:2]
    assert engine._pool.prompts["g"].pages[2] != pages[2]
    check_pages(engine)
    assert len(list(engine.completed())) == 3


def test_prompts_of_one_group_and_forks_from_the_middle_share_pages_of_running_rows():
    engine, model = paged_over(twin(plain("llama"))), plain("llama")
    ids = tokens(3 * PAGE, 1)
    engine.submit([replace(request("a", ids, Sampling(30, ignore_eos=True)), keep=True, room=9 * PAGE)])
    forks = [replace(request(f"{n}", ids[:n] + tokens(20, n), Sampling(9), seed=n), keep=True) for n in (70, 150)]
    asked = iter([forks])
    done = list(engine.completed(lambda: engine.submit(next(asked, []))))
    assert engine.reused == 70 + 150
    for one in done:
        expected = logprobs_of(model, one.request.prompt_ids + one.ids).numpy()[len(one.request.prompt_ids) - 1 :]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE)
    check_pages(engine)


def limit_pool(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Leave memory for so many pages."""
    size = engine._cache.bytes_per_page

    def free(device: torch.device) -> float:
        return (pages + 0.5) * size / 0.9 - engine._cache.pages * size

    monkeypatch.setattr("lockstep.rollout.paged.pool.free_bytes", free)


@pytest.mark.parametrize("pages", [9, 14, 40])
def test_kept_pages_are_given_up_first_and_the_pool_stays_within_the_memory(
    pages: int, monkeypatch: pytest.MonkeyPatch
):
    kept, plainly = paged_over(twin(plain("llama"))), paged_over(twin(plain("llama")))
    without = played(plainly, keep=False, turns=5)
    limit_pool(kept, monkeypatch, pages)
    say_the_same(played(kept, keep=True, turns=5), without)
    assert kept._cache.pages <= pages
    check_pages(kept)


def test_the_pool_is_no_larger_than_without_keeping(monkeypatch: pytest.MonkeyPatch):
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for keep, seen in sizes.items():
        engine = paged_over(twin(plain("llama")))
        reserve = engine._reserve
        monkeypatch.setattr(engine, "_reserve", lambda r=reserve, e=engine, s=seen: (r(), s.append(e._cache.pages)))
        played(engine, keep=keep, turns=6)
    assert len(sizes[True]) == len(sizes[False]) == 6
    assert sizes[True] == [max(sizes[False][: turn + 1]) for turn in range(6)]


@pytest.mark.parametrize("change", ["load", "numerics", "score", "forget", "close", "scaling"])
def test_nothing_is_taken_over_once_the_model_computes_otherwise(change: str):
    engine = paged_over(twin(plain("llama")))
    asked = replace(request("a", tokens(80, 1), Sampling(4)), keep=True)
    finish(engine, [asked])
    finish(engine, [replace(asked, id="b")])
    assert engine.reused == 79
    match change:
        case "load":
            engine.load(iter(()), 0)
        case "numerics":
            engine.set_forward(Forward())
        case "score":
            engine.score([tokens(9, 1)])
        case "forget":
            engine.forget()
        case "close":
            engine.close()
        case "scaling":
            engine._scalings.append({"default": 2.0})
    if change != "scaling":
        assert engine._cache.pages == 0
    finish(engine, [asked])
    assert engine.reused == 79


class Clients:
    """Conversations drawn by chance: they go on, fork, are rewritten, cancelled and broken off, and weights come between."""

    def __init__(self, seed: int) -> None:
        self.chance, self.count, self.checked = random.Random(seed), 0, 0
        self.reference = plain("llama")
        self.engine = paged_over(twin(self.reference), slots=4)
        self.histories: list[TokenIds] = [tokens(90, seed)]

    def ask(self) -> list[Request]:
        ids = self.chance.choice(self.histories)
        match self.chance.randrange(4):
            case 0:  # a fork, or a history that was rewritten
                ids = ids[: self.chance.randint(1, len(ids))]
            case 1:
                ids = tokens(self.chance.randint(1, 150), self.count)
        ids = (*ids[-350:], *tokens(self.chance.randint(1, 70), self.count))
        self.count += 1
        sampling = Sampling(self.chance.choice([1, 5, 20, 70]), ignore_eos=True)
        asked = request(f"{self.count}", ids, sampling, group=f"g{self.count}", version=self.engine.version)
        asked = replace(asked, keep=self.chance.random() < 0.8, room=self.chance.choice([0, 0, 700]))
        return [replace(asked, id=f"{asked.id}/{i}", seed=i) for i in range(self.chance.choice([1, 1, 3]))]

    def round(self) -> None:
        engine, chance = self.engine, self.chance
        asked = [one for _ in range(chance.randint(1, 4)) for one in self.ask()]
        breaks = chance.random() < 0.1

        def between() -> None:
            check_pages(engine)
            if chance.random() < 0.2:
                engine.cancel(chance.choice(asked).id)
            if chance.random() < 0.1:
                asked.extend(more := self.ask())
                engine.submit(more)
            if breaks and chance.random() < 0.3:
                raise InterruptedError

        engine.submit(asked)
        done = []
        try:
            for one in engine.completed(between):
                done.append(one)
                if chance.random() < 0.1:  # while the next steps are under way
                    engine.cancel(chance.choice(asked).id)
                    check_pages(engine)
        except InterruptedError:
            assert engine._cache.pages == 0
            done = []
        assert engine.held == 0
        check_pages(engine)
        for one in done:
            self.histories.append(one.request.prompt_ids + one.ids)
        for one in done[:2]:
            expected = logprobs_of(self.reference, one.request.prompt_ids + one.ids).numpy()
            np.testing.assert_allclose(one.logprobs, expected[len(one.request.prompt_ids) - 1 :], atol=TOLERANCE)
            self.checked += 1
        self.histories = self.histories[-6:]
        if chance.random() < 0.05:
            engine.load(iter(()), engine.version + 1)
            assert engine._cache.pages == 0


def talk(seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> Clients:
    clients = Clients(seed)
    limit_pool(clients.engine, monkeypatch, clients.chance.choice([19, 30, 500]))
    for _ in range(rounds):
        clients.round()
    clients.engine.forget()
    assert clients.engine._cache.pages == 0
    return clients


@hypothesis.settings(max_examples=25, deadline=None)  # half a second each
@given(seed=st.integers(0, 10_000))
def test_no_page_is_lost_in_any_conversation(seed: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        talk(seed, 4, monkeypatch)


@pytest.mark.slow
def test_no_page_is_lost_in_hundreds_of_requests(monkeypatch: pytest.MonkeyPatch):
    clients = talk(1, 120, monkeypatch)
    print(f"{clients.count} prompts, {clients.checked} replies compared; tokens reused: {clients.engine.reused}")
    assert clients.count >= 250
    assert clients.engine.reused > 10_000


def test_episodes_of_an_environment_process_less_than_half_and_keep_nothing_at_their_end(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = schema.EnvTask(path=f"{OWN}:Tool", seeds=8, turns=LIMITS.model_copy(update={"limit": 10}))
    processed, rollouts = [], []
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(Kept, "keep", lambda self, ids, value: self._dropped(value))
        engine, task = engine_of(tiny_model_dir, kind=PagedEngine), build_own(settings, 0)
        done = play(engine, chat_of(tiny_model_dir), task, task.batch(0, 3), budget=440)
        assert all(one.rollout.turns >= 8 for one in done.values())
        processed.append(engine.processed)
        rollouts.append([one.rollout for one in done.values()])
    print(f"tokens processed: {processed[0]} with kept pages, {processed[1]} without")
    assert [one.ids for one in rollouts[0]] == [one.ids for one in rollouts[1]]
    for one, other in zip(*rollouts, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
    assert 2 * processed[0] < processed[1]


def test_a_thread_keeps_pages_while_nothing_runs_and_frees_them_at_its_end(tiny_model_dir: Path):
    engine = engine_of(tiny_model_dir, kind=PagedEngine)
    with EngineThread(engine) as thread:
        ids = tokens(80, 1)
        for turn in range(4):
            done = thread.sample(ClientRequest(f"{turn}", "client", ids, Sampling(20, ignore_eos=True))).result(60)
            ids += (*done.ids, *tokens(5, turn))
        assert engine.reused == 99 + 124 + 149
    assert engine._cache.pages == 0


# --- on a GPU -------------------------------------------------------------------------------------------------------
def on_cuda(dtype: torch.dtype, *, exactly: bool = False) -> PagedEngine:
    """An engine over random weights, of a shape that runs exactly; captured steps, Triton kernels."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lockstep.build.exactness import settle_exactness
    from lockstep.config.schema import Recipe
    from lockstep.models.attention import NAME
    from lockstep.models.fused_layers import fuse_layers

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
    config = Qwen2Config(
        vocab_size=5000, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **shape
    )
    model: Any = Qwen2ForCausalLM._from_config(config, attn_implementation=NAME).to("cuda", dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    if exactly:
        fuse_layers(model)
        settle_exactness(
            model, Recipe.model_validate({"numerics": {"exact": True}, "adapter": {"kind": "none"}, "steps": 20})
        )
        assert exact.enabled(), exact.line()
    return paged_over(model)


@pytest.fixture
def off_again():
    yield
    exact.enable("", on=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "bf16", "exact"])
def test_turns_on_a_gpu_with_and_without_kept_pages(kind: str, off_again: None):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    kept, plainly = (on_cuda(dtype, exactly=kind == "exact") for _ in range(2))
    with_pages, without = played(kept, keep=True), played(plainly, keep=False)
    print(f"{kind}: tokens processed: {kept.processed} with kept pages, {plainly.processed} without")
    check_pages(kept)
    assert 2 * kept.processed < plainly.processed
    if kind == "exact":
        assert [(one.ids, one.logprobs) for one in with_pages] == [(one.ids, one.logprobs) for one in without]
        return
    # Rounding may turn a draw, so each is compared with the scores of its own tokens.
    for engine, done in ((kept, with_pages), (plainly, without)):
        scored = engine.score([one.request.prompt_ids + one.ids for one in done])
        for one, scores in zip(done, scored, strict=True):
            found = np.subtract(one.logprobs, scores[len(one.request.prompt_ids) - 1 :])
            assert np.abs(found).mean() < (1e-3 if kind == "fp32" else 0.05)
