from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.algorithms.build import build_objective
from lockstep.cli import main
from lockstep.commands.plan import sections
from lockstep.config.load import load
from lockstep.plan.batch import batch_lines
from tests.saying import Printed

RECIPES = Path(__file__).parents[2] / "recipes"


def test_plan_prints_batches_formula_rate_and_steps(printed: Printed) -> None:
    out = printed("plan", "smoke", "steps=40", "update.samples_per_update=4", "optimizer.lr=1e-5")
    recipe = load(["smoke", "steps=40", "update.samples_per_update=4", "optimizer.lr=1e-5"])
    assert out.startswith("smoke: rl, task reasoning_gym, 40 steps\n")
    found = sections(recipe)
    assert all(lines for _, lines in found)
    assert [title for title, _ in found if f"\n{title}\n" in out] == [title for title, _ in found]
    assert all(f"  {line}\n" in out for line in batch_lines(recipe))
    assert all(f"  {line}\n" in out for line in build_objective(recipe).formula.splitlines())
    assert "  learning rate 1e-05: set by optimizer.lr; constant over 80 optimizer steps, no warm-up\n" in out
    assert "  will evaluate at steps 0, 20, 40 (last)" in out
    assert "  will save at steps 20, 40 (last)" in out


def test_an_adapter_of_a_model_that_is_not_here_is_still_named(
    printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    assert "  lora: its layers are not counted, since the model's config is not known here\n" in printed(
        "plan", "smoke", "adapter.kind=lora"
    )


def test_plan_refuses_a_recipe_with_mistakes(printed: Printed) -> None:
    assert "did you mean steps?" in printed("plan", "smoke", "stepz=1", code=2)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_has_a_plan(path: Path, printed: Printed) -> None:
    several = load([str(path)]).placement.kind != "local"
    assert "optimizer step" in printed("plan", path, *(["--gpu-gib", "141"] if several else []))


def test_a_recipe_for_eight_gpus_is_planned_and_refused_for_those_that_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(RECIPES / "gpt_oss_20b_4x4.yaml"), "device=cuda"]) == 2
    said = capsys.readouterr()
    assert "optimizer step" in said.out
    assert "rank 7  samples" in said.err


def test_no_model_is_loaded_or_even_looked_for() -> None:
    command = [sys.executable, "-m", "lockstep", "plan", "smoke", "model.path=nowhere/at-all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
