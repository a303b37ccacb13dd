"""One attention function serves every architecture: engine, learner and plain transformers agree, beyond sliding windows too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, ModelError
from lockstep.learner.learner import TorchLearner
from lockstep.rollout.native import NativeEngine
from lockstep.types import Completion, Sampling, TrainSequence
from tests.learner.models import FAMILIES, SMALL, WINDOW, logprobs_of, plain, tokens, twin
from tests.rollout.engines import engine_over, finish, request

TOLERANCE = 1e-4


def as_trained(done: Completion) -> TrainSequence:
    count = len(done.ids)
    zeros = (0.0,) * count
    return TrainSequence(
        done.request.prompt_ids, done.ids, (True,) * count, done.logprobs, zeros, 1.0, int(done.request.group)
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_learner_and_transformers_agree(family: str):
    reference = plain(family)
    model = twin(reference)
    prompts = [tokens(n, n) for n in (1, 5, 30)]
    wanted = [
        request(f"{group}/{i}", ids, Sampling(3 * WINDOW - i), group=str(group), seed=10 * group + i)
        for group, ids in enumerate(prompts)
        for i in range(2)
    ]
    done = list(finish(engine_over(model, 3), wanted).values())
    learner = TorchLearner(model, Recipe())
    packed = learner.response_logprobs([as_trained(d) for d in done], 1.0)
    whole = [(*d.request.prompt_ids, *d.ids) for d in done]
    scored, learned = engine_over(model).score(whole), learner.logprobs(whole)
    for i, (d, ids) in enumerate(zip(done, whole, strict=True)):
        expected = logprobs_of(reference, ids).numpy()
        response = expected[len(d.request.prompt_ids) - 1 :]
        np.testing.assert_allclose(d.logprobs, response, atol=TOLERANCE, err_msg="engine, as sampled")
        np.testing.assert_allclose(packed[i], response, atol=TOLERANCE, err_msg="learner, shared prompt")
        np.testing.assert_allclose(scored[i], expected, atol=TOLERANCE, err_msg="engine, as scored")
        np.testing.assert_allclose(learned[i], expected, atol=TOLERANCE, err_msg="learner, alone")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt-oss", "starcoder2"])
def test_the_windows_matter(family: str):
    """Without its window the same model says something else about a long sequence, and the same about a short one."""
    windowed = plain(family)
    unlimited = plain(family)
    unlimited.config.sliding_window = None  # type: ignore[union-attr]
    for module in unlimited.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = None  # type: ignore[assignment]
    ids = tokens(4 * WINDOW, 3)
    (ours,), (theirs,) = engine_over(twin(windowed)).score([ids]), engine_over(twin(unlimited)).score([ids])
    assert np.abs(np.array(ours) - theirs)[: WINDOW - 1].max() < 1e-5
    assert np.abs(np.array(ours) - theirs)[WINDOW + 2 :].max() > 1e-2


def test_longrope_ends_at_its_original_context():
    """Beyond it all of a sequence would have other frequencies, and so would shorter ones beside it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0, "rope_type": "longrope"}
    original = {"original_max_position_embeddings": 24}
    config = hf.Phi3Config(
        **(SMALL | original | {"rope_parameters": factors | original, "max_position_embeddings": 96})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = hf.Phi3ForCausalLM(config).eval()
    short, long = tokens(24, 1), tokens(40, 2)
    engine, learner = engine_over(twin(reference)), TorchLearner(twin(reference), Recipe())
    expected = logprobs_of(reference, short).numpy()
    np.testing.assert_allclose(engine.score([short])[0], expected, atol=TOLERANCE)
    np.testing.assert_allclose(learner.logprobs([short[:9], short])[1], expected, atol=TOLERANCE)
    assert np.abs(np.array(learner.logprobs([short, long])[0]) - expected).max() > 0.01, "what is ruled out"
    with pytest.raises(EngineError, match="exceed the model's context of 24"):
        engine.submit([request("a", long[:20], Sampling(5))])


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("MiniMax", {"head_dim": 16, "num_local_experts": 2}, "linear_attention"),
        ("RecurrentGemma", {"num_hidden_layers": 3}, "linear_attention"),
        ("Llama4", {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2}, "chunked_attention"),
    ],
)
def test_models_that_mix_neighbouring_sequences_are_refused(name: str, settings: dict[str, object], told: str):
    config = getattr(hf, f"{name}TextConfig", None) or getattr(hf, f"{name}Config")
    with torch.random.fork_rng(devices=[]):
        model = getattr(hf, f"{name}ForCausalLM")(config(**(SMALL | settings)))
    with pytest.raises(ModelError, match=told):
        NativeEngine(model, slots=2, stop_ids=frozenset(), decode=str)
    with pytest.raises(ModelError, match=told):
        TorchLearner(model, Recipe())
