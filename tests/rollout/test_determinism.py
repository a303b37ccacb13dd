"""A sample is a function of its prompt and its seed: ids and log-probabilities are bit-equal whatever is decoded beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.config.schema import Lora
from lockstep.learner.adapters import attach
from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.types import Completion, Request, Sampling
from tests.learner.models import plain, tokens, twin
from tests.rollout.engines import engine_over, finish, request

STOPS = tuple(range(3, 3000, 11))
"""Many end tokens, so that completions end at different times and slots are refilled in the middle."""
KINDS = (
    Sampling(24),
    Sampling(13, temperature=0.7, top_p=0.9),
    Sampling(24, temperature=0.0),
    Sampling(18, temperature=1.3, top_k=50, min_p=0.01, ignore_eos=True),
)
PROMPTS = (1, 5, 17, 40, 150, 270)
"""Lengths. The longest pass the blocks of keys that sums are cut into, and are not multiples of them."""
MODELS = ("fp32", "bf16", "lora", "wide", "gemma2", "llama-mqa")


@cache
def model(name: str) -> nn.Module:
    match name:
        case "fp32":
            return twin(plain("llama"))
        case "bf16":
            return twin(plain("llama-tied", dtype=torch.bfloat16))
        case "lora":
            adapted = attach(twin(plain("qwen2")), Lora(rank=8), seed=1)  # type: ignore[arg-type]
            generator = torch.Generator().manual_seed(2)
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            return adapted
        case "wide":  # the shapes of SmolLM2-135M but for depth and vocabulary: other kernels than for tiny matrices
            return _wide()
        case _:
            return twin(plain(name))


def _wide() -> nn.Module:
    config = LlamaConfig(
        vocab_size=3000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    config._attn_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@cache
def requests() -> tuple[Request, ...]:
    """Five samples of each prompt; the long ones begin alike, and say so."""
    prompts = {length: tokens(length, length) for length in PROMPTS}
    prompts |= {length: (*tokens(20, 20), *tokens(length - 20, length)) for length in PROMPTS if length > 20}
    return tuple(
        request(
            f"{length}/{sample}",
            prompts[length],
            kind,
            group=str(length),
            seed=1000 * length + sample,
            prefix=20 if length > 20 else 0,
        )
        for length in PROMPTS
        for sample, kind in enumerate((*KINDS, KINDS[0]))
    )


@cache
def expected(name: str) -> dict[str, Completion]:
    done = finish(engine(name, 64), requests())
    lengths = {len(completion.ids) for completion in done.values()}
    assert len(lengths) > 4, "the completions should differ in length, or nothing is refilled"
    return done


def engine(name: str, slots: int) -> NativeEngine:
    return engine_over(model(name), slots, STOPS)


def shuffled(seed: int) -> list[Request]:
    mixed = list(requests())
    random.Random(seed).shuffle(mixed)
    return mixed


@pytest.mark.sampled(8)
@pytest.mark.parametrize("slots", [1, 3, 5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_slots_and_any_order(name: str, slots: int):
    assert finish(engine(name, slots), shuffled(slots)) == expected(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_alone(name: str):
    # Of each group, one sample alone in a fresh engine and one alone in an engine with room for many.
    for wanted in requests()[::5]:
        assert finish(engine(name, 1), [wanted]) == {wanted.id: expected(name)[wanted.id]}
    for wanted in requests()[1::5]:
        assert finish(engine(name, 64), [wanted]) == {wanted.id: expected(name)[wanted.id]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_arrive_while_others_are_read(name: str):
    waiting = sorted(shuffled(99), key=lambda r: -len(r.prompt_ids))  # the longest last: room is made while others run
    busy = engine(name, 4)
    busy.submit([waiting.pop()])
    found: dict[str, Completion] = {}
    for completion in busy.completed():
        found[completion.request.id] = completion
        if waiting:
            busy.submit([waiting.pop() for _ in range(min(2, len(waiting)))])
    assert found == expected(name)


def test_reading_may_be_broken_off_and_taken_up_again():
    broken = engine("fp32", 5)
    broken.submit(shuffled(5))
    found: dict[str, Completion] = {}
    while len(found) < len(requests()):
        for completion in broken.completed():
            assert completion.request.id not in found
            found[completion.request.id] = completion
            if len(found) % 3 == 0:
                break
    assert found == expected("fp32")
    assert list(broken.completed()) == []


def test_a_used_engine_answers_like_a_fresh_one():
    used = engine("fp32", 3)
    finish(used, [request(f"other{i}", tokens(30 + i, i), Sampling(40), seed=i) for i in range(7)])
    assert finish(used, shuffled(1)) == expected("fp32")
    used.close()
    used.load(iter(()), 0)
    assert finish(used, shuffled(2)) == expected("fp32")


def test_scores_do_not_depend_on_what_is_scored_beside():
    scorer = engine("fp32", 4)
    sequences = [tokens(n, n) for n in (2, 3, 17, 60, 300)]
    together = scorer.score(sequences)
    assert [scorer.score([ids])[0] for ids in sequences] == together


def test_different_seeds_and_prompts_give_different_samples():
    done = expected("fp32")
    same_kind: Sequence[tuple[int, ...]] = [done[f"{n}/{s}"].ids for n in PROMPTS for s in (0, 4)]
    assert len(set(same_kind)) > len(same_kind) // 2
