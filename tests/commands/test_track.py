from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loops.runs import NO_EVAL, words

SECRETS = {"WANDB_API_KEY": "wb" * 20, "HF_TOKEN": "hf_" + "q" * 34, "MY_SERVICE_PASSWORD": "opensesame-4711"}
TRACKER = """
import os


class Loud:
    def __init__(self, run):
        self.run = run

    def log(self, step, metrics):
        raise ConnectionError(f"https://me:{os.environ['MY_SERVICE_PASSWORD']}@host/ refused {os.environ['HF_TOKEN']}")

    def close(self):
        pass
"""


def lockstep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS and not name.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        env={**kept, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(folder), "NO_COLOR": "1"},
    )  # fmt: skip


def test_keys_of_env_reach_the_trackers_and_no_file_of_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    (tmp_path / "loud.py").write_text(TRACKER)
    sinks = "track.sinks=[{name: wandb, mode: offline}, tensorboard, 'loud.py:Loud']"
    done = lockstep(tmp_path, "train", *words(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", sinks))
    assert done.returncode == 0, done.stderr
    assert "from .env: WANDB_API_KEY, HF_TOKEN, MY_SERVICE_PASSWORD" in done.stderr
    assert "the tracker loud.py:Loud is left behind: ConnectionError: https://***@host/ refused ***" in done.stdout
    run = tmp_path / "runs" / "run"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        content = path.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in content], path
    assert not [value for value in SECRETS.values() if value in done.stdout + done.stderr]
    looked = lockstep(tmp_path, "track", "doctor", str(run))
    assert "ok    wandb key             found (its value is never shown)" in looked.stdout
    assert "warn  loud.py:Loud files    nothing yet; the run has 2 steps; left behind: ConnectionError" in looked.stdout
    assert not [value for value in SECRETS.values() if value in looked.stdout + looked.stderr]
    sent = lockstep(tmp_path, "track", "sync", str(run), "--tracker", "loud.py:Loud")
    assert sent.returncode == 1
    assert "loud.py:Loud: failed: ConnectionError" in sent.stdout


def test_doctor_fails_for_a_tracker_that_is_not_there(tmp_path: Path, tiny_model_dir: Path) -> None:
    done = lockstep(tmp_path, "track", "doctor", *words(tmp_path, tiny_model_dir, "track.sinks=[wandbb]"))
    assert done.returncode == 1
    assert "fail  wandbb package        there is no tracker wandbb; did you mean wandb?" in done.stdout
