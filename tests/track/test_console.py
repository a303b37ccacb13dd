from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.track.console import WIDTH, Console, brief_line, duration, step_line
from lockstep.track.writer import StepRecord
from tests.track.runs import HOSTILE, metrics

ALL = {
    "reward/mean": 0.41, "answer/correct": 0.39, "length/mean": 8.3, "length/truncated": 0.0, "loss/policy": 0.012,
    "grad/norm": 0.83, "lr": 1e-5, "mismatch/mean_abs_dlogp": 0.0003, "time/rollout": 1.2, "time/update": 2.0,
    "time/sync": 0.001,
}  # fmt: skip
PIPE = """
import sys
from pathlib import Path
from lockstep.track.console import Console
with Console(Path(sys.argv[1])) as console:
    for i in range(20000):
        console.message(f"line {i}")
print("what others print must not fail either")
"""


def record(step: int, values: dict[str, float]) -> StepRecord:
    return StepRecord(step, 1, "2026-11-21T03:30:00.000Z", values)


def ticking(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds


def test_the_line_of_a_step() -> None:
    assert step_line(record(12, ALL), 50, "1m12s", []) == (
        "step 12/50  reward 0.41  correct 0.39  len 8.3  trunc 0.00  loss 0.012  grad 0.83  lr 1.0e-05  Δlogp 0.0003  "
        "rollout 1.2s update 2.0s  eta 1m12s"
    )
    assert step_line(record(3, {"lr": 1e-5, "eval/greedy/accuracy": 0.625}), 100, "", ["grad/norm=250"]) == (
        "step   3/100  lr 1.0e-05  eval greedy 0.625  ! grad/norm=250"
    )


def test_a_line_on_the_screen_is_no_wider_than_it_and_keeps_what_matters_most() -> None:
    long = {**ALL, "validation/loss": 1.2, "time/step": 13.2, "time/evaluate": 3.0}
    long |= {f"eval/{mode}/accuracy": 0.5 for mode in ("greedy", "sampled", "ood_probe.greedy", "ood_probe.sampled")}
    for width in (WIDTH, 80, 60):
        line = brief_line(record(12, long), 100, "1h12m", 7, width)
        assert len(line) <= width
        assert line.startswith("step  12/100")
    line = brief_line(record(12, {**ALL, "time/step": 13.2, "time/evaluate": 3.0}), 50, "1m12s", 7)
    assert line == (
        "step 12/50  reward 0.41  correct 0.39  loss 0.012  len 8.3  grad 0.83  trunc 0.00  Δlogp 0.0003  10.2s  eta 1m12s  ! 7"
    )


def test_the_eta_counts_the_evaluations_that_are_planned() -> None:
    out, now = io.StringIO(), [0.0]
    with Console(None, stream=out, clock=lambda: now[0]) as console:
        console.start(4, evaluations=(0, 2, 4))
        console.step(record(1, ALL))
        now[0] += 2.0
        console.step(record(2, ALL))
        with console.evaluating():
            now[0] += 30.0
        now[0] += 1.0
        console.step(record(3, ALL))
    etas = re.findall(r"eta (.*?)(?:  |$)", out.getvalue(), re.MULTILINE)
    assert etas == ["0s + 2 evaluations", "2s + 1 evaluation", "31s"]


def test_warnings_are_in_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (False, True):
        out = io.StringIO()
        with Console(None, stream=out, terminal=terminal) as console:
            console.message("warning: the judge is slow")
        assert ("\x1b[33m" in out.getvalue()) == terminal


def test_what_goes_on_is_shown_on_the_bar() -> None:
    out = io.StringIO()
    with Console(None, stream=out, terminal=True) as console:
        console.start(4)
        console.phase("rollout")
        console.phase("evaluating greedy", 100, 200)
    assert "rollout" in out.getvalue()
    assert "evaluating greedy 100/200" in out.getvalue()


def test_a_phase_without_pieces_has_no_count_of_the_one_before_it() -> None:
    out = io.StringIO()
    with Console(None, stream=out, terminal=True) as console:
        console.start(4)
        console.phase("rollout", 3, 8)
        console.phase("save")
        console.message("saved")
    assert "rollout 3/8" in out.getvalue()
    assert "save" in out.getvalue()
    assert "save 0/8" not in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (8, "8s"), (59.6, "1m00s"), (72, "1m12s"), (11100, "3h05m"), (187200, "2d04h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_plain_log_has_a_short_line_a_step_and_log_txt_the_whole(tmp_path: Path) -> None:
    out, clock = io.StringIO(), ticking(3.0)
    with Console(tmp_path / "log.txt", stream=out, clock=lambda: next(clock)) as console:
        console.message("model: tiny")
        console.start(10, start_step=2)
        console.step(record(3, {**ALL, "length/truncated": 0.7}))
        console.step(record(4, ALL))
        console.table("Scores", ("mode", "accuracy"), [("greedy", "31 %")])
    lines = out.getvalue().splitlines()
    assert lines[0] == "model: tiny"
    assert lines[1].startswith("step  3/10  reward 0.41")
    assert lines[1].endswith("eta 21s  ! 1")  # 7 steps to go at 3 s
    assert lines[2] == "  ! outside the healthy range: length/truncated 0.7"
    assert lines[3] == "    what it means: lockstep metrics explain length/truncated"
    assert lines[4].endswith("eta 18s")
    assert lines[5:] == ["Scores", "mode    accuracy", "──────  ────────", "greedy      31 %"]
    logged = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    whole = [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", "", line) for line in logged]
    assert whole[1].endswith("rollout 1.2s update 2.0s  eta 21s  ! length/truncated=0.7")
    assert [whole[0], *whole[3:]] == [lines[0], *lines[5:]]


def test_the_log_is_appended_to_by_the_next_attempt(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with Console(tmp_path / "log.txt", stream=io.StringIO()) as console:
            console.message(text)
            assert text in (tmp_path / "log.txt").read_text()  # there before the end
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2


def test_warnings_are_judged_by_step_and_by_the_runs_own_past() -> None:
    out = io.StringIO()
    with Console(None, stream=out) as console:
        console.start(60)
        for step in range(1, 31):
            console.step(record(step, {**metrics(5), "reward/mean": 0.99, "grad/norm": 30.0 if step == 30 else 0.8}))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [("! " in line) for line in lines] == [True] * 6 + [False] * 23 + [True]
    assert out.getvalue().count("! outside the healthy range: reward/mean") == 1  # it is said once
    assert "! outside the healthy range: grad/norm 30" in out.getvalue()


def test_messages_cannot_act_on_the_terminal_nor_be_markup(tmp_path: Path) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        with Console(tmp_path / "log.txt", stream=out, terminal=terminal) as console:
            console.message(HOSTILE + "[/bold][red]x")
        assert "\x1b[2J" not in out.getvalue()
        assert "\\x1b[2J" in out.getvalue()
        assert "[/bold][red]x" in out.getvalue()
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_on_a_terminal_there_is_a_bar_with_eta_below_the_lines(tmp_path: Path) -> None:
    out, clock = io.StringIO(), ticking(60.0)
    with Console(tmp_path / "log.txt", stream=out, terminal=True, clock=lambda: next(clock)) as console:
        console.start(10)
        console.step(record(1, ALL))
        console.step(record(2, ALL))
        console.message("[/bold] saved")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "step  2/10  reward 0.41" in text
    assert "━" in text
    assert "2/10 " in text
    assert "eta 8m00s" in text
    assert "[/bold] saved" in text
    assert "━" not in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_terminal_that_cannot_show_greek_gets_latin(tmp_path: Path) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    with Console(tmp_path / "log.txt", stream=out) as console:
        console.start(50)
        console.step(record(12, ALL))
        console.message("数")
        console.table("t", ("a",), [("b",)])
    assert b"dlogp 0.0003" in raw.getvalue()
    assert b"\\u6570" in raw.getvalue()
    assert "Δlogp" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = subprocess.Popen([sys.executable, "-c", PIPE, str(log)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    os.close(process.stdout.fileno())
    process.stdout = None
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
    lines = log.read_text().splitlines()
    assert lines[-1].endswith("line 19999")
    assert sum("the reader of the output has gone" in line for line in lines) == 1
