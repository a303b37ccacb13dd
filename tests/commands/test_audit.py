from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.evaluation.records import score_path, write_score
from tests.evaluation.scores import score
from tests.saying import Said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_score(score_path(tmp_path, 0, "greedy"), score([False] * 80))
    write_score(score_path(tmp_path, 20, "greedy"), score([True] * 20 + [False] * 60, step=20))
    write_score(score_path(tmp_path, 20, "sampled"), score([False] * 3, step=20, mode="sampled(T=1)"))
    return tmp_path


def test_the_last_greedy_score_is_read(folder: Path, said: Said) -> None:
    code, out, _ = said("audit", "parser", folder)
    assert code == 0
    lines = out.splitlines()
    assert "greedy of sums/id_probe/numeric: pass@1 25.0 %" in lines[0]
    assert lines[1] == "60 of 80 scored replies are wrong; 0 of those were cut off"
    assert "50 of 60 wrong replies:" in lines
    assert sum("graded as a whole, answer" in line for line in lines) == 50


def test_a_step_a_mode_and_a_number(folder: Path, said: Said) -> None:
    assert "80 of 80 scored" in said("audit", "parser", f"{folder}@0", "-n", "5")[1]
    assert "3 of 3 wrong replies:" in said("audit", "parser", folder, "--mode", "sampled")[1]
    code, _, err = said("audit", "parser", folder, "--mode", "pass")
    assert (code, "choose one with --mode: greedy, sampled(T=1)" in err) == (7, True)
    assert said("audit", "parser", folder, "-n", "0")[0] == 7
    assert said("audit", "parser", folder / "nothing")[0] == 7
