"""A run that is killed leaves no process and no folder of its Ray behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.cluster.reaper import reaped

HOLDER = "import sys, time; file = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(600)"
"""Keeps a file open, as an agent of Ray keeps its log."""
RUN = f"""
import subprocess, sys, time
from lockstep.cluster.reaper import reaped
with reaped(sys.argv[1]):
    mine = open(sys.argv[1] + "/mine", "w")
    command = [sys.executable, "-c", {HOLDER!r}, sys.argv[1] + "/log"]
    held = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    held.stdout.readline()
    print(held.pid, flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
held.wait()
print("went on", flush=True)
"""


@pytest.mark.parametrize("ends", ["killed", "by itself"])
def test_what_has_a_file_open_in_the_folder_ends_with_the_run(tmp_path: Path, ends: str) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder), ends], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        agent = psutil.Process(int(run.stdout.readline()))
        if ends == "killed":
            run.kill()
        agent.wait(60)
        assert run.stdout.read() == ("" if ends == "killed" else "went on\n")
    for _ in range(100):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert not folder.exists()


def test_other_processes_live_on(tmp_path: Path) -> None:
    (folder := tmp_path / "ray").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "ray_of_another")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with reaped(str(folder)):
            pass
        assert other.poll() is None
        other.kill()
