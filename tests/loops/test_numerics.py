"""Runs under quantised numerics: what they say, what their scores are labelled with, and that resuming changes no bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.evaluation.records import read_score, score_path
from lockstep.loops.start import resume_run
from lockstep.scoring.targets import find_target
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from tests.loops.runs import LORA, NO_EVAL, fingerprints, numbers, recipe, terminate_in, trained, weights, words

W4A4 = "numerics.train=mxfp4-w4a4"
LABEL = "mxfp4-w4a4(floor, fp32)"


def said(run: RunDirectory) -> str:
    return (run.path / "log.txt").read_text()


def test_a_run_under_w4a4_says_so_and_labels_its_scores(tmp_path: Path, tiny_model_dir: Path):
    run = trained(tmp_path, tiny_model_dir, *LORA, W4A4)
    for phase in ("training", "rollouts", "evaluation"):
        assert f"numerics: {phase} in {LABEL}, 14 linear layers quantised" in said(run)
    assert "proofs of sync compare learner and engine in fp32" in said(run)
    assert "mean |Δlogp| over 2 prompts in mxfp4-w4a4: learner and engine " in said(run)
    assert read_score(score_path(run.path, 3, "greedy")).conditions.numerics == LABEL
    computes = json.loads((run.path / "manifest.json").read_text())["computes"]
    assert computes == {"train": LABEL, "rollout": LABEL, "eval": LABEL}
    rows = {row.step: row for row in read_metrics(run)}
    assert all(rows[step].metrics["mismatch/mean_abs_dlogp"] < 0.02 for step in (1, 2, 3))
    probe = rows[3].proof["probe"]
    assert probe["mean"] <= probe["tolerance"] == 1e-4
    base = trained(tmp_path / "plain", tiny_model_dir, *LORA)
    assert "numerics:" not in said(base)
    assert read_score(score_path(base.path, 3, "greedy")).conditions.numerics == "fp32"
    assert fingerprints(base)[0] == fingerprints(run)[0]
    assert fingerprints(base)[3] != fingerprints(run)[3]


def test_resuming_changes_no_bit(tmp_path: Path, tiny_model_dir: Path):
    from lockstep.errors import Interrupted
    from lockstep.loops.start import start_run

    whole = trained(tmp_path / "whole", tiny_model_dir, *LORA, W4A4, NO_EVAL)
    other = recipe(tmp_path / "parts", tiny_model_dir, *LORA, W4A4, NO_EVAL)
    path = Path(other.runs_dir) / "run"
    terminate_in(tmp_path / "parts", path, 2)
    with pytest.raises(Interrupted):
        start_run(other)
    resumed = resume_run(path)
    assert weights(resumed, 3) == weights(whole, 3)
    assert numbers(resumed) == numbers(whole)


@pytest.mark.parametrize("adapter", [LORA, ()])
def test_each_phase_computes_in_its_own(adapter: tuple[str, ...], tmp_path: Path, tiny_model_dir: Path):
    """Rollouts in W4A4 of a model trained and evaluated in fp32: off-policy, and said to be."""
    mixed = ("numerics.rollout=mxfp4-w4a4", "numerics.eval=fp32", "save.every=3")
    run = trained(tmp_path, tiny_model_dir, *adapter, *mixed)
    assert "numerics: training in fp32, 0 linear layers quantised" in said(run)
    assert f"numerics: rollouts in {LABEL}, 14 linear layers quantised" in said(run)
    assert "rollouts are off-policy" in said(run)
    assert read_score(score_path(run.path, 0, "greedy")).conditions.numerics == "fp32"
    assert all(row.metrics["mismatch/mean_abs_dlogp"] > 1e-3 for row in read_metrics(run) if row.step)
    probe = next(row.proof["probe"] for row in read_metrics(run) if row.step == 1)
    assert probe["mean"] < probe["tolerance"] == 1e-4


def test_full_training_in_w4a4_keeps_learner_and_engine_together(tmp_path: Path, tiny_model_dir: Path):
    """With weights of another version a sample's ratio would not be near 1."""
    run = trained(tmp_path, tiny_model_dir, W4A4, NO_EVAL, "sync.transport=copy", "save.every=3")
    assert all(row.metrics["mismatch/mean_abs_dlogp"] < 0.02 for row in read_metrics(run) if row.step)


def test_an_evaluation_takes_the_numerics_of_the_training(tmp_path: Path, tiny_model_dir: Path):
    run = trained(tmp_path, tiny_model_dir, *LORA, W4A4, "numerics.eval=mxfp4-w4a16", NO_EVAL, "save.every=3")
    plain = words(tmp_path / "other", tiny_model_dir)
    named = ["numerics.eval=fp32"]
    assert find_target(str(run.path)).recipe.numerics.label("eval", "fp32") == "mxfp4-w4a16(floor, fp32)"
    assert find_target(str(run.path), plain).recipe.numerics.label("eval", "fp32") == "mxfp4-w4a16(floor, fp32)"
    assert find_target(str(run.path), [], named).recipe.numerics.label("eval", "fp32") == "fp32"
    assert find_target(str(run.path), plain, named).recipe.numerics.label("eval", "fp32") == "fp32"
    alone = tmp_path / "alone"
    (run.checkpoints_path / "step_000003").rename(alone)
    assert find_target(str(alone), plain).recipe.numerics == load([str(run.recipe_path)]).numerics


def test_a_precision_that_the_weights_are_not_in_is_refused(tmp_path: Path, tiny_model_dir: Path):
    with pytest.raises(ConfigError, match="numerics names bf16, but model"):
        recipe(tmp_path, tiny_model_dir, "numerics.eval=bf16")
    with pytest.raises(ConfigError, match="numerics names bf16, but the weights are in fp32"):
        trained(tmp_path, tiny_model_dir, "numerics.eval=bf16", "model.dtype=auto", "device=cpu")
