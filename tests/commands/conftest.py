"""A model, a run of it with scores, and a copy of that run: for the tests of commands that evaluate."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, trained


@pytest.fixture(scope="module")
def finished(home: Path, model: Path) -> RunDirectory:
    """Evaluated in training at steps 0, 2 and 3."""
    return trained(home, model, *LORA, "eval.every=2", "name=finished", "save.keep_last=3")


@pytest.fixture
def run(finished: RunDirectory, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    shutil.copytree(finished.path, tmp_path / "mine")
    return tmp_path / "mine"
