"""Both native engines under quantised numerics, on a CPU: they score as the model written out, and never with a stale copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.schema import Lora, Recipe
from lockstep.errors import EngineError
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.weights import named_weights
from lockstep.numerics.apply import numerics_of
from lockstep.types import Forward, Sampling
from tests.learner.models import logprobs_of, plain, tokens, twin
from tests.learner.test_numerics import with_adapter
from tests.numerics.models import largest_difference, quantised_reference
from tests.rollout.engines import engine_over, finish, request
from tests.rollout.paged.test_engine import paged_over

IDS = [tokens(length, length) for length in (3, 17, 40)]
W4A4 = Forward("mxfp4-w4a4")
TOLERANCE = 2e-5
Over = Callable[..., Any]
ENGINES: list[Any] = [
    pytest.param(engine_over, id="native"),
    pytest.param(paged_over, id="paged"),
    pytest.param(lambda model: paged_over(model, fused=False), id="paged, layer by layer"),
]


def written_out(model: nn.Module, numeric: str) -> list[tuple[float, ...]]:
    reference = quantised_reference(model, numeric)
    return [tuple(logprobs_of(reference, ids).tolist()) for ids in IDS]


def requests(count: int = 3) -> list[Any]:
    sampling = Sampling(12, ignore_eos=True)
    return [
        request(f"{g}/{i}", tokens(5 + g, g), sampling, group=str(g), seed=7 * g + i)
        for g in range(count)
        for i in (0, 1)
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("numeric", ["mxfp4-w4a4", "mxfp4-w4a16", "nvfp4-w4a4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("over", ENGINES)
def test_it_scores_as_the_quantised_model_written_out(over: Over, family: str, numeric: str):
    engine = over(twin(plain(family)))
    before = engine.score(IDS)
    report = engine.set_forward(Forward(numeric))
    assert (report.quantised_layers, engine.forward.numerics) == (14, numeric)
    assert largest_difference(engine.score(IDS), written_out(plain(family), numeric)) < TOLERANCE
    assert largest_difference(engine.score(IDS), before) > 1e-2
    assert engine.set_forward(Forward()).quantised_layers == 0
    assert engine.score(IDS) == before


@pytest.mark.parametrize("over", ENGINES)
def test_what_it_samples_it_scores(over: Over):
    """In decode steps and prefill alike: log-probabilities of samples are those of the model written out."""
    engine = over(twin(plain("llama")))
    engine.set_forward(W4A4)
    reference = quantised_reference(plain("llama"), "mxfp4-w4a4")
    for done in finish(engine, requests()).values():
        whole = (*done.request.prompt_ids, *done.ids)
        expected = logprobs_of(reference, whole)[len(done.request.prompt_ids) - 1 :].tolist()
        gaps = sorted(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))
        # A number between two codes falls to either side by its last bit, and moves what its token becomes; most have none.
        assert gaps[len(gaps) // 2] < TOLERANCE
        assert gaps[-1] < 0.5


@pytest.mark.parametrize("numeric", ["mxfp4-w4a4", "nvfp4-w4a4"])
def test_native_samples_do_not_depend_on_neighbours(numeric: str):
    """Equal to the bit alone and among others: an activation's scale is of its own token."""
    engine = engine_over(twin(plain("llama")))
    engine.set_forward(Forward(numeric))
    together = finish(engine, requests())
    for asked in requests():
        alone = finish(engine, [asked])[asked.id]
        assert (alone.ids, alone.logprobs) == (together[asked.id].ids, together[asked.id].logprobs)


@pytest.mark.parametrize("over", ENGINES)
def test_learner_and_engine_agree_on_one_model_after_every_update(over: Over):
    """They share modules and quantised copies; each update must reach both."""
    from tests.learner.batches import make_batch
    from tests.learner.test_numerics import LOSS, recipe

    model = twin(plain("llama"))
    engine, learner = over(model), TorchLearner(model, recipe(optimizer={"kind": "adamw", "lr": 0.02}))
    engine.set_forward(W4A4)
    last = engine.score(IDS)
    for _ in range(2):
        learner.update(make_batch(), LOSS)
        scored = engine.score(IDS)
        assert largest_difference(scored, learner.logprobs(IDS, "mxfp4-w4a4")) < TOLERANCE
        assert largest_difference(scored, last) > 1e-3
        last = scored


@pytest.mark.parametrize("over", ENGINES)
def test_each_side_keeps_its_own_numeric(over: Over):
    model = twin(plain("llama"))
    engine = over(model)
    learner = TorchLearner(model, Recipe.model_validate({"numerics": {"rollout": "mxfp4-w4a4"}}))
    unquantised = learner.logprobs(IDS)
    engine.set_forward(W4A4)
    assert largest_difference(engine.score(IDS), written_out(plain("llama"), "mxfp4-w4a4")) < TOLERANCE
    assert learner.logprobs(IDS) == unquantised
    engine.set_forward(Forward("nvfp4-w4a16"))
    assert largest_difference(engine.score(IDS), written_out(plain("llama"), "nvfp4-w4a16")) < TOLERANCE
    assert learner.logprobs(IDS) == unquantised


@pytest.mark.parametrize("over", ENGINES)
def test_new_weights_are_quantised_anew(over: Over):
    engine = over(twin(plain("llama")))
    engine.set_forward(W4A4)
    engine.score(IDS)
    engine.load(named_weights(plain("llama", seed=3)), 1)
    assert largest_difference(engine.score(IDS), written_out(plain("llama", seed=3), "mxfp4-w4a4")) < TOLERANCE


@pytest.mark.parametrize("over", ENGINES)
def test_a_stale_copy_is_noticed(over: Over):
    """At every switch to quantised numerics, that is before every rollout."""
    model = twin(plain("llama"))
    engine = over(model)
    engine.set_forward(W4A4)
    engine.score(IDS)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(2)  # type: ignore[union-attr, index, operator]
    engine.set_forward(Forward())
    with pytest.raises(EngineError, match=r"layers.1.mlp.up_proj: the layer's quantised copy"):
        engine.set_forward(W4A4)


@pytest.mark.parametrize("over", ENGINES)
def test_adapters_beside_quantised_weights(over: Over):
    """Engine and learner share the fused LoRA layers' meaning: A and B on the raw input."""
    model = with_adapter(twin(plain("llama-tied")))
    engine, learner = over(model), TorchLearner(model, Recipe.model_validate({"numerics": {"train": "mxfp4-w4a4"}}))
    assert engine.set_forward(W4A4).quantised_layers == 14
    assert largest_difference(engine.score(IDS), learner.logprobs(IDS, "mxfp4-w4a4")) < TOLERANCE
    fresh = attach(twin(plain("llama-tied")), Lora(rank=4), 0)  # type: ignore[arg-type]
    base = TorchLearner(fresh, Recipe.model_validate({"numerics": {"train": "mxfp4-w4a4"}}))
    assert largest_difference(learner.logprobs(IDS, "mxfp4-w4a4"), base.logprobs(IDS, "mxfp4-w4a4")) > 1e-3


@pytest.mark.parametrize("over", ENGINES)
@pytest.mark.parametrize("exclude", ["down_proj", "k_proj"])
def test_excluded_layers_stay_in_decode_steps_too(over: Over, exclude: str):
    """k_proj alone lies amid a fused matrix, which then cannot be one."""
    from tests.numerics.models import LAYERS

    model = twin(plain("llama"))
    numerics_of(model, exclude=[exclude])
    engine = over(model)
    assert engine.set_forward(W4A4).quantised_layers == 12
    reference = quantised_reference(plain("llama"), "mxfp4-w4a4", names=[n for n in LAYERS if n != exclude])
    expected = [tuple(logprobs_of(reference, ids).tolist()) for ids in IDS]
    assert largest_difference(engine.score(IDS), expected) < TOLERANCE


@pytest.mark.parametrize("over", ENGINES)
def test_it_is_not_switched_amid_requests(over: Over):
    engine = over(twin(plain("llama")))
    engine.submit(requests())
    with pytest.raises(EngineError, match="6 requests"):
        engine.set_forward(W4A4)
    assert len(list(engine.completed())) == 6
    assert engine.forward == Forward()


@pytest.mark.parametrize("over", ENGINES)
def test_what_it_cannot_do_it_refuses_and_stays_as_it_was(over: Over):
    model = twin(plain("llama"))
    numerics_of(model, exclude=["layers"])
    engine = over(model)
    for wrong in ("mxfp4-w4a4", "int3"):
        with pytest.raises(EngineError, match="numerics"):
            engine.set_forward(Forward(wrong))
        assert engine.forward == Forward()
    assert largest_difference(engine.score(IDS), [logprobs_of(plain("llama"), ids).tolist() for ids in IDS]) < TOLERANCE


def test_kept_prefixes_are_forgotten_with_the_numerics():
    """What all prompts begin with is processed once per version, and once per numeric."""
    engine = engine_over(twin(plain("llama")))
    prefix = tokens(8, 99)
    asked = request("a", (*prefix, *tokens(4, 1)), Sampling(4, ignore_eos=True), prefix=8)
    finish(engine, [asked])
    engine.set_forward(W4A4)
    after = finish(engine, [asked])["a"]
    fresh = engine_over(twin(plain("llama")))
    fresh.set_forward(W4A4)
    assert finish(fresh, [asked])["a"].logprobs == after.logprobs
    assert torch.tensor(after.logprobs).isfinite().all()
