"""A run in a real pseudo-terminal: what it shows while it goes, and that it leaves the terminal clean."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lockstep.track.console import Console
from tests.loops.runs import NO_EVAL, words

SECONDS = 240
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(words: list[str], columns: int, until: str = "", **environment: str) -> tuple[str, int]:
    """Run `lockstep train` on a terminal; once it shows `until`, press Ctrl-C. Returns everything shown, and the exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it as from a keyboard
        env={**variables, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(theirs)
    shown, end = b"", time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if until and re.search(until.encode(), shown):
            os.write(ours, b"\x03")
            until = ""
    os.close(ours)
    return shown.decode(errors="replace"), process.wait(timeout=60)


@pytest.fixture(scope="module")
def given(home: Path, model: Path) -> list[str]:
    return words(home, model, NO_EVAL)


def test_a_run_on_a_terminal_has_bars_replies_and_colours(given: list[str]):
    shown, code = in_terminal([*given, "name=wide", "track.replies_every=2", "rollout.max_tokens=40"], columns=100)
    text = ANSI.sub("", shown)
    assert code == 0
    assert re.search(r"rollout +\d/8 ", text)
    assert re.search(r"step +\d/3 ━", text)
    assert "update" in text
    assert "save" in text
    assert "\x1b[33m" in shown  # the warning about the learning rate
    of_steps = re.findall(r"step (\d)/3  reward|(reply) [\d.]+  graded", text)
    assert [step or reply for step, reply in of_steps] == ["1", "reply", "reply", "2", "reply", "reply", "3"]
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") - 1  # the cursor was shown right after it was hidden
    assert "━" not in text.splitlines()[-1]


def test_a_narrow_terminal_without_colours_is_interrupted_and_left_clean(given: list[str], home: Path):
    shown, code = in_terminal([*given, "name=narrow", "steps=500"], columns=44, until="step +2/500", NO_COLOR="1")
    text = ANSI.sub("", shown).replace("^C", "")  # Ctrl-C is echoed anywhere
    lines = [line.strip("\r") for line in text.splitlines()]
    assert code == 75
    assert not re.search(r"\x1b\[(3[0-7]|38;)", shown)
    assert "ending this step, then saving" in text
    assert [line for line in lines if re.match(r"step +\d+/500  ", line) and len(line) > 44] == []
    assert lines[-2].startswith("lockstep: SIGINT after step")
    assert shown.rfind("\x1b[?25l") < shown.rfind("\x1b[?25h")


def test_output_to_a_pipe_is_plain(given: list[str]):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *given, "name=plain", "track.replies_every=1"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "\x1b" not in done.stdout
    assert not re.search("^reply", done.stdout, re.MULTILINE)
    assert "━" not in done.stdout


def test_a_killed_run_leaves_the_cursor():
    program = (
        "import os, signal; from lockstep.track.console import Console; "
        "Console(None).start(3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that is closed
        while part := os.read(ours, 65536):  # one call may return the first of several writes alone
            shown += part
    os.close(ours)
    assert shown.rfind(b"\x1b[?25l") < shown.rfind(b"\x1b[?25h")


def test_a_terminal_that_is_closed_does_not_end_the_run(given: list[str], home: Path):
    program = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from lockstep.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "train", *given, "name=closed", "steps=4"],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"step 1/4" not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, b"")
    log = (home / "runs" / "closed" / "log.txt").read_text()
    assert log.count("the output cannot be written (Input/output error)") == 1
    assert "  step 4/4" in log


def test_a_terminal_that_is_lost_while_a_phase_is_drawn_is_given_up(tmp_path: Path):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, Console(tmp_path / "log.txt", stream=stream) as console:
        console.start(3)
        os.close(ours)
        console.phase("rollout", 1, 1)
        console.message("goes on")
    log = (tmp_path / "log.txt").read_text()
    assert log.count("the output cannot be written (Input/output error)") == 1
    assert "goes on" in log
