"""A run prints at its start what `lockstep plan` prints."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.config.load import load
from lockstep.plan.batch import batch_lines, rate_lines
from tests.loops import runs


def test_a_run_starts_with_its_batch_arithmetic_and_its_rate(tmp_path: Path, tiny_model_dir: Path) -> None:
    words = runs.words(tmp_path, tiny_model_dir, "steps=1", "update.samples_per_update=4", runs.NO_EVAL)
    run = runs.trained(tmp_path, tiny_model_dir, *words[1:])
    log, recipe = (run.path / "log.txt").read_text(), load(words)
    assert all(line in log for line in (*batch_lines(recipe), *rate_lines(recipe)))
    assert "update 2 of each step" in log
    assert json.loads((run.path / "manifest.json").read_text())["batch"].splitlines() == batch_lines(recipe)
