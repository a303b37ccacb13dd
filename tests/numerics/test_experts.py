"""Experts on quantised operands: values and gradients are those of tokens and experts one by one, on a CPU and by kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.load import load
from lockstep.errors import EngineError, ModelError
from lockstep.learner.learner import TorchLearner
from lockstep.numerics.apply import numerics_of
from lockstep.numerics.formats import fake_quantise
from lockstep.numerics.linear import Quantiser
from lockstep.plan.refusals import refusals
from lockstep.track.writer import read_metrics
from lockstep.types import Forward
from tests.interpreter import interpreted
from tests.learner.batches import learner_gradients, make_batch, plain_gradients
from tests.learner.models import logits_of, plain, tokens, twin, wide
from tests.learner.test_gradients import closest
from tests.learner.test_numerics import LOSS, recipe
from tests.loops.runs import NO_EVAL, trained
from tests.models.mxfp4_files import write_mxfp4_model
from tests.numerics.models import EXPERTS, LAYERS, largest_difference, quantised_experts, quantised_reference
from tests.rollout.engines import engine_over
from tests.rollout.paged.test_engine import paged_over
from tests.tiny import write_tiny_tokenizer

IDS = tokens(40, 1)
FAMILIES = ("qwen3-moe", "gpt-oss")
NUMERICS = ("mxfp4-w4a4", "mxfp4-w4a16", "nvfp4-w4a4", "nvfp4-w4a16")


def by_loop(model: Any) -> Any:
    """The model with transformers' loop over experts: its grouped products take no float64."""
    model.config._experts_implementation = "eager"
    return model


def experts_of(model: nn.Module) -> Any:
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))


def asked(module: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator, dtype = torch.Generator().manual_seed(count), module.down_proj.dtype
    x = torch.randn(count, 64, generator=generator, dtype=dtype).requires_grad_()
    index = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(count)])
    return x, index, torch.rand(count, 2, generator=generator, dtype=dtype).requires_grad_()


# --- values and gradients -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numeric", NUMERICS)
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_a_model_is_the_one_written_out(family: str, numeric: str) -> None:
    model = by_loop(plain(family, dtype=torch.float64))
    expected = logits_of(quantised_reference(model, numeric, names=(*LAYERS, *EXPERTS)), IDS)
    alone = logits_of(quantised_reference(model, numeric), IDS)
    before = logits_of(model, IDS)
    assert numerics_of(model).settle(numeric) == 12
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=1e-6, atol=1e-6)
    assert (expected - alone).abs().max() > 1e-2
    numerics_of(model).settle("")
    assert torch.equal(logits_of(model, IDS), before)


@pytest.mark.parametrize("left", EXPERTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_of_both_matrices_may_be_left_alone(family: str, left: str) -> None:
    model = by_loop(plain(family, dtype=torch.float64))
    names = [name for name in (*LAYERS, *EXPERTS) if name != left]
    expected = logits_of(quantised_reference(model, "nvfp4-w4a4", names=names), IDS)
    assert numerics_of(model, exclude=[left]).settle("nvfp4-w4a4") == 10
    assert f"model.layers.0.mlp.experts.{left}" in numerics_of(model).excluded
    torch.testing.assert_close(logits_of(model, IDS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numeric", ["mxfp4-w4a4", "nvfp4-w4a16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_straight_through(family: str, numeric: str) -> None:
    model = plain(family, dtype=torch.float64)
    numerics_of(model).settle(numeric)
    module = experts_of(model)
    x, index, weight = asked(module, 23)
    inputs = [x, weight, *module.parameters()]
    outs = [forward(x, index, weight) for forward in (module, quantised_experts(module, Quantiser(numeric), EXPERTS))]
    mix = torch.linspace(-1, 1, outs[0].numel(), dtype=torch.float64).view_as(outs[0])
    for a, b in zip(*(torch.autograd.grad((out * mix).sum(), inputs) for out in outs), strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_training_has_the_gradients_of_the_model_written_out() -> None:
    numeric, names = "mxfp4-w4a4", (*LAYERS, *EXPERTS)
    metrics, ours = learner_gradients(twin(wide("qwen3-moe")), make_batch(), LOSS, recipe(numeric))
    loss, theirs = plain_gradients(quantised_reference(wide("qwen3-moe"), numeric, names=names), make_batch(), LOSS)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-6)
    assert closest(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_does_not_depend_on_the_others(family: str) -> None:
    """NVFP4 has a scale for each row of activations."""
    model = by_loop(plain(family, dtype=torch.float64))
    numerics_of(model).settle("nvfp4-w4a4")
    module = experts_of(model)
    x, index, weight = (one.detach() for one in asked(module, 9))
    x[1:] *= 1000
    whole, alone = module(x, index, weight), module(x[:1], index[:1], weight[:1])
    torch.testing.assert_close(whole[:1], alone, rtol=1e-12, atol=1e-12)


def by_kernels(family: str, numeric: str, left: str) -> None:
    """Values and gradients by the kernels are those written out; decoding has those of training."""
    from lockstep.models.experts import ExpertsForward, fuse_experts

    model = plain(family, seed=3)
    module, exclude = experts_of(model), [left] if left else []
    written = quantised_experts(module, Quantiser(numeric), [name for name in EXPERTS if name != left])
    assert fuse_experts(module)
    numerics_of(model, exclude=exclude).settle(numeric)
    assert isinstance(module.forward.plain, ExpertsForward)
    for count in (1, 7):
        x, index, weight = asked(module, count)
        inputs = [x, weight, *module.parameters()]
        ours, theirs = module(x, index, weight), written(x, index, weight)
        mix = torch.linspace(-1, 1, ours.numel()).view_as(ours)
        pairs = [(ours, theirs)]
        found = [torch.autograd.grad((out * mix).sum(), inputs) for out in (ours, theirs)]
        pairs += list(zip(*found, strict=True))
        for a, b in pairs:
            assert float((a - b).norm() / b.norm()) < 5e-6
        with torch.no_grad():
            assert torch.equal(module(x, index, weight), ours), "in decoding"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "numeric", "left"),
    [
        ("qwen3-moe", "mxfp4-w4a4", ""), ("gpt-oss", "nvfp4-w4a4", ""), ("gpt-oss", "mxfp4-w4a16", "gate_up_proj"),
        ("qwen3-moe", "nvfp4-w4a4", "down_proj"),
    ],
)  # fmt: skip
def test_kernels_compute_the_same(family: str, numeric: str, left: str) -> None:
    pytest.importorskip("triton")
    interpreted(by_kernels, family, numeric, left)


# --- copies ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_follow_the_weights_and_a_write_past_torch_is_found(family: str) -> None:
    model = plain(family)
    numerics = numerics_of(model)
    numerics.settle("nvfp4-w4a16")
    logits_of(model, IDS)
    assert numerics.verify() == 12
    name, quantiser = "model.layers.0.mlp.experts.down_proj", Quantiser("nvfp4-w4a16")
    stack: Any = numerics.targets[name]
    before = numerics.weight(quantiser, stack)
    with torch.no_grad():
        stack.weight[1] *= 3
    matrices = stack.weight.detach()
    matrices = matrices.transpose(1, 2) if family == "gpt-oss" else matrices
    expected = torch.stack([fake_quantise(one, "nvfp4") for one in matrices])
    assert torch.equal(numerics.weight(quantiser, stack), expected)
    assert numerics.weight(quantiser, stack).data_ptr() == before.data_ptr()
    stack.weight.data[2] *= 3
    with pytest.raises(EngineError, match=f"{name}: the layer's quantised copy differs"):
        numerics.verify()


# --- learner, engine and runs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("over", [engine_over, paged_over])
@pytest.mark.parametrize("numeric", ["mxfp4-w4a16", "mxfp4-w4a4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_learner_and_engine_agree_after_every_update(over: Any, numeric: str, family: str) -> None:
    model = twin(plain(family))
    engine, learner = over(model), TorchLearner(model, recipe(numeric, optimizer={"kind": "adamw", "lr": 0.02}))
    assert engine.set_forward(Forward(numeric)).quantised_layers == 12
    last = engine.score([IDS])
    for _ in range(2):
        learner.update(make_batch(), LOSS)
        scored = engine.score([IDS])
        assert largest_difference(scored, learner.logprobs([IDS], numeric)) < 2e-5
        assert largest_difference(scored, last) > 1e-3
        last = scored


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with a tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe") / "model"
    torch.manual_seed(0)
    config: Any = Qwen3MoeConfig(
        vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        initializer_range=0.15, pad_token_id=2, eos_token_id=2, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("numeric", ["numerics.train=mxfp4-w4a4", "numerics.rollout=mxfp4-w4a16"])
def test_a_run_proves_what_it_samples_with(mixture: Path, tmp_path: Path, numeric: str) -> None:
    run = trained(tmp_path, mixture, numeric, NO_EVAL, "save.every=3", "model.dtype=fp32")
    assert "rollouts in mxfp4-w4a" in (run.path / "log.txt").read_text()
    assert "(floor, fp32), 12 linear layers quantised" in (run.path / "log.txt").read_text()
    rows = [row for row in read_metrics(run) if row.step]
    probe = next(row.proof["probe"] for row in rows if row.proof)
    assert probe["mean"] <= probe["tolerance"] == 1e-4
    gaps = [row.metrics["mismatch/mean_abs_dlogp"] for row in rows]
    assert all(gap < 0.02 for gap in gaps) if "train" in numeric else all(gap > 1e-3 for gap in gaps)


# --- refusals -------------------------------------------------------------------------------------------------------
def test_experts_of_another_form_are_refused_unless_named() -> None:
    model: Any = plain("qwen3-moe")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.GELU()
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj.*does not know their form"):
        numerics_of(model).settle("mxfp4-w4a4")
    del model.__dict__["lockstep_numerics"]
    assert numerics_of(model, exclude=["experts"]).settle("mxfp4-w4a4") == 8


def test_experts_kept_in_mxfp4_are_refused_before_anything_loads(tmp_path: Path) -> None:
    write_mxfp4_model(tmp_path / "model")
    words = ["smoke", f"model.path={tmp_path / 'model'}", "numerics.train=mxfp4-w4a4", f"runs_dir={tmp_path}"]
    packed = "adapter={kind: lora, base: mxfp4, targets: attention}"
    assert refusals(load([*words, "adapter={kind: lora, targets: attention}"])) == []
    (found,) = refusals(load([*words, packed]))
    assert (found.name, "they stay in MXFP4" in found.what) == ("numerics", True)
    assert refusals(load([*words, packed, "numerics.exclude=[experts]"])) == []


def test_loaded_experts_in_mxfp4_are_refused_by_name(tmp_path: Path) -> None:
    from lockstep.config import schema
    from lockstep.models.load import load_model
    from lockstep.models.resolve import resolve

    write_mxfp4_model(tmp_path / "model")
    place = resolve(schema.Model(path=str(tmp_path / "model")))
    model = load_model(place, dtype=torch.float32, attention="eager", packed=True)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj.*they stay in MXFP4"):
        numerics_of(model).settle("mxfp4-w4a4")
    del model.__dict__["lockstep_numerics"]
    assert numerics_of(model, exclude=list(EXPERTS)).settle("mxfp4-w4a4") == 8
