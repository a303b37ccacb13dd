"""Evaluation in training: several sets, stopping, keeping the best, alarms, and the same numbers as afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lockstep.checkpoint.store import list_checkpoints
from lockstep.errors import LockstepError
from lockstep.evaluation.records import read_score, score_path
from lockstep.loops.start import resume_run, start_run
from lockstep.run.evaluation import _reason, computing
from lockstep.run.logger import RunLogger
from lockstep.scoring.targets import build_eval_session, find_target
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter, read_metrics
from lockstep.types import Forward
from tests.gallery import Gallery
from tests.loops.runs import LORA, events, recipe, trained, words
from tests.saying import shell

FADING = '''
from pathlib import Path

SCORES = Path(__file__).parent / "runs" / "run" / "scores"


def grade(prompt, reply):
    """Of 8 OOD questions all are right at the first evaluation, 6 at the next, 4 at the next; others by the reply."""
    if "ood" not in prompt.id:
        return sum(reply.encode("utf-8", "surrogatepass")) % 2
    evaluations = len(list(SCORES.glob("*ood_probe*.json")))
    return float(int(prompt.answer) // 9 < 8 - 2 * evaluations)
'''


@pytest.mark.parametrize(("shares", "known"), [((), None), ((1.0, 1.0), "all rewards were equal"), ((1.0, 0.5), "")])
def test_whether_rewards_were_equal_is_unknown_where_no_group_is_compared(
    tmp_path: Path, shares: tuple[float, ...], known: str | None
) -> None:
    rows = [{"reward/zero_std_groups": share, "grad/norm": 1 - share} for share in shares] or [{"reward/mean": 1.0}]
    with RunDirectory.create(tmp_path / "a", "name: a\n", {}) as run, RunWriter(run) as writer:
        for step, row in enumerate(rows, 1):
            writer.step(step, row)
    reason = _reason(cast(RunLogger, SimpleNamespace(run=run)))
    assert reason == known or (bool(known) and str(known) in str(reason))


def with_ood(folder: Path, model: Path, *overrides: str) -> list[str]:
    """A recipe with an OOD set of 8 questions whose score falls by a quarter at each evaluation."""
    found = words(folder, model)
    rows = [{"prompt": f"State the final answer: {a} * 9 =", "answer": str(a * 9)} for a in range(8)]
    (folder / "ood.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "fading.py").write_text(FADING)
    return [
        *found, f"task.heldout={{ood_probe: {folder}/ood.jsonl}}", f"task.verifier.path={folder}/fading.py:grade",
        "eval.also=[{role: ood_probe, items: 8}]", "eval.modes=[{name: greedy}]", "eval.every=1", *overrides,
    ]  # fmt: skip


def test_several_sets_are_scored_each_under_its_name(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, *with_ood(tmp_path, tiny_model_dir)[1:], "steps=2", "eval.every=2")
    names = sorted(path.name for path in run.scores_path.iterdir())
    assert names == [f"step_00000{step}_{name}.json" for step in (0, 2) for name in ("greedy", "ood_probe.greedy")]
    assert read_score(score_path(run.path, 2, "ood_probe.greedy")).conditions.task.startswith("sums/ood_probe/")
    last = read_metrics(run)[-1].metrics
    assert {"eval/greedy/accuracy", "eval/ood_probe.greedy/accuracy", "eval/ood_probe.greedy/se"} <= last.keys()
    log = run.log_path.read_text()
    assert "will evaluate at steps 0, 2 (last): greedy (T=0), 8 items of id_probe, 8 items of ood_probe" in log
    assert (
        "eval at step 0, greedy of ood_probe: pass@1 100.0 % ± 0.0 [67.6, 100.0]; 8 items, 1 item = 12.5 points" in log
    )
    assert log.count("verdict") == 1
    assert sum("sums/ood_probe/" in line for line in log.splitlines()) == 1  # both sets in the final table


def test_two_drops_in_a_row_end_a_run_which_is_saved_compared_and_not_taken_up_again(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    stop = ("eval.stop={kind: drops}", "steps=6", "save.every=6", "save.keep_best=eval/ood_probe.greedy/accuracy")
    run = trained(tmp_path, tiny_model_dir, *with_ood(tmp_path, tiny_model_dir, *stop)[1:])
    assert [row.step for row in read_metrics(run)] == [0, 1, 2]
    (why,) = events(run, "early_stop")
    assert why.startswith(
        "eval/ood_probe.greedy/accuracy fell 2 evaluations in a row (100.0, 75.0, 50.0 % at steps 0 to 2)"
    )
    saved = [info.step for info in list_checkpoints(run.path)]
    assert saved == [1, 2]  # the best that was trained, and the last
    log = run.log_path.read_text()
    assert "stopping after step 2 of 6" in log
    assert "100.0 % ± 0.0 [67.6, 100.0]  50.0 %" in log  # base against the last that was evaluated
    resumed = resume_run(run.path)
    assert [row.step for row in read_metrics(resumed)] == [0, 1, 2]
    assert len(events(resumed, "early_stop")) == 2


def test_weights_that_training_left_as_they_were_are_an_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, "optimizer.lr=0", "steps=2", "eval.modes=[{name: greedy}]")
    warnings = "\n".join(events(run, "warning"))
    assert "eval at step 2, greedy: after 2 steps the weights are still those of the base" in warnings
    assert "loaded in place" not in warnings  # its metrics say why


def test_a_task_of_lm_eval_that_is_not_there_costs_no_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    asked = "eval.lm_eval=[{name: arc, path: nothing.yaml}]"
    with pytest.raises(LockstepError, match=r"there is no file nothing\.yaml|lm-eval is not installed"):
        start_run(recipe(tmp_path, tiny_model_dir, asked))
    assert not (tmp_path / "runs").exists()


ON_A_GPU = pytest.param(("device=cuda", "model.dtype=bf16"), marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", [("device=cpu",), ON_A_GPU])
def test_a_fresh_process_gives_the_scores_of_training_in_every_set_and_mode(
    tmp_path: Path, tiny_model_dir: Path, device: tuple[str, ...]
) -> None:
    """X-1: to the item, id_probe and ood_probe, greedy and eight samples, exported adapter and checkpoint alike."""
    modes = "eval.modes=[{name: greedy}, {name: pass@4, temperature: 0.8, samples: 4}]"
    overrides = with_ood(
        tmp_path, tiny_model_dir, modes, *LORA, *device, f"task.verifier.path={tmp_path}/grader.py:grade"
    )[1:]
    run = trained(tmp_path, tiny_model_dir, *overrides, "eval.every=3")
    export = tmp_path / "exported"
    export.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (export / name).write_bytes((run.checkpoints_path / "step_000003" / name).read_bytes())
    which = ("--recipe", tmp_path / "recipe.yaml", *overrides, "--out", tmp_path / "out")
    result = shell("eval", f"ckpt={run.path}", f"peft={export}", "--no-base", *which)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("greedy", "pass@4", "ood_probe.greedy", "ood_probe.pass@4"):
        inside = read_score(score_path(run.path, 3, name))
        for outside in ("ckpt_step_000003", "peft_step_000000"):
            score = read_score(tmp_path / "out" / f"{outside}_{name}.json")
            assert score.results == inside.results
            assert score.estimates == inside.estimates
            assert score.conditions == inside.conditions


def test_other_numerics_are_on_within_and_off_afterwards(gallery: Gallery) -> None:
    session = build_eval_session(find_target(str(gallery.run("plain").path)).recipe)
    session.prove()
    sequence = [(5, 9, 300, 7, 8, 8)]
    plain = session.engine.score(sequence)
    with computing(session.engine, "mxfp4-w4a4(floor, fp32)") as report:
        assert report.quantised_layers > 0
        assert session.engine.forward == Forward("mxfp4-w4a4")
        assert session.engine.score(sequence) != plain
    assert session.engine.forward == Forward()
    assert session.engine.score(sequence) == plain
    with computing(session.engine, "fp32") as report:
        assert report.quantised_layers == 0
        assert session.engine.score(sequence) == plain


def test_scores_in_two_numerics_have_two_labels_and_are_not_compared(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.cli import main

    args = [str(tiny_model_dir), "--recipe", *words(tmp_path, tiny_model_dir), "--mode", "greedy", "--no-base"]
    for numerics in ("mxfp4-w4a4", ""):
        extra = ["--numerics", numerics] if numerics else []
        assert main(["eval", *args, *extra, "--out", str(tmp_path / (numerics or "plain"))]) == 0
    assert "mxfp4-w4a4(floor, fp32): 14 linear layers quantised" in capsys.readouterr().out
    (one,), (two,) = ((tmp_path / name).iterdir() for name in ("mxfp4-w4a4", "plain"))
    assert [read_score(path).conditions.numerics for path in (one, two)] == ["mxfp4-w4a4(floor, fp32)", "fp32"]
    assert main(["compare", str(one), str(two)]) == 7
    assert "numerics: mxfp4-w4a4(floor, fp32) against fp32" in capsys.readouterr().err
    assert recipe(tmp_path, tiny_model_dir).numerics.eval is None
