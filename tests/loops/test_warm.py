"""Warm start: weights proven, lineage recorded, what does not fit refused, and what a resume of such a run needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.build.build import build_policy
from lockstep.build.warm_start import find_parent, pinned
from lockstep.checkpoint.manifest import commit
from lockstep.errors import CheckpointError, LockstepError
from lockstep.loops.start import resume_run, start_run
from lockstep.models.weights import named_weights
from lockstep.scoring.targets import build_eval_session, find_target
from lockstep.sync.fingerprint import fingerprint
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from tests.loops import runs, sft_runs

LORA = ("adapter={kind: lora, rank: 4}", "optimizer.lr=0.01")


def parent(folder: Path, model: Path, *overrides: str) -> RunDirectory:
    return sft_runs.trained(folder, model, "eval.enabled=false", "name=parent", *overrides)


def child(folder: Path, model: Path, *overrides: str, name: str = "child", start: str = "runs/parent") -> RunDirectory:
    args = (f"warm_start={folder}/{start}", f"name={name}", "steps=2", "samples_per_prompt=4", *overrides)
    return runs.trained(folder, model, *args)


def lineage(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = run.manifest()["parent"]
    return found


def test_sft_then_rl(tmp_path: Path, tiny_model_dir: Path):
    first = parent(tmp_path, tiny_model_dir)
    second = child(tmp_path, tiny_model_dir)
    last = runs.fingerprints(first)[4]
    facts = lineage(second)
    assert (facts["run"], facts["step"], facts["fingerprint"]) == (str(first.path), 4, last)
    assert facts["parent"] is None
    rows = {row.step: row for row in read_metrics(second)}
    assert rows[0].proof is not None
    assert rows[0].proof["fingerprint"] == last, "step 0 of the child is what the parent ended with"
    assert second.recipe_yaml().count("checkpoints/step_000004") == 1, "the very checkpoint is pinned"
    log = second.log_path.read_text()
    assert "warm start from" in log
    assert "optimizer and schedule start from zero" in log
    assert f"{first.path} at step 4, weights {last}" in second.report_path.read_text()
    third = child(tmp_path, tiny_model_dir, name="third", start="runs/child")
    assert lineage(third)["parent"] == facts


@pytest.mark.parametrize("kinds", [("full", "lora"), ("lora", "lora"), ("full", "lora", "lora")])
def test_adapters_begin_over_or_go_on(tmp_path: Path, tiny_model_dir: Path, kinds: tuple[str, ...]):
    """However long the way was, the weights at the start are those that the last one ended with."""
    run = parent(tmp_path, tiny_model_dir, *(LORA if kinds[0] == "lora" else ()))
    for number, kind in enumerate(kinds[1:]):
        before = runs.fingerprints(run)[max(runs.fingerprints(run))]
        over = LORA if kind == "lora" else ()
        name = f"child{number}"
        started = child(tmp_path, tiny_model_dir, *over, name=name, start=f"runs/{run.name}")
        session = build_eval_session(find_target(str(started.path), step=0).recipe)
        at_start = dict(named_weights(session.policy.model))
        if kinds[number] == kind:
            assert fingerprint(iter(at_start.items())).combined == before
        else:
            full = {n: t for n, t in at_start.items() if ".lora_" not in n}
            assert fingerprint(iter(full.items())).combined == before
        saved = session.read(find_target(str(started.path)).checkpoint)  # type: ignore[arg-type]
        assert session.prove_saved(saved).fingerprint == runs.fingerprints(started)[2], (
            "its own checkpoint fits the base again"
        )
        assert runs.fingerprints(started)[2] != before
        run = started


def test_a_run_that_was_started_warm_resumes_bit_by_bit(tmp_path: Path, tiny_model_dir: Path):
    parent(tmp_path, tiny_model_dir)
    whole = child(tmp_path, tiny_model_dir, *LORA, runs.NO_EVAL, "save.keep_last=9", name="whole")
    shutil.copytree(whole.path, tmp_path / "runs" / "half")
    recipe = tmp_path / "runs" / "half" / "recipe.yaml"
    assert "name: whole" in recipe.read_text()
    shutil.rmtree(tmp_path / "runs" / "half" / "checkpoints" / "step_000002")
    half = resume_run(tmp_path / "runs" / "half", allow_fallback=True)
    assert runs.fingerprints(half)[2] == runs.fingerprints(whole)[2]
    assert "resumed from step 1" in half.log_path.read_text()


def test_without_its_parent_full_training_resumes_and_adapters_say_why_not(tmp_path: Path, tiny_model_dir: Path):
    first = parent(tmp_path, tiny_model_dir)
    full = child(tmp_path, tiny_model_dir, runs.NO_EVAL, "save.keep_last=9", name="full")
    lora = child(tmp_path, tiny_model_dir, *LORA, runs.NO_EVAL, "save.keep_last=9", name="lora")
    last = runs.fingerprints(full)[2]
    shutil.rmtree(first.path)
    for run in (full, lora):
        shutil.rmtree(run.checkpoints_path / "step_000002")
    assert runs.fingerprints(resume_run(full.path, allow_fallback=True))[2] == last, (
        "its own checkpoint has every weight"
    )
    with pytest.raises(CheckpointError, match="the checkpoint that this run starts from is missing"):
        resume_run(lora.path, allow_fallback=True)


def test_what_does_not_fit_is_refused(tmp_path: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    parent(tmp_path, tiny_model_dir, *LORA)
    for overrides, match in (
        ((), "has adapters .*but this run trains all weights"),
        (("adapter={kind: lora, rank: 8}",), "adapter.rank was 4, is 8"),
        (("adapter={kind: lora, rank: 4, start: elsewhere}",), "adapter.start would have no effect"),
        (("adapter={kind: lora, rank: 4, alpha: 8}",), "adapter.alpha was 32.0, is 8.0"),
    ):
        recipe = runs.recipe(tmp_path, tiny_model_dir, f"warm_start={tmp_path}/runs/parent", *overrides)
        with pytest.raises(CheckpointError, match=match):
            find_parent(recipe)
    for name, match in (("nothing", "neither a run nor a checkpoint"), ("runs", "neither a run nor a checkpoint")):
        with pytest.raises(LockstepError, match=match):
            pinned(runs.recipe(tmp_path, tiny_model_dir, f"warm_start={tmp_path}/{name}"))


def test_another_model_is_refused(tmp_path: Path, tiny_model_dir: Path):
    from tests.tiny import write_tiny_model

    parent(tmp_path, tiny_model_dir)
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_model(other, layers=3)
    with pytest.raises(CheckpointError, match="model differs from this run's in 9 tensors"):
        build_policy(runs.recipe(tmp_path, other, f"warm_start={tmp_path}/runs/parent"))


def test_adapters_in_another_precision_are_refused(tmp_path: Path, tiny_model_dir: Path):
    parent(tmp_path, tiny_model_dir, *LORA)
    other = runs.recipe(tmp_path, tiny_model_dir, f"warm_start={tmp_path}/runs/parent", *LORA, "model.dtype=bf16")
    with pytest.raises(CheckpointError, match="are in fp32, but this run's model is in bf16") as caught:
        build_policy(other)
    assert caught.value.fix == "set model.dtype=fp32"


def test_weights_that_are_not_those_that_were_saved_are_refused(tmp_path: Path, tiny_model_dir: Path):
    """A checkpoint whose files are sound, but whose weights somebody changed and sealed again."""
    first = parent(tmp_path, tiny_model_dir)
    folder = first.checkpoints_path / "step_000004"
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LockstepError, match=r"model\.safetensors"):
        child(tmp_path, tiny_model_dir)
    (folder / "COMMIT.json").unlink()
    commit(folder, 4)
    with pytest.raises(CheckpointError, match="the checkpoint's weights have changed"):
        child(tmp_path, tiny_model_dir, name="again")


def test_the_reference_of_a_warm_start_is_its_start(tmp_path: Path, tiny_model_dir: Path):
    """KL in the first step is 0: policy and reference are the same weights."""
    parent(tmp_path, tiny_model_dir)
    run = child(tmp_path, tiny_model_dir, "algorithm.kl.coef=0.1")
    rows = {row.step: row.metrics for row in read_metrics(run)}
    assert rows[1]["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    assert rows[2]["kl/ref"] > 1e-6


def test_precision_may_change(tmp_path: Path, tiny_model_dir: Path):
    parent(tmp_path, tiny_model_dir)
    policy = build_policy(
        runs.recipe(tmp_path, tiny_model_dir, f"warm_start={tmp_path}/runs/parent", "model.dtype=bf16")
    )
    weights = load_file(tmp_path / "runs" / "parent" / "checkpoints" / "step_000004" / "model.safetensors")
    assert all(torch.equal(t, weights[n].bfloat16()) for n, t in named_weights(policy.model))
    assert start_run.__module__ == "lockstep.loops.start"
