"""Every kind of adapter through everything that happens to one: train, save, resume, merge, plain transformers, evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.build.warm_start import read_weights
from lockstep.checkpoint.store import open_checkpoint
from lockstep.config.schema import Recipe
from lockstep.learner.adapter_files import Base
from lockstep.learner.adapter_set import AdapterSet
from lockstep.learner.adapters import facts_of
from lockstep.learner.merge import merged_weights
from lockstep.learner.top_singular import TopSingular, top_singular
from lockstep.models.attention import NAME
from lockstep.run.state import recipe_hash, restore, save_checkpoint
from lockstep.sync.fingerprint import fingerprint
from tests.learner.batches import make_batch
from tests.learner.kinds import KINDS, LORAS, RESIDUAL
from tests.learner.models import logprobs_of, tokens
from tests.rollout.engines import engine_over

IDS = tokens(30, 3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def recipe_of(model_dir: Path, kind: str, **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "fp32"},
            "adapter": KINDS[kind] | more,
            "device": "cpu",
            "threads": 1,
            "optimizer": {"kind": "adamw", "lr": 2e-2},
            "algorithm": {"kind": "grpo", "kl": {"coef": 0.1}},
            "task": {"kind": "reasoning_gym", "size": 20, "settings": {"min_terms": 2, "max_terms": 2}},
        }
    )


def parts_of(recipe: Recipe, weights: Any = None) -> Parts:
    return build_parts(recipe, build_task_of(recipe), weights)


def steps(parts: Parts, count: int) -> None:
    for _ in range(count):
        parts.learner.update(make_batch(old=False), parts.objective.loss)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str = "", *, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def logprobs(parts: Parts) -> torch.Tensor:
    return torch.tensor(parts.learner.logprobs([IDS])[0])


@pytest.mark.sampled("lora", "pissa-rslora-dora", "oft")
@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_trains_resumes_merges_loads_and_is_evaluated(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
    untrained = logprobs_of(base, IDS)
    recipe = recipe_of(tiny_model_dir, kind)
    parts = parts_of(recipe)
    assert_close(logprobs(parts), untrained, "a fresh adapter changes nothing")

    # train
    steps(parts, 2)
    proof = parts.sync.push(parts.learner, parts.engine)
    folder = save_checkpoint(tmp_path, parts, recipe, 1, proof, best=None)
    expected = logprobs(parts)
    assert (expected - untrained).abs().max() > 0.01
    assert_close(torch.tensor(parts.engine.score([IDS])[0]), expected)
    reference = list(parts.learner.response_logprobs(make_batch().sequences, 1.0, reference=True))

    # merged, and loaded in plain transformers
    merged = dict(merged_weights(parts.policy.model))
    assert merged.keys() == {name for name, _ in base.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
    missing, unexpected = plain.load_state_dict(merged, strict=False)
    assert (unexpected, [name for name in missing if name != "lm_head.weight"]) == ([], [])
    plain.tie_weights()
    plain.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert_close(logprobs_of(loaded, IDS), expected, "merged")
    assert torch.equal(logprobs(parts), expected), "merging left the model as it was"

    # the adapter alone, by PEFT over the original base
    by_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager"), folder
    ).eval()
    assert_close(logprobs_of(by_peft, IDS), expected, "PEFT")

    # evaluated as one of several adapters over one base
    shared = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=NAME).eval()
    adapters = AdapterSet(shared, Base.of(shared, "tiny"))
    assert adapters.attach("mine", folder) == ""
    adapters.activate("mine")
    engine = engine_over(adapters.model)
    assert_close(torch.tensor(engine.score([IDS])[0]), expected, "AdapterSet")
    adapters.activate(None)
    engine.load(iter(()), 1)
    assert_close(torch.tensor(engine.score([IDS])[0]), untrained, "base of the set")

    # resume: to the bit
    weights, state = read_weights(open_checkpoint(tmp_path))
    again = parts_of(recipe, weights)
    restore(again, state, {recipe_hash(recipe)})
    assert torch.equal(logprobs(again), expected)
    assert list(again.learner.response_logprobs(make_batch().sequences, 1.0, reference=True)) == reference
    steps(parts, 2)
    steps(again, 2)
    assert torch.equal(logprobs(again), logprobs(parts))
    assert fingerprint(again.learner.weights()).combined == fingerprint(parts.learner.weights()).combined


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_base(kind: str, tiny_model_dir: Path) -> None:
    """The KL penalty is towards what the run began with, also where the base in memory is a residual."""
    parts = parts_of(recipe_of(tiny_model_dir, kind))
    sequences = make_batch().sequences
    before = parts.learner.response_logprobs(sequences, 1.0)
    steps(parts, 2)
    after = parts.learner.response_logprobs(sequences, 1.0)
    reference = parts.learner.response_logprobs(sequences, 1.0, reference=True)
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (before, after, reference)]
    assert_close(flat[2], flat[0])
    assert (flat[1] - flat[0]).abs().max() > 1e-3
    assert parts.learner.response_logprobs(sequences, 1.0) == after, "the policy came back"


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", ["lora", "dora", "pissa", "olora"])
def test_a_checkpoint_is_at_most_three_adapters_and_the_optimizer(
    kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_model_dir, kind)
    parts = parts_of(recipe)
    steps(parts, 1)
    folder = save_checkpoint(tmp_path, parts, recipe, 1, parts.sync.push(parts.learner, parts.engine), best=None)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    adapter = sum(p.nbytes for p in parts.learner.trainable.values())
    optimizer = sum(t.nbytes for t in parts.learner.optimizer.tensors().values())
    assert sum(sizes.values()) <= 3 * adapter + optimizer
    assert set(sizes) == {
        *("adapter_model.safetensors", "adapter_config.json", "adapter_base.json"),
        *("optimizer.safetensors", "state.json", "COMMIT.json"),
    }


# --- starts that leave a residual base --------------------------------------------------------------------------------
@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", RESIDUAL)
def test_engine_and_proof_have_the_residual_base(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Rollouts of the original base with this adapter would come from another model: the proof must tell the two apart."""
    parts = parts_of(recipe_of(tiny_model_dir, kind))
    held = dict(parts.engine.weights())
    original = dict(AutoModelForCausalLM.from_pretrained(tiny_model_dir).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    assert held[name].data_ptr() == dict(parts.learner.weights())[name].data_ptr()
    assert (held[name] - original[name]).abs().max() > 0.01
    proof = parts.sync.push(parts.learner, parts.engine)
    assert proof.passed
    with torch.no_grad():
        held[name].copy_(original[name])
    assert fingerprint(parts.engine.weights()).combined != proof.fingerprint


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", RESIDUAL)
def test_a_checkpoint_brings_its_own_start(
    kind: str, tiny_model_dir: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine the factors come out otherwise: the residual must be that of the run, not one computed anew."""
    recipe = recipe_of(tiny_model_dir, kind)
    parts = parts_of(recipe)
    steps(parts, 2)
    save_checkpoint(tmp_path, parts, recipe, 1, parts.sync.push(parts.learner, parts.engine), best=None)
    weights, state = read_weights(open_checkpoint(tmp_path))

    import lockstep.learner.adapter_start as start

    ours = top_singular, start._by_qr
    monkeypatch.setattr(start, "top_singular", lambda w, r: TopSingular(*_turned(ours[0](w, r))))
    monkeypatch.setattr(start, "_by_qr", lambda w, r: start.Factors(-ours[1](w, r).down_RI, -ours[1](w, r).up_OR))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "elsewhere"))
    again = parts_of(recipe, weights)
    restore(again, state, {recipe_hash(recipe)})
    assert torch.equal(logprobs(again), logprobs(parts))
    sequences = make_batch().sequences
    reference = parts.learner.response_logprobs(sequences, 1.0, reference=True)
    assert again.learner.response_logprobs(sequences, 1.0, reference=True) == reference


def _turned(top: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return -top.up_NOR, -top.down_NRI, top.values_NR


@pytest.mark.usefixtures("process_settings")
def test_the_second_start_comes_from_the_cache(tiny_model_dir: Path, own_cache: Path) -> None:
    first = parts_of(recipe_of(tiny_model_dir, "pissa"))
    facts = facts_of(first.policy.model)
    assert facts is not None
    assert "largest error of a singular value on 2 sampled layers" in facts.notes[0]
    (folder,) = [path for path in (own_cache / "adapter_starts").iterdir() if path.is_dir()]
    assert folder.name.startswith(f"{facts.base.fingerprint}-pissa-r4-")
    again = parts_of(recipe_of(tiny_model_dir, "pissa"))
    assert "from the cache" in facts_of(again.policy.model).notes[0]  # type: ignore[union-attr]
    assert fingerprint(again.learner.weights()) == fingerprint(first.learner.weights())
    parts_of(recipe_of(tiny_model_dir, "pissa", targets=["q_proj"]))
    parts_of(recipe_of(tiny_model_dir, "pissa", rank=6))
    assert len([path for path in (own_cache / "adapter_starts").iterdir() if path.is_dir()]) == 3


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("kind", LORAS)
def test_a_run_may_start_from_the_adapter_of_another(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_model_dir, kind)
    parts = parts_of(recipe)
    steps(parts, 2)
    folder = save_checkpoint(tmp_path, parts, recipe, 1, parts.sync.push(parts.learner, parts.engine), best=None)
    second = parts_of(recipe_of(tiny_model_dir, kind, start=str(folder)))
    assert_close(logprobs(second), logprobs(parts), atol=1e-6)
    began = second.learner.response_logprobs(make_batch().sequences, 1.0)
    steps(second, 2)
    reference = second.learner.response_logprobs(make_batch().sequences, 1.0, reference=True)
    assert reference == began, "the reference is what the run began with"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
