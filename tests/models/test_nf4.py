"""Frozen layers in 4 bits: against a search over all levels, and a run of adapters on top of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.schema import Lora, Recipe
from lockstep.errors import Interrupted
from lockstep.learner.adapters import attach, describe
from lockstep.learner.learner import TorchLearner
from lockstep.learner.merge import merged_weights
from lockstep.loops.start import resume_run, start_run
from lockstep.models.nf4 import BLOCK, LEVELS, Nf4Linear, pack, unpack
from lockstep.models.weights import frozen_names, named_weights
from lockstep.plan.shapes import NF4_BYTES
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import Sampling
from tests.learner.models import logprobs_of, plain, tokens, twin
from tests.learner.test_learner import gradient_step
from tests.loops.runs import LORA, NO_EVAL, events, fingerprints, recipe, terminate_in, trained
from tests.rollout.engines import engine_over, finish, request

IDS = tokens(24, 5)


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """By search: each weight becomes the level nearest to it, under its block's scale."""
    flat, levels = weight.flatten().tolist(), LEVELS
    found: list[float] = []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        scale = float(torch.tensor(max(map(abs, block))).bfloat16())
        found += [scale * min(levels, key=lambda level: abs(level * scale - value)) for value in block]
    return torch.tensor(found).view(weight.shape)


@pytest.mark.parametrize("shape", [(8, 64), (5, 13), (3, 129)])
def test_each_weight_becomes_the_nearest_level(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = pack(weight)
    found = unpack(codes, scales, shape, torch.float32)
    torch.testing.assert_close(found, nearest(weight), rtol=1e-6, atol=1e-7)
    again = pack(found)
    assert torch.equal(again[0], codes), "levels are their own nearest"


def test_zeros_stay_zeros_and_the_size_is_four_and_a_quarter_bits() -> None:
    codes, scales = pack(torch.zeros(4, 128))
    assert not unpack(codes, scales, (4, 128), torch.bfloat16).any()
    assert codes.nbytes + scales.nbytes == NF4_BYTES * 4 * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_linear_layer_of_its_unpacked_weight(dtype: torch.dtype) -> None:
    linear = nn.Linear(96, 40).to(dtype)
    layer, plain_layer = Nf4Linear(linear), copy.deepcopy(linear)
    plain_layer.weight.data = layer.weight
    x = torch.randn(3, 7, 96, dtype=dtype, requires_grad=True)
    y = torch.randn(3, 7, 96, dtype=dtype)
    twin_x = x.detach().clone().requires_grad_()
    (layer(x) * layer(y)).sum().backward()
    (plain_layer(twin_x) * plain_layer(y)).sum().backward()
    assert torch.equal(layer(y), plain_layer(y))
    torch.testing.assert_close(x.grad, twin_x.grad)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def packed(family: str = "qwen2") -> nn.Module:
    return attach(twin(plain(family)), Lora(rank=4, base="nf4"), 0)  # type: ignore[arg-type]


def test_adapters_train_on_a_packed_base_that_stays() -> None:
    model = packed()
    assert "QLoRA rank 4" in describe(Lora(rank=4, base="nf4"), model)
    assert "14 frozen layers in NF4: " in describe(Lora(rank=4, base="nf4"), model)
    frozen = frozen_names(model)
    before = fingerprint((n, t) for n, t in named_weights(model) if n in frozen)
    assert {name.rsplit(".", 1)[-1] for name in frozen} >= {"codes", "scales"}
    learner = TorchLearner(
        model, Recipe.model_validate({"adapter": {"kind": "lora"}, "optimizer": {"kind": "adamw", "lr": 1e-2}})
    )
    start = learner.logprobs([IDS])
    for number in range(3):
        gradient_step(learner, number)
    assert learner.logprobs([IDS]) != start
    assert fingerprint((n, t) for n, t in named_weights(model) if n in frozen) == before
    with learner._as_reference():
        assert learner.logprobs([IDS]) == start


@pytest.mark.parametrize("family", ["qwen2", "gpt-oss"])
def test_engines_learner_and_merged_model_agree(family: str) -> None:
    model = packed(family)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    learner = TorchLearner(model, Recipe())
    said = torch.tensor(learner.logprobs([IDS])[0])
    engine = engine_over(model)
    torch.testing.assert_close(torch.tensor(engine.score([IDS])[0]), said, rtol=0, atol=1e-4)
    paged = PagedEngine(model, slots=2, stop_ids=frozenset(), decode=str)
    paged.load(iter(()), 1)
    torch.testing.assert_close(torch.tensor(paged.score([IDS])[0]), said, rtol=0, atol=1e-4)
    own = plain(family)
    own.load_state_dict(dict(merged_weights(model)))
    torch.testing.assert_close(logprobs_of(own, IDS), said, rtol=0, atol=1e-4)
    done = finish(engine, [request("a", IDS[:6], Sampling(8, ignore_eos=True))])["a"]
    again = learner.logprobs([(*IDS[:6], *done.ids)])[0][5:]
    torch.testing.assert_close(torch.tensor(done.logprobs), torch.tensor(again), rtol=0, atol=1e-4)


def test_a_run_on_a_packed_base_resumes_to_the_bit(tiny_model_dir: Path, tmp_path: Path) -> None:
    asked = (*LORA, NO_EVAL, "adapter.base=nf4")
    whole = trained(tmp_path / "whole", tiny_model_dir, *asked)
    (line,) = events(whole, "base")
    assert line.startswith("base unchanged: ")
    folder = tmp_path / "broken"
    broken = recipe(folder, tiny_model_dir, *asked)
    terminate_in(folder, Path(broken.runs_dir) / broken.name, 2)
    with pytest.raises(Interrupted):
        start_run(broken)
    resumed = resume_run(Path(broken.runs_dir) / broken.name)
    assert fingerprints(whole) == fingerprints(resumed)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"init": "pissa"}, "init=pissa is made from weights in full precision"),
        ({"dora": True}, "dora is made from weights in full precision"),
    ],
    ids=str,
)
def test_what_needs_full_weights_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Lora.model_validate({"base": "nf4"} | settings)
    with pytest.raises(ValueError, match="use native"):
        Recipe.model_validate(
            {"adapter": {"kind": "lora", "base": "nf4"}, "rollout": {"engine": "vllm"}, "device": "cuda"}
        )
