"""`lockstep preflight`: one table, and an exit code that says whether a run would start and be of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from tests.loops.runs import words

FEW = ("--items", "4", "--headroom-items", "2", "--smoke-steps", "2")


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the lines by the name of their check."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:5].strip() in ("ok", "warn", "fail")]
    return {line.split()[1]: line for line in lines}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def test_a_recipe_that_can_train_passes(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = words(tmp_path, tiny_model_dir, "optimizer.lr=1e-5")
    assert main(["preflight", *args, *FEW]) == 0
    found = said(capsys)
    assert {"doctor", "format", "headroom", "time", "smoke"} <= found.keys()
    assert found["smoke"].split(":")[0].endswith("2 steps")
    assert "grad/norm" in found["smoke"]
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "cache" / "timing").glob("*.json"))
    assert main(["plan", *args]) == 0  # knows what was measured
    assert "a step takes about" in capsys.readouterr().out


def test_rewards_that_never_differ_fail_it(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grader = f"task.verifier.path={tmp_path}/grader.py:always_right"
    assert main(["preflight", *words(tmp_path, tiny_model_dir, grader), *FEW]) == 1
    found = said(capsys)
    assert found["headroom"].startswith("fail")
    assert "no group has a gradient" in found["headroom"]


def test_a_refused_recipe_costs_no_model(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = words(tmp_path, tiny_model_dir, "steps=100", "optimizer.warmup_steps=90")
    assert main(["preflight", *args, *FEW]) == 1
    out = capsys.readouterr().out
    assert "fail  slow_warmup" in out
    assert "fail  long_warmup" in out
    assert "the run would end before them" in out
    assert not (tmp_path / "cache").exists()
