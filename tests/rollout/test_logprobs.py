"""Log-probabilities and choices of the engine against transformers' own forward pass and generate()."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.types import Completion, FinishReason, Sampling
from tests.learner.models import logits_of, logprobs_of, plain, tokens, twin
from tests.rollout.contract import filtered
from tests.rollout.engines import engine_over, finish, request

LENGTHS = (1, 2, 16, 17, 33, 90)


@cache
def model() -> nn.Module:
    return plain("llama", attention="sdpa")


def sampled(sampling: Sampling, slots: int = 4) -> list[Completion]:
    """Two samples of each of several prompts, of which the longer ones have a prefix that is processed apart."""
    wanted = [
        request(
            f"{length}/{i}",
            (*tokens(length, 0)[:9], *tokens(length, length)[9:]),
            sampling,
            group=str(length),
            seed=7 * length + i,
            prefix=9 if length > 16 else 0,
        )
        for length in LENGTHS
        for i in range(2)
    ]
    return list(finish(engine_over(twin(model()), slots), wanted).values())


@torch.no_grad()
def distributions(done: Completion) -> np.ndarray:
    """Logits before each sampled token, float64, [tokens, V]."""
    prompt = done.request.prompt_ids
    logits_TV = logits_of(model(), (*prompt, *done.ids))
    rows: np.ndarray = logits_TV[len(prompt) - 1 : -1].double().numpy()
    return rows


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(20),
        Sampling(20, temperature=0.6),
        Sampling(20, temperature=1.5, top_k=8),
        Sampling(20, top_p=0.7),
        Sampling(20, min_p=0.1),
        Sampling(20, temperature=0.8, top_k=40, top_p=0.85, min_p=0.05),
    ],
    ids=str,
)
def test_the_logprobs_are_of_the_distribution_that_was_sampled_from(sampling: Sampling):
    cut = 0
    for done in sampled(sampling):
        assert len(done.ids) == len(done.logprobs) == 20
        for token, logprob, logits_V in zip(done.ids, done.logprobs, distributions(done), strict=True):
            expected = filtered(logits_V, sampling)
            cut += int(np.isinf(expected).sum())
            assert logprob == pytest.approx(expected[token], abs=1e-4)
    assert (cut > 0) == (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def test_sampled_tokens_follow_the_models_distribution():
    """Two thousand first tokens after one prompt, against the softmax of transformers' logits."""
    prompt, draws = tokens(9, 9), 2000
    wanted = [request(str(i), prompt, Sampling(1), group="one", seed=i) for i in range(draws)]
    found = np.bincount([d.ids[0] for d in finish(engine_over(twin(model()), 512), wanted).values()], minlength=300)
    with torch.no_grad():
        expected = logits_of(model(), prompt)[-1].double().softmax(-1).numpy() * draws
    often = expected > 5
    assert often.sum() > 20
    chi_square = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert chi_square < often.sum() + 4 * math.sqrt(2 * often.sum()) + 8


def test_greedy_logprobs_are_the_models_own():
    for done in sampled(Sampling(20, temperature=0.0)):
        for token, logprob, logits_V in zip(done.ids, done.logprobs, distributions(done), strict=True):
            assert token == logits_V.argmax()
            assert logprob == pytest.approx(logits_V[token] - np.logaddexp.reduce(logits_V), abs=1e-4)


@pytest.mark.parametrize("ends", [(), (2,), tuple(range(3, 640, 9))], ids=["no end", "one end token", "many"])
def test_greedy_is_generate_token_by_token(tiny_model_dir: Path, ends: Sequence[int]):
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa").eval()
    prompts = [tokens(n, n, high=640) for n in (1, 4, 31)]
    wanted = [request(str(i), ids, Sampling(40, temperature=0.0)) for i, ids in enumerate(prompts)]
    done = finish(engine_over(twin(reference), 2, ends), wanted)
    for i, ids in enumerate(prompts):
        full = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
        )
        expected = full[0, len(ids) :].tolist()
        if not ends:
            assert len(expected) == 40
        assert list(done[str(i)].ids) == expected
        stopped = expected[-1] in ends
        assert done[str(i)].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 31, 32, 33, 300])
def test_scores_are_those_of_a_full_forward_pass(length: int):
    ids = tokens(length, length)
    (score,) = engine_over(twin(model())).score([ids])
    assert len(score) == length - 1
    np.testing.assert_allclose(score, logprobs_of(model(), ids), atol=1e-4)


def test_a_score_leaves_running_requests_alone():
    wanted = [request(str(i), tokens(5, i), Sampling(12), seed=i) for i in range(5)]
    undisturbed = finish(engine_over(twin(model()), 2), wanted)
    engine = engine_over(twin(model()), 2)
    engine.submit(wanted)
    found = {}
    for completion in engine.completed():
        engine.score([tokens(40, 1)])
        found[completion.request.id] = completion
    assert found == undisturbed
