"""The same code on a GPU: engine, learner and transformers agree, training works, and a state from a file continues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import Lora, Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.types import Batch, Sampling
from tests.learner.batches import make_batch
from tests.learner.models import FAMILIES, logprobs_of, plain, tokens, twin
from tests.learner.test_learner import gradient_step, recipe, same, snapshot
from tests.rollout.engines import engine_over, finish, request

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_learner_and_transformers_agree(family: str):
    reference = plain(family).to("cuda")
    model = twin(reference)
    wanted = [
        request(f"{n}/{i}", tokens(n, n), Sampling(20), group=str(n), seed=i, prefix=4 if n > 5 else 0)
        for n in (1, 5, 30)
        for i in range(3)
    ]
    done = list(finish(engine_over(model, 4), wanted).values())
    whole = [(*d.request.prompt_ids, *d.ids) for d in done]
    scored, learned = engine_over(model).score(whole), TorchLearner(model, Recipe()).logprobs(whole)
    for i, (d, ids) in enumerate(zip(done, whole, strict=True)):
        expected = logprobs_of(reference, ids).numpy()
        np.testing.assert_allclose(d.logprobs, expected[len(d.request.prompt_ids) - 1 :], atol=1e-3)
        np.testing.assert_allclose(scored[i], expected, atol=1e-3)
        np.testing.assert_allclose(learned[i], expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "lora"])
def test_a_state_from_a_file_continues(kind: str):
    """The tensors of a checkpoint lie on the CPU."""

    def build() -> TorchLearner:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        model: Any = twin(plain("llama-tied", dtype=dtype)).to("cuda")
        return TorchLearner(attach(model, Lora(rank=4), seed=0) if kind == "lora" else model, recipe(kind))

    first = build()
    for number in range(3):
        gradient_step(first, number)
    saved = {name: t.cpu() for name, t in first.optimizer.tensors().items()}
    weights = {name: p.detach().cpu() for name, p in first.model.named_parameters()}
    resumed = build()
    with torch.no_grad():
        for name, parameter in resumed.model.named_parameters():
            parameter.copy_(weights[name])
    resumed.restore(first.save().counters, saved)
    assert same(snapshot(first), snapshot(resumed))
    for learner in (first, resumed):
        gradient_step(learner, 3)
    # The GPU adds in no fixed order: a sum at the edge of two bf16 numbers may be rounded to the other.
    tolerance = 2**-7 if kind == "bf16" else 1e-3
    for name, tensor in snapshot(first).items():
        torch.testing.assert_close(snapshot(resumed)[name], tensor, rtol=tolerance, atol=1e-4)
    assert resumed.optimizer_step == 4


def test_training_on_what_the_engine_sampled():
    model = twin(plain("llama-tied", dtype=torch.bfloat16)).to("cuda")
    learner, batch = TorchLearner(model, recipe("bf16")), make_batch(old=False, ref=False)
    before = learner.response_logprobs(batch.sequences, 1.0)
    metrics = gradient_step(learner)
    assert metrics["grad/skipped"] == 0
    assert learner.response_logprobs(Batch(batch.sequences).sequences, 1.0) != before
