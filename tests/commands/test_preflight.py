"""`lockstep preflight`: one table, and an exit code that says whether a run would start and be of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loops.runs import words
from tests.saying import Said

FEW = ("--items", "4", "--headroom-items", "2", "--smoke-steps", "2")


def checks(out: str) -> dict[str, str]:
    """Return the lines by the name of their check."""
    lines = [line for line in out.splitlines() if line[:5].strip() in ("ok", "warn", "fail")]
    return {line.split()[1]: line for line in lines}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def test_a_recipe_that_can_train_passes(tmp_path: Path, tiny_model_dir: Path, said: Said) -> None:
    args = words(tmp_path, tiny_model_dir, "optimizer.lr=1e-5")
    code, out, _ = said("preflight", *args, *FEW)
    found = checks(out)
    assert code == 0
    assert {"doctor", "format", "headroom", "time", "smoke"} <= found.keys()
    assert found["smoke"].split(":")[0].endswith("2 steps")
    assert "grad/norm" in found["smoke"]
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "cache" / "timing").glob("*.json"))
    assert "a step takes about" in said("plan", *args)[1]  # it knows what was measured


@pytest.mark.parametrize("rows", ["8", "0"])
def test_fewer_held_out_questions_than_it_would_ask_are_no_failure(
    tmp_path: Path, tiny_model_dir: Path, said: Said, rows: str
) -> None:
    args = words(tmp_path, tiny_model_dir, "optimizer.lr=1e-5", "eval.enabled=false", f"task.heldout_rows={rows}")
    code, out, _ = said("preflight", *args, "--headroom-items", "1000", "--smoke-steps", "2")
    found = checks(out)
    assert (code, found["format"][:4], found["headroom"][:4]) == (0, "ok  ", "ok  "), out


def test_rewards_that_never_differ_fail_it(tmp_path: Path, tiny_model_dir: Path, said: Said) -> None:
    grader = f"task.verifier.path={tmp_path}/grader.py:always_right"
    code, out, _ = said("preflight", *words(tmp_path, tiny_model_dir, grader), *FEW)
    found = checks(out)
    assert code == 1
    assert found["headroom"].startswith("fail")
    assert "no group has a gradient" in found["headroom"]


def test_a_refused_recipe_costs_no_model(tmp_path: Path, tiny_model_dir: Path, said: Said) -> None:
    args = words(tmp_path, tiny_model_dir, "steps=100", "optimizer.warmup_steps=90")
    code, out, _ = said("preflight", *args, *FEW)
    assert code == 1
    assert "fail  slow_warmup" in out
    assert "fail  long_warmup" in out
    assert "the run would end before them" in out
    assert not (tmp_path / "cache").exists()
