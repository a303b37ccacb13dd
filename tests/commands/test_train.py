"""`lockstep train` as a shell sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from tests.loops.runs import LORA, fingerprints, numbers, terminate_in, trained, weights, words
from tests.saying import Printed, shell


def test_sigterm_exits_75_and_a_fresh_process_goes_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The processes here and the one of this test must agree to the last bit."""
    unbroken = trained(tmp_path, tiny_model_dir, *LORA, "name=unbroken")
    args = words(tmp_path, tiny_model_dir, *LORA, "name=stopped")
    path = tmp_path / "runs" / "stopped"
    terminate_in(tmp_path, path, 2)
    first = shell("train", *args)
    assert first.returncode == 75, first.stdout + first.stderr
    said = "SIGTERM after step 2 of 3; a checkpoint was saved\n  to fix: lockstep train --resume " + str(path)
    assert f"lockstep: {said}" in first.stderr
    assert "Traceback" not in first.stderr
    second = shell("train", "--resume", str(path))
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed from step 2: every file verified" in second.stdout
    run = type(unbroken).open(path)
    assert weights(run, 3) == weights(unbroken, 3)
    assert numbers(run) == numbers(unbroken)
    assert fingerprints(run) == fingerprints(unbroken)
    assert run.report_path.is_file()


def test_a_finished_run_ends_with_0_and_its_table(tmp_path: Path, tiny_model_dir: Path, printed: Printed) -> None:
    out = printed("train", *words(tmp_path, tiny_model_dir, "steps=1")).splitlines()
    assert any(line.startswith("task ") and line.endswith("verdict") for line in out)
    assert out[-1] == f"report: {tmp_path}/runs/run/report.html"


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 2, "no recipe was given"),
        (["--resume", "runs/x", "steps=9"], 2, "for a longer run write --steps 9"),
        (["--resume", "runs/x", "optimizer.lr=1"], 2, "a resumed run keeps its own recipe"),
        (["--resume", "nowhere/x"], 6, "no such run directory"),
        (["--resume", __file__], 6, "this is a file, not a run directory"),
        (["quickstart", "optimizer.lrr=1"], 2, "did you mean optimizer.lr?"),
        (["quickstart", "model=/nowhere/model", "runs_dir=TMP"], 4, "no such folder"),
        (["TMP/r.yaml", "--allow-fallback"], 2, "--allow-fallback works only with --resume"),
    ],
)
def test_mistakes_end_with_their_code(
    args: list[str], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *(arg.replace("TMP", str(tmp_path)) for arg in args)]) == code
    assert text in capsys.readouterr().err
