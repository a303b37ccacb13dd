"""The notebooks run as they are, and are stored with their outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from lockstep.track.rundir import RunDirectory
from tests.docs.notebooks import FOLDER, execute

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PANELS = {"first_run": ["first"], "compare_runs": ["high", "low"]}
"""Runs that a notebook leaves."""


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_with_outputs_and_names_no_folder_of_a_machine(name: str):
    path = FOLDER / f"{name}.ipynb"
    outputs = [one for cell in nbformat.read(path, as_version=4).cells for one in cell.get("outputs", [])]
    assert any("image/png" in one.get("data", {}) for one in outputs)
    assert not any(one.output_type == "error" or one.get("name") == "stderr" for one in outputs)
    assert not [word for word in ("/tmp/", "/root/", "/home/") if word in path.read_text()]
    assert path.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path):
    notebook = execute(FOLDER / f"{name}.ipynb", tmp_path)  # raises for a cell that fails
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert runs == PANELS[name]
    assert all(RunDirectory.open(tmp_path / "runs" / run) for run in runs)
    assert any("image/png" in one.get("data", {}) for cell in notebook.cells for one in cell.get("outputs", []))
