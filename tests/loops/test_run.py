"""Whole runs: that they complete, leave everything behind, and depend on nothing that they should not depend on."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.build import build as parts
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.load import dump
from lockstep.errors import ChatError, HealthStop, LearnerError, SyncError
from lockstep.evaluation.records import read_score, score_path
from lockstep.loops import rl
from lockstep.loops.start import start_run
from lockstep.models.weights import named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.run.checkpointer import Checkpointer
from lockstep.run.logger import RunLogger
from lockstep.sync.fingerprint import fingerprint
from lockstep.sync.proof import TOLERANCE
from lockstep.track.rollouts import read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import proof_from_json, read_events, read_metrics
from lockstep.types import WeightStream
from tests.gallery import Gallery
from tests.loops.runs import LORA, NO_EVAL, events, fingerprints, numbers, recipe, trained, weights


def test_a_finished_run_explains_itself(gallery: Gallery) -> None:
    run = gallery.run("lora")
    names = {"recipe.yaml", "manifest.json", "metrics.jsonl", "events.jsonl", "log.txt", "report.html"}
    assert names <= {path.name for path in run.path.iterdir()}
    rows = read_metrics(run)
    assert [row.step for row in rows] == [0, 1, 2, 3]
    proofs = [proof_from_json(row.proof or {}) for row in rows]
    assert [proof.version for proof in proofs] == [0, 1, 2, 3]
    assert all(proof.passed and proof.probe is not None for proof in proofs)
    assert len({proof.fingerprint for proof in proofs}) == 4
    changed = [row.metrics["weights/changed_tensors"] for row in rows[1:]]
    assert changed == [14, 28, 28]  # 14 adapted layers; while B is 0, no gradient reaches A
    assert rollout_steps(run) == [1, 2, 3]
    assert len(read_rollouts(run, 3)) == 8
    scores = {
        (step, mode): read_score(score_path(run.path, step, mode))
        for step in (0, 2, 3)
        for mode in ("greedy", "sampled")
    }
    assert scores[3, "greedy"].conditions.weights == proofs[3].fingerprint
    assert rows[2].metrics["eval/sampled/accuracy"] == scores[2, "sampled"].accuracy
    assert [info.step for info in list_checkpoints(run.path)] == [1, 2, 3]
    kinds = [event.kind for event in read_events(run)]
    assert kinds == ["start", "sync", "checkpoint", "checkpoint", "checkpoint", "base", "verified", "finished"]
    assert "flipped and noticed" in run.log_path.read_text()
    manifest = json.loads(run.manifest_path.read_text())
    assert manifest["formula"].startswith("L = 1/N")
    assert {"template_hash", "heldout_hash", "numerics", "batch"} <= manifest.keys()


def test_a_run_of_one_process_makes_no_batch_of_prompts_twice(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(parts: object, recipe: object, step: int, *, follows: bool) -> None:
        asked.append(step)

    monkeypatch.setattr(rl, "prepare_rollouts", counted)
    trained(tmp_path, tiny_model_dir, NO_EVAL)
    assert asked == []


def test_a_run_is_the_same_again(tmp_path: Path, tiny_model_dir: Path, gallery: Gallery) -> None:
    first = gallery.run("plain")
    again = trained(tmp_path, tiny_model_dir, NO_EVAL, "name=again")
    other = trained(tmp_path, tiny_model_dir, NO_EVAL, "name=other", "seed=6")
    assert weights(first, 3) == weights(again, 3)
    assert [info.step for info in list_checkpoints(again.path)] == [2, 3]
    assert numbers(first) == numbers(again)
    assert fingerprints(first)[1] != fingerprints(other)[1]


def test_the_samples_of_one_question_differ_within_a_step_and_between_steps(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    asked = recipe(tmp_path, tiny_model_dir, NO_EVAL, "optimizer.lr=0", "prompts_per_step=1", "task.heldout_rows=0")
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}))
    run = start_run(asked)
    assert len({row.ids for step in (1, 2, 3) for row in read_rollouts(run, step)}) == 12


def test_evaluating_in_between_changes_no_bit(tmp_path: Path, tiny_model_dir: Path, gallery: Gallery) -> None:
    without = gallery.run("plain")
    often = trained(tmp_path, tiny_model_dir, "name=often", "eval.every=1", "eval.also=[{role: train, items: 4}]")
    assert weights(without, 3) == weights(often, 3)
    assert [read_rollouts(without, step) for step in (1, 2, 3)] == [read_rollouts(often, step) for step in (1, 2, 3)]


@pytest.mark.parametrize("adapter", [(), LORA], ids=["full", "lora"])
def test_an_engine_with_its_own_weights_trains_the_same(
    tmp_path: Path, tiny_model_dir: Path, gallery: Gallery, adapter: tuple[str, ...]
) -> None:
    shared = gallery.run("plain_lora" if adapter else "plain")
    copied = trained(tmp_path, tiny_model_dir, *adapter, NO_EVAL, "name=copied", "sync.transport=copy")
    assert weights(shared, 3) == weights(copied, 3)
    assert numbers(shared) == numbers(copied)


@pytest.mark.parametrize("adapter", [(), LORA[:2]], ids=["full", "lora"])
def test_a_learning_rate_of_zero_changes_nothing(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...]
) -> None:
    run = trained(tmp_path, tiny_model_dir, *adapter, "optimizer.lr=0", "eval.items=4")
    assert len(set(fingerprints(run).values())) == 1
    assert all(row.metrics["weights/changed_tensors"] == 0 for row in read_metrics(run) if row.step)
    before, after = (read_score(score_path(run.path, step, "sampled")) for step in (0, 3))
    assert before.results == after.results


def test_the_base_of_a_run_is_the_model_on_disk(tmp_path: Path, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = trained(tmp_path, tiny_model_dir, "eval.items=4", "steps=1")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert fingerprint(named_weights(model)).combined == fingerprints(run)[0]
    saved = AutoModelForCausalLM.from_pretrained(run.checkpoints_path / "step_000001")
    assert fingerprint(named_weights(saved)).combined == fingerprints(run)[1]


def test_it_works_inside_a_running_event_loop(tmp_path: Path, tiny_model_dir: Path, gallery: Gallery) -> None:
    """S0-7: nothing here needs, starts or disturbs an event loop."""

    async def inside() -> dict[str, str]:
        task = asyncio.create_task(asyncio.sleep(0, "the loop still turns"))
        run = trained(tmp_path, tiny_model_dir, "name=inside", "eval.items=4")
        assert await task == "the loop still turns"
        return weights(run, 3)

    assert asyncio.run(inside()) == weights(gallery.run("plain"), 3)


def test_several_updates_of_one_rollout_move_the_ratio(tmp_path: Path, tiny_model_dir: Path, gallery: Gallery) -> None:
    run = trained(
        tmp_path, tiny_model_dir, NO_EVAL, "update.samples_per_update=4", "update.epochs=2", "optimizer.lr=0.03"
    )
    rows = read_metrics(run)
    assert all(row.metrics["ratio/max"] > 1 for row in rows)
    assert all(row.metrics["batch/optimizer_steps"] == 4 for row in rows)
    assert [proof_from_json(row.proof or {}).version for row in rows] == [4, 8, 12]
    assert all(row.metrics["ratio/max"] == 1 for row in read_metrics(gallery.run("plain")))


@pytest.mark.parametrize("adapter", [(), LORA], ids=["full", "lora"])
def test_the_kl_penalty_is_to_the_base(
    tmp_path: Path, tiny_model_dir: Path, gallery: Gallery, adapter: tuple[str, ...]
) -> None:
    run = trained(tmp_path, tiny_model_dir, *adapter, NO_EVAL, "algorithm.kl.coef=0.5")
    kl = [row.metrics["kl/ref"] for row in read_metrics(run)]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # before the first update the policy is its own reference
    assert kl[1] > 1e-5
    assert kl[2] > 1e-5
    free = gallery.run("plain_lora" if adapter else "plain")
    assert fingerprints(free)[2] != fingerprints(run)[2]


class ForgetfulEngine(NativeEngine):
    """Takes over everything but one tensor, once training has begun."""

    lost = "model.layers.1.mlp.up_proj.weight"

    def load(self, stream: WeightStream, version: int) -> None:
        super().load(((name, tensor) for name, tensor in stream if version < 2 or name != self.lost), version)


def test_an_engine_that_misses_a_tensor_stops_the_run(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "native_engine", ForgetfulEngine)
    with pytest.raises(SyncError, match=ForgetfulEngine.lost.replace(".", r"\.") + ": stale"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, "sync.transport=copy")
    run = tmp_path / "runs" / "run"
    assert [info.step for info in list_checkpoints(run)] == [1]
    (line,) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"stopped"' in line]
    assert ForgetfulEngine.lost in line["message"]
    assert line["facts"]["error"] == "SyncError"


def test_a_sampled_log_probability_that_is_not_trainings_stops_an_exact_run(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        TOLERANCE, "fp32", 0.0
    )  # as with numerics.exact: this probe agrees, decoding rounds in other places
    with pytest.raises(
        SyncError, match=r"step 1: .*log-probabilities of sampled tokens differ from those in training by up to"
    ):
        trained(tmp_path, tiny_model_dir, NO_EVAL, "name=broken")
    assert not list_checkpoints(tmp_path / "runs" / "broken")
    trained(tmp_path, tiny_model_dir, NO_EVAL, "name=cut", "rollout.top_k=50")  # another distribution: no promise


def test_gradients_that_are_not_finite_stop_the_run_before_they_do_harm(tmp_path: Path, tiny_model_dir: Path) -> None:
    absurd = f"task.verifier.path={tmp_path}/grader.py:absurd"
    given = "algorithm.advantage.divide_by_std=false", "update.max_skipped=2", "health.garbage=warn"
    settings = recipe(tmp_path, tiny_model_dir, NO_EVAL, absurd, *given)
    with pytest.raises(LearnerError, match="2 steps in a row were skipped"):
        start_run(settings)
    run = tmp_path / "runs" / "run"
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][:1]
    assert row["metrics"]["grad/skipped"] == 1
    assert row["metrics"]["weights/changed_tensors"] == 0


def test_a_verifier_that_fails_stops_the_run_and_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "calls = []\n"
        "def grade(prompt, reply):\n"
        "    calls.append(reply)\n"
        "    if len(calls) > 200:\n"
        "        raise RuntimeError('the judge went home')\n"
        "    return len(calls) % 2\n"
    )
    with pytest.raises(HealthStop, match="the judge went home"):
        trained(tmp_path, tiny_model_dir, NO_EVAL, f"task.verifier.path={late}:grade", "steps=40")
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert "fix the verifier" in log


@pytest.mark.parametrize(
    ("question", "match"),
    [("far too long " * 5000, "exceed the model's context"), ("<|im_end|>", "reads as a control token")],
)
def test_a_row_that_can_never_be_asked_is_found_before_the_first_step(
    tmp_path: Path, tiny_model_dir: Path, question: str, match: str
) -> None:
    """Not at the step that draws it: what is in a file is known from the start."""
    made = recipe(tmp_path, tiny_model_dir, NO_EVAL, "task.heldout_rows=0", "steps=1", "prompts_per_step=1")
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": question, "answer": "1"}) + "\n")
    with pytest.raises(ChatError, match=match) as caught:
        start_run(made)
    assert caught.value.where.startswith("prompt sums/41")


def test_the_best_checkpoint_is_kept_and_the_base_is_none(tmp_path: Path, tiny_model_dir: Path) -> None:
    """With a verifier that always pays, no step is better than the base: nothing beyond the newest is kept."""
    keep = ("save.keep_best=eval/greedy/accuracy", "save.keep_last=1", "eval.every=1", "steps=4")
    paid = f"task.verifier.path={tmp_path}/grader.py:always_right"
    flat = trained(tmp_path, tiny_model_dir, *keep, paid, "health.garbage=off", "name=flat")
    assert [row.metrics["eval/greedy/accuracy"] for row in read_metrics(flat)] == [1.0] * 5
    assert [info.step for info in list_checkpoints(flat.path)] == [1, 4]
    run = trained(tmp_path, tiny_model_dir, *keep[1:], "save.keep_best=reward/mean", "name=best")
    rewards = {row.step: row.metrics["reward/mean"] for row in read_metrics(run) if row.step}
    best = min(step for step, reward in rewards.items() if reward == max(rewards.values()))
    assert [info.step for info in list_checkpoints(run.path)] == sorted({best, 4})


def test_what_is_not_a_number_is_never_the_best(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A run that diverges would otherwise delete its best checkpoint, and keep the first one that is of no use."""
    made = recipe(tmp_path, tiny_model_dir, NO_EVAL, "save.keep_best=reward/mean")
    nothing: Any = None
    with RunDirectory.create(tmp_path / "run", dump(made), {}) as run:
        logger = RunLogger(run, made)
        keeper = Checkpointer(nothing, made, logger, 0)
        values = (math.nan, 0.25, 0.5, math.nan, 0.375)
        assert [keeper.note(step, {"reward/mean": value}) for step, value in enumerate(values)] == [
            False, True, True, False, False,
        ]  # fmt: skip
        logger.close()


def test_the_stored_recipe_is_complete(gallery: Gallery) -> None:
    run = gallery.run("plain")
    stored = yaml.safe_load(run.recipe_yaml())
    assert stored["optimizer"]["betas"] == [0.9, 0.999]
    assert events(run, "finished") == ["report.html"]
