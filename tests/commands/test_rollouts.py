from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.track.rundir import RunDirectory
from tests.saying import Printed
from tests.track.runs import FACTS, RECIPE, write_steps


@pytest.fixture
def run(tmp_path: Path) -> str:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_steps(run, 1, 3)
    return str(tmp_path / "a")


def test_a_step_is_printed_with_question_reply_and_grade(run: str, printed: Printed) -> None:
    out = printed("rollouts", run, "--step", "2")
    assert "── sums/2 · sample 0 · right · reward 1 · advantage +0.500" in out
    assert "extracted '7' by boxed, answer '7', 3 tokens, weights v3" in out
    assert "     │ State the final answer: 4 + 3 = (step 2)" in out
    assert "     │ \\boxed{7}" in out
    assert "not scored: the verifier's worker was killed after 2 s" in out
    assert out.splitlines()[-1] == "step 2: 4 replies, 1 right, 2 wrong, 1 unscored; shown 4 of 4"


def test_escapes_in_replies_are_shown_not_obeyed(run: str, printed: Printed) -> None:
    out = printed("rollouts", run, "--step", "1")
    assert not {"\x1b", "\x07", "\x00", "\u202e"} & set(out)
    assert "\\x1b[2J\\x1b]0;owned\\x07 \\x00 \\u202etxet" in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--wrong"], "shown 2 of 2 wrong"),
        (["--right"], "shown 1 of 1 right"),
        (["--unscored"], "shown 1 of 1 unscored"),
        (["--limit", "1"], "shown 1 of 4"),
        (["--wrong", "--limit", "1"], "shown 1 of 2 wrong"),
    ],
)
def test_filters(run: str, options: list[str], expected: str, printed: Printed) -> None:
    out = printed("rollouts", run, *options)
    assert (
        out.splitlines()[-1] == f"step 3: 4 replies, 1 right, 2 wrong, 1 unscored; {expected}"
    )  # the last stored step
    assert out.count("──") == int(expected.split()[1])


def test_what_is_not_there_is_said(run: str, tmp_path: Path, printed: Printed) -> None:
    assert "3 stored steps, 1 to 3" in printed("rollouts", run, "--step", "7", code=6)
    assert f"choose from {tmp_path}: " in printed("rollouts", tmp_path / "b", code=6)
    assert main(["rollouts", run, "--limit", "0"]) == 2
    assert main(["rollouts", run, "--wrong", "--right"]) == 2
