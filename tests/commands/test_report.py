from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.track.rundir import RunDirectory
from tests.track.runs import FACTS, RECIPE, write_steps


def test_the_page_is_written_while_the_run_still_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_steps(run, 1, 3)
        assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.path / "report.html")
    assert "3 of 30 steps" in (run.path / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_a_run_is_exit_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 6
    assert "not a run directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
