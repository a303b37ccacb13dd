"""What a command says, a run with scores, and a copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.track.rundir import RunDirectory
from tests.commands.saying import Printed, Said, Told
from tests.gallery import Gallery


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(map(str, words)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def told(said: Said) -> Told:
    def call(*words: object) -> tuple[int, str]:
        code, out, err = said(*words)
        return code, out + err

    return call


@pytest.fixture
def printed(said: Said) -> Printed:
    def call(*words: object, code: int = 0) -> str:
        found, out, err = said(*words)
        assert found == code, out + err
        return err if code else out

    return call


@pytest.fixture
def finished(gallery: Gallery) -> RunDirectory:
    """A run of an adapter, evaluated in training at steps 0, 2 and 3; not to be written to."""
    return gallery.run("lora")


@pytest.fixture
def run(gallery: Gallery, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return gallery.copy("lora", tmp_path / "mine").path
