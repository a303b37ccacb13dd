"""Whole runs of episodes of several turns: tokens, unscored samples, mixes and curricula that resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import HealthStop, Interrupted
from lockstep.learner.learner import TorchLearner
from lockstep.loops.start import resume_run, start_run
from lockstep.track.rollouts import read_rollouts
from lockstep.track.writer import read_metrics
from lockstep.types import Batch, Loss, Metrics
from tests.envs.played import OWN
from tests.loops.runs import NO_EVAL, numbers, terminate_in, weights, words

GUESS = {"kind": "guess_number", "low": 1, "high": 20, "progress": 0.5, "turns": {"limit": 3, "reply_tokens": 8}}
COUNTER = {"kind": "env", "path": f"{OWN}:Counter", "seeds": 12, "turns": {"reply_tokens": 8}}


def recipe(folder: Path, model: Path, task: dict[str, Any], *overrides: str) -> Recipe:
    (path, *_) = words(folder, model)
    content = yaml.safe_load(Path(path).read_text())
    content |= {"task": task, "rollout": {"max_tokens": 150, "slots": 8}}
    Path(path).write_text(yaml.safe_dump(content))
    return load([path, NO_EVAL, *overrides])


def test_ids_sampled_are_ids_trained_on_every_trajectory(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the learner, against what the engine drew: the same ids, log-probabilities and nothing else."""
    seen: list[Batch] = []
    update = TorchLearner.update

    def watched(self: TorchLearner, batch: Batch, loss: Loss) -> Metrics:
        seen.append(batch)
        return update(self, batch, loss)

    monkeypatch.setattr(TorchLearner, "update", watched)
    run = start_run(recipe(tmp_path, tiny_model_dir, GUESS, "update.drop_zero_advantage=false", "steps=2"))
    rows = [row for step in (1, 2) for row in read_rollouts(run, step)]
    trained = [sequence for batch in seen for sequence in batch.sequences]
    assert len(trained) == len(rows) == 16
    for row, sequence in zip(rows, trained, strict=True):
        assert (sequence.prompt_ids, sequence.ids, sequence.trained) == (row.prompt_ids, row.ids, row.trained)
        assert sum(row.trained) < len(row.ids)
        assert all(a == 0 for a, mask in zip(sequence.advantages, sequence.trained, strict=True) if not mask)
    for step in read_metrics(run):
        if "batch/tokens_trained" in step.metrics:
            assert step.metrics["batch/tokens_trained"] == step.metrics["env/tokens_sampled"]
            assert step.metrics["batch/tokens_generated"] == step.metrics["env/tokens_sampled"]
            assert step.metrics["env/episodes"] == 8
            # The engine's log-probabilities are the learner's, across observations too.
            assert step.metrics["mismatch/mean_abs_dlogp"] < 1e-5


def test_the_metrics_of_episodes_are_of_all_rounds(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Dynamic sampling draws until groups are mixed; those of a model that never guesses are not, so it draws in each round."""
    rounds = ("algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.max_rounds=3", "steps=1")
    run = start_run(recipe(tmp_path, tiny_model_dir, GUESS, *rounds, "health.garbage=off"))
    metrics = read_metrics(run)[-1].metrics
    assert metrics["sampling/rounds"] == 3
    assert metrics["env/episodes"] == metrics["batch/samples"] == 3 * 8
    assert metrics["env/tokens_sampled"] == metrics["batch/tokens_generated"]
    prompts = sum(len(row.prompt_ids) for row in read_rollouts(run, 1))
    assert metrics["env/tokens_processed"] + metrics["env/tokens_reused"] >= prompts


def test_too_many_failures_stop_the_run_and_name_the_first(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = {**COUNTER, "settings": {"mode": "throws"}}
    with pytest.raises(HealthStop, match="the dice are lost"):
        start_run(recipe(tmp_path, tiny_model_dir, task))


def test_a_run_is_evaluated_by_playing(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = start_run(recipe(tmp_path, tiny_model_dir, GUESS, "eval.enabled=true", "eval.items=4", "steps=1"))
    assert all("eval/greedy/accuracy" in row.metrics for row in read_metrics(run) if row.step in (0, 1))


MIX = {
    "kind": "mixed",
    "tasks": {
        "guess": {"task": GUESS},
        "sums": {"weight": 2.0, "task": {"kind": "file", "data": "", "heldout_rows": 8}},
        "hard": {"task": {**COUNTER, "settings": {}}},
    },
    "curriculum": {"low": 0.05, "high": 0.95, "outside": 0.25},
}


def mix(folder: Path) -> dict[str, Any]:
    task = yaml.safe_load(yaml.safe_dump(MIX))
    task["tasks"]["sums"]["task"] |= {
        "data": f"{folder}/sums.jsonl",
        "verifier": {"kind": "python", "path": f"{folder}/grader.py:grade", "workers": 1},
    }
    return task


def test_a_mix_with_a_curriculum_resumes_to_the_bit(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = ("steps=4", "prompts_per_step=4")
    whole = start_run(recipe(tmp_path / "a", tiny_model_dir, mix(tmp_path / "a"), *settings))
    broken = recipe(tmp_path / "b", tiny_model_dir, mix(tmp_path / "b"), *settings)
    path = Path(broken.runs_dir) / broken.name
    terminate_in(tmp_path / "b", path, 2)
    with pytest.raises(Interrupted):
        start_run(broken)
    resumed = resume_run(path)
    assert numbers(resumed) == numbers(whole)
    assert weights(resumed, 4) == weights(whole, 4)
    last = read_metrics(whole)[-1].metrics
    assert {name for name in last if name.startswith("task/") and name.endswith("/share")} == {
        f"task/{name}/share"
        for name in MIX["tasks"]  # type: ignore[attr-defined]
    }
    assert last["task/hard/share"] < 0.25  # never solved: asked less than its weight says


def test_credit_by_turn_needs_an_advantage_that_reads_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = {**GUESS, "turns": {**GUESS["turns"], "credit": "turn"}}  # type: ignore[dict-item]
    with pytest.raises(Exception, match=r"credit=turn would have no effect"):
        recipe(tmp_path, tiny_model_dir, task)
    run = start_run(
        recipe(tmp_path, tiny_model_dir, task, "algorithm.kind=reinforce_pp", "algorithm.kl.coef=0", "steps=1")
    )
    rows = read_rollouts(run, 1)
    assert len({row.advantage for row in rows}) > 1
