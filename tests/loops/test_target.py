"""What a name on the command line means, and that its weights are proven to be the ones that it names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lockstep.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    EvaluationError,
    LearnerError,
    RunDirectoryError,
    SyncError,
)
from lockstep.scoring.targets import build_eval_session, find_target
from lockstep.track.rundir import RunDirectory
from lockstep.types import Batch
from tests.loops.runs import LORA, NO_EVAL, fingerprints, trained, words
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def lora(home: Path, model: Path) -> RunDirectory:
    return trained(home, model, *LORA, NO_EVAL, "name=lora", "save.keep_last=3")


@pytest.fixture(scope="module")
def full(home: Path, model: Path) -> RunDirectory:
    return trained(home, model, NO_EVAL, "name=full", "model.dtype=bf16", "steps=2")


def test_a_run_is_its_newest_checkpoint(lora: RunDirectory) -> None:
    target = find_target(str(lora.path))
    assert (target.step, target.label, target.run) == (3, f"{lora.path} at step 3", lora.path)
    assert find_target(str(lora.path), step=2).step == 2
    base = find_target(str(lora.path), step=0)
    assert (base.step, base.checkpoint) == (0, None)


def test_a_checkpoint_finds_its_run(lora: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    target = find_target(str(lora.checkpoints_path / "step_000002"), overrides=["eval.items=3"])
    assert (target.step, target.run, target.recipe.eval.items) == (2, lora.path, 3)
    assert target.trained is not None
    assert target.trained.eval.items == 8
    monkeypatch.chdir(lora.checkpoints_path / "step_000001")
    here = find_target(".")
    assert (here.step, here.run and here.run.resolve()) == (1, lora.path.resolve())


def test_a_recipe_for_a_run_keeps_the_runs_model(home: Path, model: Path, lora: RunDirectory) -> None:
    other = words(home / "other", Path("elsewhere"), "rollout.max_tokens=9")
    target = find_target(str(lora.path), other)
    assert target.recipe.rollout.max_tokens == 9
    assert target.recipe.task.kind == "file"
    assert target.recipe.task.data.source == str(home / "other" / "sums.jsonl")
    assert target.recipe.model.path == str(model)
    assert target.recipe.adapter.kind == "lora"


def test_a_lone_checkpoint_needs_a_recipe(home: Path, model: Path, lora: RunDirectory, tmp_path: Path) -> None:
    alone = tmp_path / "taken-along"
    shutil.copytree(lora.checkpoints_path / "step_000002", alone)
    with pytest.raises(ConfigError, match="is not in the folder of its run"):
        find_target(str(alone))
    target = find_target(str(alone), words(tmp_path, model, *LORA))
    assert (target.step, target.run) == (2, None)
    session = build_eval_session(target.recipe)
    assert target.checkpoint is not None
    assert session.prove_saved(session.read(target.checkpoint)).fingerprint == fingerprints(lora)[2]


def test_a_model_needs_a_recipe_and_is_taken_without_its_adapter(home: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint"):
        find_target(str(model))
    args = words(home, model, *LORA)
    own = find_target(str(model), args)
    assert (own.step, own.recipe.adapter.kind, own.recipe_model) == (0, "none", None)
    other = find_target("org/name", args, ["eval.items=3"])
    assert (other.recipe.model.path, other.recipe.eval.items) == ("org/name", 3)
    assert other.recipe_model is not None
    assert (other.recipe_model.model.path, other.recipe_model.eval.items) == (str(model), 3)
    with pytest.raises(ConfigError, match=r"the model .* has no steps"):
        find_target(str(model), args, step=3)


def test_a_warm_start_belongs_to_the_run_and_to_no_model(
    home: Path, model: Path, lora: RunDirectory, full: RunDirectory, tmp_path: Path
) -> None:
    """A recipe that is given for its task must not put other weights under a model's name, or under a run as its base."""
    own = fingerprints(trained(tmp_path, model, NO_EVAL, "name=own", "steps=1", "model.dtype=bf16"))[1]
    start = ("model.dtype=bf16", f"warm_start={full.path}")
    warm = words(tmp_path, model, *start)
    base = build_eval_session(find_target(str(tmp_path / "runs" / "own"), step=0).recipe).prove().fingerprint
    for name in (str(model), str(tmp_path / "other")):
        target = find_target(name, warm)
        assert target.recipe.warm_start is None
        assert "is not used" in target.notes[0]
        assert target.recipe_model is None or target.recipe_model.warm_start is None
    assert build_eval_session(find_target(str(model), warm).recipe).prove().fingerprint == base
    with pytest.raises(ConfigError, match="is not possible: the target is the model"):
        find_target(str(model), warm, ["model.path=org/name"])
    adapter = tmp_path / "peft"  # of another program: nothing says that it was made for the warm start's weights
    adapter.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(lora.checkpoints_path / "step_000003" / file, adapter / file)
    foreign = find_target(str(adapter), warm)
    assert (foreign.recipe.warm_start, "is not used" in foreign.notes[0]) == (None, True)
    asked = find_target(str(tmp_path / "runs" / "own"), warm, step=0)
    assert build_eval_session(asked.recipe).prove().fingerprint == base
    child = trained(tmp_path, model, NO_EVAL, "name=child", "steps=1", *start)
    asked = find_target(str(child.path), words(tmp_path, model), step=0)
    assert build_eval_session(asked.recipe).prove().fingerprint == fingerprints(full)[2] not in (own, base)


def test_a_misspelt_run_names_those_that_exist(lora: RunDirectory, full: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        find_target(str(lora.path.parent / "lorra"))
    assert "full, lora" in caught.value.fix


def test_a_run_without_checkpoints_says_what_to_do(tmp_path: Path, model: Path) -> None:
    from lockstep.config.load import dump
    from tests.loops.runs import recipe

    RunDirectory.create(tmp_path / "young", dump(recipe(tmp_path, model)), {}).close()
    with pytest.raises(CheckpointError, match="no checkpoint yet") as caught:
        find_target(str(tmp_path / "young"))
    assert "--step 0" in caught.value.fix
    assert find_target(str(tmp_path / "young"), step=0).checkpoint is None


def test_a_damaged_checkpoint_is_passed_over_with_a_note_but_never_taken(lora: RunDirectory, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora.path, run)
    file = run / "checkpoints" / "step_000003" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    target = find_target(str(run))
    assert target.step == 2
    assert "step 3 is damaged: adapter_model.safetensors" in target.notes[0]
    for name, step in ((str(run), 3), (str(run / "checkpoints" / "step_000003"), None)):
        with pytest.raises(CorruptCheckpointError, match=r"adapter_model\.safetensors") as caught:
            find_target(name, step=step)
        assert caught.value.fix == "give another checkpoint with --step: 1, 2"


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_engine_is_proven_to_hold_what_was_saved(kind: str, request: pytest.FixtureRequest) -> None:
    run: RunDirectory = request.getfixturevalue(kind)
    target = find_target(str(run.path))
    assert target.checkpoint is not None
    session = build_eval_session(target.recipe)
    base = session.prove()
    proof = session.prove_saved(session.read(target.checkpoint))
    assert proof.passed
    assert proof.probe is not None
    assert (proof.fingerprint, proof.version) == (fingerprints(run)[target.step], target.step)
    assert base.fingerprint != proof.fingerprint
    assert (base.changed, proof.changed) == (-1, 28 if kind == "lora" else 20)
    assert session.engine.version == proof.version


def test_both_forward_passes_agree(lora: RunDirectory) -> None:
    session = build_eval_session(find_target(str(lora.path), step=0).recipe)
    session.prove()
    sequences = [(5, 9, 300, 7), (8, 8)]
    for ours, theirs in zip(session.learner.logprobs(sequences), session.engine.score(sequences), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert len(ours) in (3, 1)
    with pytest.raises(LearnerError, match="does not train"):
        session.learner.update(Batch(()), lambda inputs: (_ for _ in ()).throw(AssertionError))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["adapter.alpha=8"], "had the fingerprint .* but has .* with this model"),
        (["adapter.rank=8"], "had the fingerprint .* but has .* with this model"),
        (
            ["adapter.targets=[q_proj]"],
            "has 24 tensors that the model lacks, such as model.layers.0.mlp.down_proj.lora_A",
        ),
        (["model.dtype=bf16"], "was saved in fp32, but the model was loaded in bf16"),
    ],
)
def test_a_model_that_is_not_the_one_trained_is_refused(lora: RunDirectory, overrides: list[str], reason: str) -> None:
    target = find_target(str(lora.path), overrides=overrides)
    assert target.checkpoint is not None
    session = build_eval_session(target.recipe)
    with pytest.raises(EvaluationError, match=reason):
        session.read(target.checkpoint)


def test_another_base_under_the_adapter_is_refused(lora: RunDirectory, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, seed=1)
    target = find_target(str(lora.path), overrides=[f"model.path={tmp_path}"])
    assert target.checkpoint is not None
    with pytest.raises(EvaluationError, match="when it was saved, but has"):
        build_eval_session(target.recipe).read(target.checkpoint)


def test_a_weight_that_changes_behind_the_engine_is_noticed(lora: RunDirectory) -> None:
    target = find_target(str(lora.path))
    session = build_eval_session(target.recipe)
    assert target.checkpoint is not None
    saved = session.read(target.checkpoint)
    session.prove()
    with torch.no_grad():
        next(iter(session.policy.model.parameters())).view(-1)[7] += 1  # a weight of the frozen base
    with pytest.raises(SyncError, match="not frozen"):
        session.prove_saved(saved)
