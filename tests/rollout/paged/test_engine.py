"""The paged engine on a CPU, where plain torch stands in for the kernels: what it samples is what the unpaged engine samples."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from lockstep.config.schema import Lora
from lockstep.errors import EngineError
from lockstep.learner.adapters import attach
from lockstep.models.attention import NAME
from lockstep.models.decoder import Decoder
from lockstep.models.small import random_model, small_config
from lockstep.models.weights import load_weights, named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged import engine as engines
from lockstep.rollout.paged import prefill
from lockstep.rollout.paged import snapshot as snapshots
from lockstep.rollout.paged.engine import CHUNK, PagedEngine
from lockstep.rollout.paged.forms import FAMILIES as FORMS
from lockstep.rollout.paged.scheduler import Running
from lockstep.rollout.paged.snapshot import Snapshot
from lockstep.rollout.paged.state import PAGE, Rows
from lockstep.types import Request, Sampling
from tests.docs.models_page import default
from tests.learner.models import FAMILIES, logprobs_of, plain, tokens, twin
from tests.rollout.engines import engine_over, finish, request, spelled

TOLERANCE = 1e-4
FUSED = (
    "llama",
    "llama-mqa",
    "llama-tied",
    "qwen2",
    "qwen3",
    "mistral",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
    "gemma2",
    "gemma3",
)
FUSED += ("phi3", "glm4", "smollm3", "gemma", "glm4-moe")


def paged_over(model: nn.Module, slots: int = 4, stop_ids: Iterable[int] = (), *, fused: bool = True) -> PagedEngine:
    engine = PagedEngine(model, slots=slots, stop_ids=frozenset(stop_ids), decode=spelled, fused=fused)
    engine.load(iter(()), 0)
    return engine


def mixed_requests(budget: int = 40) -> list[Request]:
    """Prompts of less than a page, exactly one, and more; three samples each; budgets that differ."""
    return [
        request(
            f"{group}/{i}",
            tokens(length, length),
            Sampling(budget - i, ignore_eos=True),
            group=str(group),
            seed=10 * group + i,
        )
        for group, length in enumerate((1, 5, PAGE, 30, PAGE + 36))
        for i in range(3)
    ]


UNEVEN = ("gemma4", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "qwen3.5")
"""Heads of two sizes, or states: pages have one size."""


@pytest.mark.parametrize("family", UNEVEN)
def test_a_model_without_one_size_of_heads_is_not_for_it(family: str):
    assert not Decoder.of(plain(family)).head_size


@pytest.mark.sampled("gemma2", "gpt-oss", "llama-tied", "qwen3-moe")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNEVEN])
def test_it_samples_and_scores_as_transformers_does(family: str):
    reference = plain(family)
    engine = paged_over(twin(reference))
    assert (engine._fused is not None) == (family in FUSED)
    asked = mixed_requests()
    done = finish(engine, asked)
    other = finish(engine_over(twin(reference)), asked)
    whole = {name: (*d.request.prompt_ids, *d.ids) for name, d in done.items()}
    scored = dict(zip(whole, engine.score(list(whole.values())), strict=True))
    for name, d in done.items():
        expected = logprobs_of(reference, whole[name]).numpy()
        np.testing.assert_allclose(d.logprobs, expected[len(d.request.prompt_ids) - 1 :], atol=TOLERANCE)
        np.testing.assert_allclose(scored[name], expected, atol=TOLERANCE)
    # A number that falls between two tokens' bounds by less than rounding may go either way: not more than one sample may differ.
    assert sum(done[name].ids != other[name].ids for name in done) <= 1


def test_pages_have_as_many_heads_as_attention_gets_keys_of():
    """JetMoE repeats its keys for each expert itself; its config counts them before."""
    config = small_config(hf.JetMoeConfig())
    config.max_position_embeddings = 256
    reference = random_model(hf.JetMoeForCausalLM, config, "eager")
    for done in finish(paged_over(twin(reference)), mixed_requests()).values():
        expected = logprobs_of(reference, (*done.request.prompt_ids, *done.ids)).numpy()
        np.testing.assert_allclose(done.logprobs, expected[len(done.request.prompt_ids) - 1 :], atol=TOLERANCE)


@pytest.mark.parametrize("family", FUSED)
def test_the_models_own_forward_pass_says_the_same_as_fused_blocks(family: str):
    model = twin(plain(family))
    fused, own = (finish(paged_over(model, fused=fused), mixed_requests(12)) for fused in (True, False))
    for name, done in fused.items():
        np.testing.assert_allclose(done.logprobs, own[name].logprobs, atol=TOLERANCE)


@pytest.mark.sampled("glm", "seed_oss")
@pytest.mark.parametrize("family", sorted(FORMS))
def test_published_configs_of_fused_families_say_the_same(family: str):
    """A small copy of what transformers' defaults or published models describe."""
    model = default(family)
    small = random_model(type(model), small_config(model.config), NAME)
    prompts = tokens(1, 1), tokens(5, 5), tokens(40, 40)
    asked = [
        request(f"{g}/{i}", p, Sampling(20, ignore_eos=True), group=str(g))
        for g, p in enumerate(prompts)
        for i in (0, 1)
    ]
    engines = paged_over(copy.deepcopy(small)), paged_over(small, fused=False)
    assert engines[0]._fused is not None
    fused, own = (finish(engine, asked) for engine in engines)
    for name, done in fused.items():
        assert done.ids == own[name].ids
        np.testing.assert_allclose(done.logprobs, own[name].logprobs, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", "all-linear"), ("qwen2", ["q_proj", "k_proj", "v_proj", "down_proj"]), ("qwen2", ["o_proj"]),
        ("phi3", "all-linear"), ("gemma3", "all-linear"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_act_in_fused_blocks(family: str, targets: str | list[str], merged: bool):
    model = attach(twin(plain(family)), Lora(rank=4, alpha=20, targets=targets, merged=merged), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=generator)
    engine = paged_over(model)
    assert engine._fused is not None
    done = finish(engine, mixed_requests(12))
    with model.disable_adapter():
        plain_done = finish(engine_over(model), mixed_requests(12))
    own = finish(engine_over(model), mixed_requests(12))
    for name, d in done.items():
        np.testing.assert_allclose(d.logprobs, own[name].logprobs, atol=TOLERANCE)
    assert any(done[name].ids != plain_done[name].ids for name in done)


def test_an_adapter_on_one_of_the_matrices_of_an_input_runs_unfused():
    model = attach(twin(plain("llama")), Lora(targets=["q_proj"]), seed=0)
    assert paged_over(model)._fused is None


def test_fused_weights_are_the_models_own():
    """Training writes to the parameters: decoding must read it there, in whatever order things are built."""
    reference, newer = plain("qwen2"), plain("qwen2", seed=5)
    model = twin(reference)
    first, second = paged_over(model), paged_over(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), newer.parameters(), strict=True):
            mine.copy_(theirs)
    for engine in (first, second):
        for name, d in finish(engine, mixed_requests(8)).items():
            expected = logprobs_of(newer, (*d.request.prompt_ids, *d.ids)).numpy()[len(d.request.prompt_ids) - 1 :]
            np.testing.assert_allclose(d.logprobs, expected, atol=TOLERANCE, err_msg=name)
        storages = {t.untyped_storage().data_ptr() for _, t in engine.weights()}
        assert storages == {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_a_parameter_that_was_put_elsewhere_is_seen_in_the_weights():
    """Decoding goes on reading the fused tensor: `weights` must say what it reads, so that the proof notices."""
    model = twin(plain("llama"))
    engine = paged_over(model)
    name = "model.layers.0.self_attn.k_proj.weight"
    parameter = model.get_parameter(name)
    parameter.data = parameter.data.clone() + 1
    assert not torch.equal(dict(engine.weights())[name], dict(named_weights(model))[name])


def test_new_weights_are_sampled_from():
    model, newer = twin(plain("llama")), plain("llama", seed=3)
    engine = paged_over(model)
    finish(engine, mixed_requests(4))
    engine.load(iter(list(named_weights(newer))), 1)
    asked = [request("a", tokens(9, 9), Sampling(20, ignore_eos=True), version=1)]
    done = finish(engine, asked)["a"]
    expected = logprobs_of(newer, (*done.request.prompt_ids, *done.ids)).numpy()[8:]
    np.testing.assert_allclose(done.logprobs, expected, atol=TOLERANCE)


def test_long_prompts_are_processed_in_pieces(monkeypatch: pytest.MonkeyPatch):
    for family in ("llama", "gemma2"):
        model = twin(plain(family))
        whole = finish(paged_over(model), mixed_requests(6))
        monkeypatch.setattr(prefill, "PREFILL_TOKENS", 48)
        pieces = finish(paged_over(model), mixed_requests(6))
        monkeypatch.undo()
        for name, done in whole.items():
            np.testing.assert_allclose(done.logprobs, pieces[name].logprobs, atol=TOLERANCE)


def test_rows_are_refilled_and_pages_come_back():
    engine = paged_over(twin(plain("llama")), slots=2)
    engine.submit(mixed_requests())
    total = engine._cache.free_pages
    seen = 0
    for _ in engine.completed():
        seen += 1
        assert len(engine._active) <= 2
        assert engine._cache.free_pages <= total
    assert seen == 15
    assert engine._cache.pages == 0
    assert not engine._pool.prompts


def test_what_does_not_fit_waits(monkeypatch: pytest.MonkeyPatch):
    """With memory for one sequence at a time all are served, one after the other, and say the same."""
    model = twin(plain("llama"))
    expected = finish(paged_over(model), mixed_requests())
    engine = paged_over(model)
    page = engine._cache.bytes_per_page
    monkeypatch.setattr("lockstep.rollout.paged.pool.free_bytes", lambda device: 6 * page / 0.9)
    found = finish(engine, mixed_requests())
    assert {name: d.ids for name, d in found.items()} == {name: d.ids for name, d in expected.items()}


def test_a_request_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch):
    engine = paged_over(twin(plain("llama")))
    monkeypatch.setattr("lockstep.rollout.paged.pool.free_bytes", lambda device: 3 * engine._cache.bytes_per_page)
    with pytest.raises(EngineError, match="pages of 64 tokens, but free memory holds only 2"):
        engine.submit([request("a", tokens(70, 1), Sampling(200))])
    assert not engine._cache.pages
    engine.load(iter(()), 0)  # nothing is left open of it
    monkeypatch.setattr("lockstep.rollout.paged.pool.free_bytes", lambda device: 5 * engine._cache.bytes_per_page)
    assert set(finish(engine, [request("b", tokens(5, 1), Sampling(9))])) == {"b"}


def test_sequences_that_cannot_be_scored_at_once_are_refused(monkeypatch: pytest.MonkeyPatch):
    engine = paged_over(twin(plain("llama")))
    monkeypatch.setattr("lockstep.rollout.paged.pool.free_bytes", lambda device: 3 * engine._cache.bytes_per_page)
    with pytest.raises(EngineError, match=r"3 sequences to score need 3 pages of 64 tokens, but only 2 fit"):
        engine.score([tokens(60, seed) for seed in range(3)])
    assert not engine._cache.pages
    assert len(engine.score([tokens(60, 0)])[0]) == 59


def test_cut_and_greedy_requests_side_by_side():
    model = twin(plain("llama"))
    kinds = (
        Sampling(12, temperature=0.0, ignore_eos=True),
        Sampling(12, temperature=0.7, top_k=3, ignore_eos=True),
        Sampling(12, top_p=0.6, ignore_eos=True),
        Sampling(12, min_p=0.2, ignore_eos=True),
        Sampling(12, temperature=1.5, ignore_eos=True),
    )
    asked = [request(str(i), tokens(7, i), kind, seed=i) for i, kind in enumerate(kinds)]
    mine, native = finish(paged_over(model), asked), finish(engine_over(model), asked)
    for name, done in mine.items():
        assert done.ids == native[name].ids
        np.testing.assert_allclose(done.logprobs, native[name].logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("kind", [NativeEngine, PagedEngine])
def test_half_read_completions_can_be_taken_up_again(kind: type):
    engine = kind(twin(plain("llama")), slots=2, stop_ids=frozenset(), decode=spelled)
    load_weights(engine._model, iter(()))
    engine.load(iter(()), 0)
    engine.submit(mixed_requests(10))
    first = [done.request.id for done in islice(engine.completed(), 4)]
    rest = [done.request.id for done in engine.completed()]
    assert len({*first, *rest}) == 15


@pytest.mark.parametrize("keep", [False, True])
def test_the_next_steps_are_started_before_what_ended_is_read(monkeypatch: pytest.MonkeyPatch, keep: bool):
    """A GPU decodes while replies are graded; only one that may have a next turn, which could begin at once, comes first."""
    engine, started = paged_over(plain("llama")), []
    start = engine._start_chunk
    monkeypatch.setattr(engine, "_start_chunk", lambda: started.append(len(engine._active)) or start())
    short, long = (
        request(name, tokens(5, 1), Sampling(n, ignore_eos=True)) for name, n in (("short", 3), ("long", 40))
    )
    engine.submit([replace(short, keep=keep), long])
    seen = {one.request.id: len(started) for one in engine.completed()}
    assert started == [2, 1, 1]
    assert seen == {"short": 1 if keep else 2, "long": 3}


def test_all_rows_are_filled_at_once_and_no_step_is_wasted(monkeypatch: pytest.MonkeyPatch):
    engine = paged_over(twin(plain("llama")), slots=16)
    steps = []
    sample = engine._step.sample
    monkeypatch.setattr(engine._step, "sample", lambda count: steps.append(count) or sample(count))
    asked = [
        request(f"{p}/{i}", tokens(9, p), Sampling(30, ignore_eos=True), group=str(p))
        for p in range(4)
        for i in range(4)
    ]
    finish(engine, asked)
    assert steps == [16] * 29  # the first token comes with the prompt


def test_the_last_step_of_a_chunk_is_made_while_what_ended_before_it_is_read(monkeypatch: pytest.MonkeyPatch):
    """A row that ends in it is read with the next chunk; its tokens, and those of rows that go on, are the same."""
    lengths = (CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK)  # the first token comes with the prompt
    model = twin(plain("llama"))
    engine, made, reads = paged_over(model, slots=4), [], []
    sample = engine._step.sample

    def read(rows: Rows, sequences: list[Running]) -> None:
        reads.append((len(made), [row for row, one in enumerate(sequences) if one.done]))
        snapshots.read_tokens(rows, sequences)

    monkeypatch.setattr(engine._step, "sample", lambda count: made.append(count) or sample(count))
    monkeypatch.setattr(engines, "read_tokens", read)
    asked = [request(str(n), tokens(9, n), Sampling(n, ignore_eos=True), group=str(n)) for n in lengths]
    found = finish(engine, asked)
    assert [len(found[str(n)].ids) for n in lengths] == list(lengths)
    # Two end in the first chunk: one before its last step, one in it. Of three left the next two end in the second.
    assert reads == [(CHUNK, [0]), (2 * CHUNK, [0, 1]), (3 * CHUNK - 1, [0])]
    alone = finish(paged_over(model, slots=1), asked)
    assert {key: one.ids for key, one in found.items()} == {key: one.ids for key, one in alone.items()}


def test_after_a_cancel_reads_wait_for_the_steps_behind_which_rows_moved(monkeypatch: pytest.MonkeyPatch):
    """A reply is handed out while a chunk runs; who gets it may cancel another, whose row is then filled by the next one."""
    engine, contexts, beside = paged_over(twin(plain("llama")), slots=4), [], Snapshot.beside

    def seen(snapshot: Snapshot, active: list[Running]) -> object:
        monkeypatch.setattr(snapshot, "_taken", object())  # as on a GPU
        contexts.append(beside(snapshot, active) == "beside")
        monkeypatch.setattr(snapshot, "_taken", None)
        return beside(snapshot, active)

    monkeypatch.setattr(Snapshot, "beside", seen)
    monkeypatch.setattr(snapshots, "_reading_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: "beside")
    lengths = {"short": 3, "cancelled": 60, "long": 60}
    engine.submit([request(name, tokens(5, 1), Sampling(n, ignore_eos=True)) for name, n in lengths.items()])
    found = {}
    for one in engine.completed():
        found[one.request.id] = one
        if one.request.id == "short":
            engine.cancel("cancelled")
    assert contexts[:3] == [True, False, True]
    alone = finish(
        paged_over(twin(plain("llama")), slots=1), [request("long", tokens(5, 1), Sampling(60, ignore_eos=True))]
    )
    assert found.keys() == {"short", "long"}
    assert found["long"].ids == alone["long"].ids


def test_prompts_that_wait_give_way_to_the_first_in_the_queue(monkeypatch: pytest.MonkeyPatch):
    """Samples of three groups in turn, with room for little more than one: no prompt may hold what the next one needs."""
    model = twin(plain("llama"))
    asked = [
        request(f"{p}/{i}", tokens(70, p), Sampling(60 + 60 * p, ignore_eos=True), group=str(p), seed=9 * p + i)
        for i in range(2)
        for p in range(3)
    ]
    expected = finish(paged_over(model), asked)
    engine = paged_over(model)
    monkeypatch.setattr(
        "lockstep.rollout.paged.pool.free_bytes", lambda device: 7.5 * engine._cache.bytes_per_page / 0.9
    )
    found = finish(engine, asked)
    assert {name: d.ids for name, d in found.items()} == {name: d.ids for name, d in expected.items()}


def test_a_running_group_takes_no_other_prompt():
    engine = paged_over(twin(plain("llama")))
    engine.submit([request("a", tokens(9, 1), Sampling(40, ignore_eos=True), group="g")])
    engine._admit()
    with pytest.raises(EngineError, match="have different prompts"):
        engine.submit([request("b", tokens(9, 2), Sampling(5), group="g")])
