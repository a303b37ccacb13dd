from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.saying import Printed
from tests.track.runs import finished_run


def obey_ctrl_c() -> None:
    """Undo what a shell does to programs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_it_prints_where_the_page_is_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", steps=13)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = [sys.executable, "-m", "lockstep", "view", str(run)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=obey_ctrl_c) as process,
        ExitStack() as after,
    ):
        after.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{32,}/", line)
        with urllib.request.urlopen(f"{address}api/state") as answer:
            assert b'"label":"run"' in answer.read()
        while process.poll() is None:  # Ctrl-C again and again, until it has ended
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "it writes nothing into a run"


def test_what_is_no_run_is_said(tmp_path: Path, printed: Printed) -> None:
    assert "no such run directory" in printed("view", tmp_path / "gone", code=6)


@pytest.mark.parametrize("command", ["view", "serve"])
def test_a_port_that_is_none_is_said(command: str, tmp_path: Path, printed: Printed) -> None:
    assert "must be from 0 to 65535" in printed(command, tmp_path, "--port", "99999", code=2)


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "pip install 'lockstep-rl[view]'" in printed("view", str(finished_run(tmp_path / "run", steps=13)), code=8)


def test_the_page_loads_no_torch(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", steps=13)
    program = (
        "import sys; from pathlib import Path; from lockstep.view.api import Viewer; from lockstep.view import server;"
        "v = Viewer([Path(sys.argv[1])]); v.index.refresh(); v.rollout({'step': '13', 'row': '0'}); v.scores({});"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
