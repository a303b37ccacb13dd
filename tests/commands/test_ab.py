"""`lockstep ab`: two runs, one setting apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import cli
from lockstep.commands.ab import pair_of
from lockstep.errors import ConfigError
from lockstep.loops.start import resume_run
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from tests.loops.runs import LORA, words


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["optimizer.lr=3e-4"], "both runs would be the same"),
        (
            ["optimizer.lr=1e-4", "steps=9"],
            "2 settings differ, but an A/B test changes only one: steps: 60 → 9; optimizer.lr",
        ),
        (["adapter.kind=none"], "settings differ"),
        (["seed=4"], "both runs of an A/B test use the same seed"),
        (["name=other"], "no effect on the results"),
    ],
)
def test_what_is_no_comparison_of_one_setting_is_refused(changed: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        pair_of(["sums"], changed, multi=False, name=None)


def test_several_settings_need_a_word():
    a, b, lines = pair_of(["sums"], ["optimizer.lr=1e-4", "steps=9"], multi=True, name="x")
    assert (a.name, b.name) == ("x-a", "x-b")
    assert len(lines) == 2


def test_two_runs_are_trained_and_compared_and_a_second_call_reads_them(
    home: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    given = words(home, model, *LORA, "steps=2", "eval.modes=greedy")
    command = ["ab", *given, "--set", "optimizer.lr=0.05"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    runs = [RunDirectory.open(home / "runs" / name) for name in ("run-a", "run-b")]
    first, second = ({row.step: row.metrics for row in read_metrics(run)} for run in runs)
    assert first[1]["reward/mean"] == second[1]["reward/mean"]  # same seed and weights: the first step is the same
    assert "optimizer.lr: 0.01 → 0.05" in shown
    assert "same training questions" in shown
    assert "same 2 files of yours" in shown
    assert "McNemar" in shown
    report = (home / "runs" / "run-ab.txt").read_text()
    mean = (first[1]["reward/mean"] + first[2]["reward/mean"]) / 2
    assert f"{mean:.4g}" in report
    assert cli.main(command) == 0
    assert [RunDirectory.open(run.path).attempt for run in runs] == [1, 1]
    resume_run(runs[0].path, ["health.clipping=off"])  # as one that a rule has stopped says: no other recipe
    assert cli.main(command) == 0
    assert cli.main([*command[:-1], "optimizer.lr=0.07"]) != 0
    assert "a run of a different recipe already exists" in capsys.readouterr().err


def test_a_setting_that_scores_depend_on_is_compared_and_says_so(
    home: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    given = words(home / "heat", model, *LORA, "steps=1", "eval.modes=greedy")
    assert cli.main(["ab", *given, "--set", "rollout.max_tokens=5"]) == 0
    shown = capsys.readouterr().out
    assert "max_tokens: 6 → 5" in shown
    assert "conditions differ" in shown
    assert "conditions differ" in (home / "heat" / "runs" / "run-ab.txt").read_text()


def test_a_pair_with_passes_over_the_data_is_read_again(home: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    folder = home / "passes"
    given = words(folder, model, *LORA, "eval.enabled=false", "epochs=0.1875")
    command = ["ab", *given, "--set", "optimizer.lr=0.05"]
    assert [cli.main(command), cli.main(command)] == [0, 0]
    assert RunDirectory.open(folder / "runs" / "run-a").attempt == 1


def test_another_grader_in_the_second_run_is_noticed(home: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    folder = home / "edited"
    given = words(folder, model, *LORA, "steps=1", "eval.enabled=false")
    command = ["ab", *given, "--set", "optimizer.lr=0.05"]
    assert cli.main(["train", *given, "name=run-a"]) == 0
    with (folder / "grader.py").open("a") as file:
        file.write("# another\n")
    assert cli.main(command) == 4
    assert "grader.py: the file has changed since run run-a used it" in capsys.readouterr().err
    assert not (folder / "runs" / "run-b").exists()  # noticed before B was trained
