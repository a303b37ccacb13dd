"""When numerics.exact is on: what a run says, and what it refuses to promise. The bits need a GPU (tests/rollout/paged)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.build.exactness import settle_exactness, unserved
from lockstep.config.schema import Recipe
from lockstep.models import exact
from lockstep.models.known import has_experts
from tests.learner.models import plain, twin


@pytest.fixture(autouse=True)
def off_again():
    yield
    exact.enable("", on=False)


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"numerics": {"exact": True}} | sections)


def test_a_cpu_needs_none_of_it_and_the_run_says_so():
    model = twin(plain("llama-tied"))
    settle_exactness(model, recipe())
    assert not exact.enabled()
    assert "CPU" in exact.line()
    settle_exactness(model, Recipe())
    assert exact.line() == ""


@pytest.mark.parametrize(
    ("family", "sections", "reason"),
    [
        ("llama-tied", {}, ""),
        ("llama-tied", {"rollout": {"engine": "vllm"}}, "vllm"),
        ("llama-tied", {"sync": {"transport": "copy"}}, "does not read the learner's own"),
        ("llama-tied", {"adapter": {"kind": "lora", "dora": True}}, "plain LoRA"),
        ("llama-tied", {"adapter": {"kind": "lora", "base": "nf4"}}, "nf4"),
        ("llama-tied", {"noise": {}}, "noise"),
        ("qwen3", {}, ""),
        ("mistral", {}, ""),
        ("gpt-oss", {}, ""),
        ("gpt-oss", {"adapter": {"kind": "lora", "base": "mxfp4"}}, ""),
        ("qwen3-moe", {}, ""),
        ("qwen3-moe", {"update": {"replay_routing": True}}, ""),
        ("qwen3-moe", {"numerics": {"rollout": "mxfp4-w4a16"}}, "mxfp4-w4a16"),
        ("gemma3", {}, "not for gemma3"),
    ],
)
def test_what_cannot_be_exact_has_a_reason(family: str, sections: dict[str, Any], reason: str):
    found = unserved(twin(plain(family, dtype=torch.bfloat16)), recipe(**sections))
    assert reason in found if reason else found == ""


@pytest.mark.gpu
def test_a_run_that_replays_routes_keeps_the_order_of_its_sums_but_promises_no_bits():
    model = plain("gpt-oss", dtype=torch.bfloat16).cuda()
    settle_exactness(model, Recipe.model_validate({"update": {"replay_routing": True}}))
    assert exact.enabled()
    assert not exact.complete()
    assert "records routes" in exact.line()


def test_a_trial_leaves_the_state_as_it_was():
    exact.enable("not complete", complete=False)
    with exact.on_trial():
        assert exact.complete()
    assert exact.enabled()
    assert not exact.complete()
    exact.enable("off", on=False)
    assert not exact.complete()


def test_auto_is_for_mixtures_of_experts_alone():
    assert Recipe().numerics.exact == "auto"
    assert has_experts(plain("gpt-oss"))
    assert has_experts(plain("qwen3-moe"))
    assert not has_experts(plain("llama-tied"))


def test_other_weights_than_bf16_are_not_promised():
    assert "float32" in unserved(twin(plain("llama-tied")), recipe())


def test_linear_layers_compute_as_before_while_it_is_off():
    layer = nn.Sequential(nn.Linear(8, 5))
    x = torch.randn(2, 3, 8)
    before = layer(x)
    exact.order_products(layer)
    assert torch.equal(layer(x), before)


def test_a_small_product_is_tried_until_another_order_would_show(monkeypatch: pytest.MonkeyPatch):
    """Another order changes about one rounded output in a hundred; this product has eight."""
    x, weight, share = torch.randn(1, 64), torch.randn(8, 64), [0.0]

    def ordered(x_MK: torch.Tensor, weight_NK: torch.Tensor, *_: Any) -> torch.Tensor:
        right = nn.functional.linear(x_MK, weight_NK)
        return torch.where(torch.rand_like(right) < share[0], right + 1, right)

    monkeypatch.setattr(exact, "_ordered", ordered)
    torch.manual_seed(0)
    assert all(exact._tested("cuBLAS", "linear", x, weight, None, None) for _ in range(20))
    share[0] = 0.01
    assert not any(exact._tested("cuBLAS", "linear", x, weight, None, None) for _ in range(20))
