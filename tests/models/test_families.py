"""The families that are served, from a folder on disk through one step of training to generation; everything must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lockstep.config.schema import Model, Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models import load_model, resolve
from lockstep.models.attention import NAME
from lockstep.models.weights import named_weights
from lockstep.types import Sampling
from tests.learner.batches import make_batch
from tests.learner.models import WINDOW, logprobs_of, plain, tokens
from tests.learner.test_learner import policy_loss
from tests.rollout.engines import engine_over, finish, request
from tests.tiny import write_tiny_tokenizer

SERVED = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3-moe")
SERVED += ("gemma4", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "qwen3.5")
IDS = tokens(4 * WINDOW, 7)


def folder_of(family: str, folder: Path) -> Path:
    model: Any = plain(family)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32, attention: str = NAME) -> nn.Module:
    return load_model(resolve(Model(path=str(folder))), dtype=dtype, attention=attention)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("family", SERVED)
def test_a_family_loads_trains_and_generates(family: str, adapter: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    recipe = Recipe.model_validate({"adapter": {"kind": adapter}, "optimizer": {"kind": "adamw", "lr": 1e-2}})
    model = attach(loaded(folder), recipe.adapter, 0)  # type: ignore[arg-type]
    learner, engine = TorchLearner(model, recipe), engine_over(model)
    before = torch.tensor(learner.logprobs([IDS])[0])
    torch.testing.assert_close(before, logprobs_of(loaded(folder, attention="eager"), IDS), rtol=0, atol=1e-4)
    learner.update(make_batch(old=False, ref=False), policy_loss)
    after = torch.tensor(learner.logprobs([IDS])[0])
    assert (after - before).abs().max() > 1e-3
    engine.load(iter(()), 1)
    torch.testing.assert_close(torch.tensor(engine.score([IDS])[0]), after, rtol=0, atol=1e-4)
    done = finish(engine, [request("a", IDS[:10], Sampling(2 * WINDOW, ignore_eos=True), version=1)])["a"]
    said = learner.logprobs([(*IDS[:10], *done.ids)])[0][9:]
    torch.testing.assert_close(torch.tensor(done.logprobs), torch.tensor(said), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_router_and_experts_have_one_precision(family: str, tmp_path: Path) -> None:
    """A router left in fp32 would route otherwise in training than in an engine that holds it in bf16."""
    model = loaded(folder_of(family, tmp_path / "model"), torch.bfloat16)
    routers = [name for name, _ in model.named_parameters() if "router" in name or "gate.weight" in name]
    assert len(routers) >= 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    learner, engine = TorchLearner(model, Recipe()), engine_over(model)
    ours, theirs = (torch.tensor(rows[0]) for rows in (learner.logprobs([IDS]), engine.score([IDS])))
    assert (ours - theirs).abs().mean() < 0.05
    learner.update(make_batch(old=False, ref=False), policy_loss)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_the_router_is_trained(family: str, tmp_path: Path) -> None:
    model = loaded(folder_of(family, tmp_path / "model"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    TorchLearner(model, Recipe.model_validate({"optimizer": {"kind": "adamw", "lr": 1e-2}})).update(
        make_batch(old=False, ref=False), policy_loss
    )
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_tied_weights_stay_one_tensor_through_training_and_saving(tmp_path: Path) -> None:
    folder = folder_of("llama-tied", tmp_path / "model")
    model: Any = loaded(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    learner = TorchLearner(model, Recipe.model_validate({"optimizer": {"kind": "adamw", "lr": 1e-2}}))
    learner.update(make_batch(old=False, ref=False), policy_loss)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in named_weights(model)]
    assert "lm_head.weight" not in names
    model.save_pretrained(tmp_path / "trained")
    with safe_open(tmp_path / "trained" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(names)
    write_tiny_tokenizer(tmp_path / "trained")
    again = loaded(tmp_path / "trained", attention="eager")
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
    said = torch.tensor(learner.logprobs([IDS])[0])
    torch.testing.assert_close(logprobs_of(again, IDS), said, rtol=0, atol=1e-4)
