"""A run with scores, and a copy of it: for the tests of commands that evaluate."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.track.rundir import RunDirectory
from tests.gallery import Gallery


@pytest.fixture
def finished(gallery: Gallery) -> RunDirectory:
    """A run of an adapter, evaluated in training at steps 0, 2 and 3; not to be written to."""
    return gallery.run("lora")


@pytest.fixture
def run(gallery: Gallery, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return gallery.copy("lora", tmp_path / "mine").path
