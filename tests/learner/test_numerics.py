"""The learner under quantised numerics: log-probabilities and gradients of the straight-through model written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Lora, Recipe
from lockstep.errors import LearnerError
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models.weights import clean_name, named_weights
from lockstep.numerics.apply import numerics_of
from lockstep.numerics.linear import Quantiser
from lockstep.types import Loss
from tests.learner.batches import learner_gradients, make_batch, plain_gradients
from tests.learner.models import logprobs_of, plain, tokens, twin, wide
from tests.learner.test_gradients import closest
from tests.numerics.models import largest_difference, quantised_reference
from tests.numerics.test_linear import reference

SEQUENCES = [tokens(length, length) for length in (2, 9, 33)]
ALGORITHM = {"kind": "grpo", "kl": {"coef": 0.3}, "entropy_coef": 0.2}


def recipe(numeric: str = "mxfp4-w4a4", **more: Any) -> Recipe:
    given = {"algorithm": ALGORITHM, "optimizer": {"kind": "adamw", "lr": 0.0}, "numerics": {"train": numeric}} | more
    return Recipe.model_validate(given)


LOSS: Loss = build_objective(recipe()).loss


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("numeric", ["mxfp4-w4a4", "nvfp4-w4a16"])
def test_full_training_has_straight_through_gradients(numeric: str, recompute: str):
    """float64, so that nothing but a wrong gradient can differ."""
    settings = recipe(numeric, update={"recompute": recompute})
    metrics, ours = learner_gradients(twin(wide("llama")), make_batch(), LOSS, settings)
    loss, theirs = plain_gradients(quantised_reference(wide("llama"), numeric), make_batch(), LOSS)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-9)
    assert closest(ours, theirs) < 1e-9
    _, unquantised = plain_gradients(wide("llama"), make_batch(), LOSS)
    assert closest(ours, unquantised) > 1e-2


def with_adapter(model: nn.Module) -> nn.Module:
    """LoRA whose B is not zero, so that A has a gradient."""
    adapted = attach(model, Lora(rank=4), 0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05
    return adapted


class _WrittenOut(torch.nn.Module):
    """Wx + s·BAx on quantised W and x and on raw x."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base, self.scaling = layer.base_layer, float(layer.scaling["default"])
        self.a, self.b = layer.lora_A["default"].weight, layer.lora_B["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        quantised = reference(x, self.base.weight, self.base.bias, Quantiser("mxfp4-w4a4"))
        result: Tensor = quantised + self.scaling * (x @ self.a.T @ self.b.T)
        return result


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("fused", [True, False])
def test_adapters_see_the_input_as_it_is(fused: bool, recompute: str, monkeypatch: pytest.MonkeyPatch):
    """By the fused pass, and by PEFT's own (which calls the base layer)."""
    from lockstep.learner.lora_linear import LoraLinear

    if not fused:
        monkeypatch.setattr(LoraLinear, "_parts", lambda self: None)
    settings = recipe(adapter={"kind": "lora", "rank": 4}, update={"recompute": recompute})
    batch = make_batch()
    _, every = learner_gradients(with_adapter(twin(wide("llama-tied"))), batch, LOSS, settings)
    ours = {clean_name(name): grad for name, grad in every.items() if "lora_" in name}
    theirs = written_out_gradients(batch)
    assert len(ours) == 28
    assert closest(ours, theirs) < 1e-9


def written_out_gradients(batch: Any) -> dict[str, Tensor]:
    adapted: Any = with_adapter(wide("llama-tied"))
    base = adapted.get_base_model()
    trained = {clean_name(name): p for name, p in adapted.named_parameters() if p.requires_grad}
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "base_layer"):
                setattr(module, name, _WrittenOut(child))
    plain_gradients(base, batch, LOSS)
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def test_log_probabilities_are_the_quantised_models_and_follow_every_step():
    """A copy that stayed as it was before the step would be found here."""
    model = twin(plain("llama"))
    learner = TorchLearner(model, recipe(optimizer={"kind": "adamw", "lr": 0.05}))
    for _ in range(3):
        expected = [
            tuple(logprobs_of(quantised_reference(clean(model), "mxfp4-w4a4"), ids).tolist()) for ids in SEQUENCES
        ]
        before = learner.logprobs(SEQUENCES, "mxfp4-w4a4")
        assert largest_difference(before, expected) < 1e-4
        assert largest_difference(learner.logprobs(SEQUENCES), before) > 1e-2
        learner.update(make_batch(), LOSS)
        assert largest_difference(learner.logprobs(SEQUENCES, "mxfp4-w4a4"), before) > 1e-3


def clean(model: nn.Module) -> nn.Module:
    """A plain model with these weights."""
    made = plain("llama")
    made.load_state_dict(dict(named_weights(model)))
    return made


def test_the_reference_model_computes_as_training_does():
    model, frozen = twin(plain("llama")), twin(plain("llama"))
    learner = TorchLearner(model, recipe(), frozen)
    sequences = [replace(s, trained=(True,) * len(s.ids)) for s in make_batch().sequences]
    policy = learner.response_logprobs(sequences, 1.0)
    assert largest_difference(learner.response_logprobs(sequences, 1.0, reference=True), policy) < 1e-5
    assert numerics_of(frozen).current == "mxfp4-w4a4"


def test_a_run_that_quantises_nothing_wires_nothing():
    model = twin(plain("llama"))
    TorchLearner(model, recipe().model_copy(update={"numerics": Recipe().numerics})).logprobs(SEQUENCES)
    assert not any("forward" in m.__dict__ for m in model.modules() if isinstance(m, nn.Linear))


def test_no_layer_to_quantise_is_refused():
    settings = recipe().model_copy(
        update={
            "numerics": Recipe.model_validate({"numerics": {"train": "mxfp4-w4a4", "exclude": ["layers"]}}).numerics
        }
    )
    with pytest.raises(LearnerError, match="quantise no layer"):
        TorchLearner(twin(plain("llama")), settings)
