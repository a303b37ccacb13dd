"""Names of runs from templates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.config.load import load, load_run
from lockstep.errors import ConfigError


def test_fields_are_filled_in_when_a_run_is_to_start():
    made = load_run(["sums", "name={task}-{lr}-{adapter}-{update.epochs}", "optimizer.lr=3e-5"])
    assert made.name == "chain_sum-3e-05-lora-1"
    assert re.fullmatch(r"sums-\d{8}-\d{6}", load_run(["quickstart", "name=sums-{date}-{time}"]).name)
    assert load(["quickstart", "name=a-{date}"]).name == "a-{date}"


def test_the_number_is_the_first_that_is_free(tmp_path: Path):
    words = ["quickstart", "name=try-{n}", f"runs_dir={tmp_path}"]
    assert load_run(words).name == "try-1"
    (tmp_path / "try-1").mkdir()
    assert load_run(words).name == "try-2"


def test_an_unknown_field_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"\{tsk\} is not known; did you mean \{task\}"):
        load_run(["quickstart", "name={tsk}"])
    with pytest.raises(ConfigError):
        load(["quickstart", "name={../x}"])
