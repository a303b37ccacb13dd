"""Fake quantisation of vLLM's layers, on modules laid out as vLLM's: against the learner's quantised layers, layer by layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.errors import EngineError
from lockstep.models.weights import named_weights
from lockstep.numerics.apply import numerics_of
from lockstep.numerics.linear import Quantiser
from lockstep.rollout.vllm.layout import checkpoint_views
from lockstep.rollout.vllm.quantised import (
    WEIGHT,
    FakeQuantised,
    Plan,
    Switch,
    checkpoint_names,
    excluded,
    refresh,
    set_numeric,
)
from lockstep.rollout.vllm.worker import WorkerCalls
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import Forward, NormNoise
from tests.rollout.vllm.fused import FusedLlama

ALL = ("mxfp4-w4a16", "mxfp4-w4a4")


def llama(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=48,  # no multiple of 32: the last block of a row is short
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def engine_of(model: LlamaForCausalLM, plan: Plan) -> Any:
    """vLLM's layout with the methods that the plug-in gives its layers."""
    engine: Any = FusedLlama(model.config)
    switch = Switch()
    for name, module in engine.named_modules():
        if name.endswith("_proj"):
            names = checkpoint_names(name, engine.packed_modules_mapping)
            if not excluded(names, plan.exclude):
                module.quant_method = FakeQuantised(plan, switch, len(names))
                module.quant_method.attach(module)
    engine.load_weights((name, tensor) for name, tensor in named_weights(model))
    refresh(engine)
    return engine


def parts_of(engine: Any, layer: int) -> dict[str, tuple[Any, slice]]:
    """The checkpoint's layers as vLLM's modules and rows."""
    attention, mlp = engine.model.layers[layer].self_attn, engine.model.layers[layer].mlp
    return {
        "self_attn.q_proj": (attention.qkv_proj, slice(0, 96)),
        "self_attn.k_proj": (attention.qkv_proj, slice(96, 128)),
        "self_attn.v_proj": (attention.qkv_proj, slice(128, 160)),
        "self_attn.o_proj": (attention.o_proj, slice(0, 48)),
        "mlp.gate_proj": (mlp.gate_up_proj, slice(0, 80)),
        "mlp.up_proj": (mlp.gate_up_proj, slice(80, 160)),
        "mlp.down_proj": (mlp.down_proj, slice(0, 48)),
    }


@pytest.mark.parametrize("numeric", ["mxfp4-w4a16", "mxfp4-w4a4", "nvfp4-w4a16", "nvfp4-w4a4"])
@pytest.mark.parametrize("scale", ["floor", "rceil"])
def test_every_layer_computes_what_the_learners_does(numeric: str, scale: Any) -> None:
    model = llama()
    engine = engine_of(model, Plan((numeric,), scale))
    learner = numerics_of(model, scale)
    assert set_numeric(engine, numeric) == learner.settle(numeric) == 14
    generator = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        for name, (module, rows) in parts_of(engine, layer).items():
            theirs: Any = model.model.layers[layer].get_submodule(name)
            x = torch.randn(5, theirs.in_features, generator=generator)
            with torch.no_grad():
                assert torch.equal(module.quant_method.product(module, x, None)[:, rows], theirs(x)), name
            assert not torch.equal(theirs(x), x @ theirs.weight.T), "the learner quantises"


def test_off_and_on_and_off_again() -> None:
    engine = engine_of(llama(), Plan(ALL))
    module = engine.model.layers[0].self_attn.qkv_proj
    place, x = getattr(module, WEIGHT).data_ptr(), torch.randn(3, 48)

    def product() -> torch.Tensor:
        return module.quant_method.product(module, x, None)  # type: ignore[no-any-return]

    plain = x @ module.weight.T
    assert torch.equal(product(), plain)
    assert set_numeric(engine, "mxfp4-w4a16") == 14
    weights_only = product()
    assert set_numeric(engine, "mxfp4-w4a4") == 14
    both = product()
    assert not torch.equal(weights_only, plain)
    assert not torch.equal(both, weights_only)
    assert set_numeric(engine, "") == 0
    assert torch.equal(product(), plain)
    assert getattr(module, WEIGHT).data_ptr() == place, "captured graphs hold its address"


def test_what_is_loaded_later_is_quantised_again_and_what_is_proven_is_not_quantised() -> None:
    first, second = llama(0), llama(1)
    engine = engine_of(first, Plan(ALL))
    set_numeric(engine, "mxfp4-w4a4")
    assert fingerprint(checkpoint_views(engine)) == fingerprint(named_weights(first))
    engine.load_weights((name, tensor) for name, tensor in named_weights(second))
    refresh(engine)
    assert fingerprint(checkpoint_views(engine)) == fingerprint(named_weights(second))
    weight = second.model.layers[1].mlp.down_proj.weight.detach()
    used = getattr(engine.model.layers[1].mlp.down_proj, WEIGHT)
    assert torch.equal(used, Quantiser("mxfp4-w4a4").weight(weight))


def test_an_nvfp4_scale_belongs_to_a_matrix_of_the_checkpoint() -> None:
    """The tensor scale of a large v must not coarsen q, which lies in the same matrix."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1000)
    engine = engine_of(model, Plan(("nvfp4-w4a16",)))
    set_numeric(engine, "nvfp4-w4a16")
    used = getattr(engine.model.layers[0].self_attn.qkv_proj, WEIGHT)
    query = model.model.layers[0].self_attn.q_proj.weight.detach()
    assert torch.equal(used[:96], Quantiser("nvfp4-w4a16").weight(query))
    fused = Quantiser("nvfp4-w4a16").weight(engine.model.layers[0].self_attn.qkv_proj.weight.detach())
    assert not torch.equal(used[:96], fused[:96])


def test_exclusions_are_read_as_the_learner_reads_them() -> None:
    for exclude in (("down_proj",), ("layers.0",), ("model.layers.1.mlp",), ("qkv", "o_proj")):
        model = llama()
        known = tuple(entry for entry in exclude if entry != "qkv")
        engine = engine_of(model, Plan(ALL, exclude=known))
        assert set_numeric(engine, "mxfp4-w4a4") == numerics_of(model, "floor", known).settle("mxfp4-w4a4")


def test_half_of_a_fused_matrix_cannot_be_excluded() -> None:
    with pytest.raises(EngineError, match=r"names only some of .*q_proj.*into one matrix"):
        excluded(checkpoint_names("model.layers.0.self_attn.qkv_proj", {}), ["q_proj"])
    assert excluded(checkpoint_names("model.layers.0.self_attn.qkv_proj", {}), ["q_proj", "k_proj", "v_proj"])
    assert excluded(["model.layers.0.mlp.gate"], [])
    assert not excluded(["model.layers.0.mlp.gate_proj"], [])
    assert checkpoint_names("l.qkv_proj", {"qkv_proj": ["qkv_proj"]}) == [
        "l.qkv_proj"
    ]  # Phi-3: one in the checkpoint too


def test_what_would_touch_nothing_is_refused() -> None:
    engine = engine_of(llama(), Plan(("mxfp4-w4a16",)))
    with pytest.raises(EngineError, match="vLLM was started with layers for mxfp4-w4a16 alone"):
        set_numeric(engine, "mxfp4-w4a4")
    everything = engine_of(llama(), Plan(ALL, exclude=("self_attn", "mlp")))
    with pytest.raises(EngineError, match="would quantise no layer"):
        set_numeric(everything, "mxfp4-w4a4")
    with pytest.raises(EngineError, match="the phases quantise them to mxfp4 and nvfp4"):
        _ = Plan(("mxfp4-w4a4", "nvfp4-w4a4")).inputs
    engine.model.layers[0].mlp.experts = torch.nn.ParameterList([torch.zeros(2, 3, 4)])
    with pytest.raises(EngineError, match="stacked tensors"):
        set_numeric(engine, "mxfp4-w4a16")


def test_a_copied_method_is_one_switch() -> None:
    """vLLM copies configurations; the layers of one model still switch together, as they come from one of them."""
    plan, switch = Plan(ALL), Switch()
    one, two = copy.deepcopy([FakeQuantised(plan, switch), FakeQuantised(plan, switch)])
    assert one.switch is two.switch
    assert one.switch is not switch


class Worker(WorkerCalls):
    """The worker's calls without vLLM's worker."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_model(self) -> Any:
        return self.model


def test_the_worker_puts_noise_on_the_checkpoints_norms_and_takes_it_off() -> None:
    model = llama()
    engine = engine_of(model, Plan(ALL))
    worker: Any = Worker(engine)
    before = fingerprint(checkpoint_views(engine))
    names = tuple(sorted(name for name, _ in named_weights(model) if name.endswith("layernorm.weight")))
    noise = NormNoise(0.05, 9, names, (1.0,) * len(names))
    report = worker.lockstep_forward(Forward("mxfp4-w4a4", noise))
    assert (report.quantised_layers, report.noisy_norms) == (14, 4)
    assert 0.03 < report.noise_share < 0.08
    noisy = dict(checkpoint_views(engine))
    from lockstep.noise.apply import NoisyNorms

    own = NoisyNorms(model)
    own.set(noise)  # the learner's model gets the same numbers under the same names
    assert all(torch.equal(noisy[name], tensor) for name, tensor in named_weights(model))
    own.set(None)
    worker.lockstep_forward(Forward())
    assert fingerprint(checkpoint_views(engine)) == before
    worker.lockstep_load(((name, tensor) for name, tensor in named_weights(llama(1))), "/m")
    assert worker.lockstep_forward(Forward("mxfp4-w4a4", noise)).noisy_norms == 4
    worker.lockstep_forward(Forward())
    assert fingerprint(checkpoint_views(engine)) == fingerprint(named_weights(llama(1)))
