"""`lockstep probe` with a real tiny model: what it measures, stores and advises."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.evaluation.records import read_score
from tests.loops.runs import words
from tests.saying import Said

GOOD = '''
from lockstep.types import Grade

def grade(prompt, reply):
    """Every reply has its box; right for one byte sum in three."""
    right = sum(reply.encode("utf-8", "surrogatepass")) % 3 == 0
    return Grade(float(right), {"correct": float(right), "boxed": 1.0}, reply, "boxed")

def unboxed(prompt, reply):
    return Grade(0.0, {"correct": 0.0, "boxed": 0.0}, None, "none")
'''


@pytest.fixture
def recipe(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    (tmp_path / "own.py").write_text(GOOD)
    return words(tmp_path, tiny_model_dir, f"task.verifier.path={tmp_path}/own.py:grade")


def test_format_goes_or_does_not(recipe: list[str], tiny_model_dir: Path, tmp_path: Path, said: Said) -> None:
    code, out, _ = said("probe", "format", tiny_model_dir, "--items", "8", "--recipe", *recipe)
    assert code == 0
    assert "boxed: 8 of 8 replies, 100.0% [67.6%, 100.0%]" in out
    assert "go by the rule (at least 95%), but 8 replies cannot tell" in out
    wrong = [*recipe, f"task.verifier.path={tmp_path}/own.py:unboxed"]
    code, out, err = said("probe", "format", tiny_model_dir, "--items", "8", "--recipe", *wrong)
    assert code == 7
    assert "no-go: the rate is below 95%" in out
    assert "boxed in 0.0% of replies, below 95 %" in err


def test_what_was_passed_over_is_said(recipe: list[str], tiny_model_dir: Path, said: Said) -> None:
    """Here a warm start, which has no part in what a model's own weights say."""
    asked = [*recipe, "warm_start=runs/gone"]
    code, out, _ = said("probe", "format", tiny_model_dir, "--items", "8", "--recipe", *asked)
    assert code == 0
    assert out.startswith("warning: warm_start=runs/gone is not used: ")


def test_headroom_draws_groups_as_training_would(
    recipe: list[str], tiny_model_dir: Path, tmp_path: Path, said: Said
) -> None:
    code, out, _ = said(
        "probe", "headroom", tiny_model_dir, "--items", "6", "--max-tokens", "3", "--out", tmp_path / "out", "--recipe", *recipe
    )  # fmt: skip
    assert code == 0
    (path,) = (tmp_path / "out").iterdir()
    score = read_score(path)
    assert (score.samples, score.items, score.conditions.max_tokens) == (8, 6, 3)
    assert score.conditions.task.startswith("sums/train/")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("pass@")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@8",
    ]
    assert "mixed groups: " in out
    assert "advice: " in out


def test_mistakes_end_with_their_code(recipe: list[str], tiny_model_dir: Path, said: Said) -> None:
    assert said("probe", "headroom", tiny_model_dir, "--samples", "1", "--recipe", *recipe)[0] == 2
    assert said("probe", "format", tiny_model_dir, tiny_model_dir.parent, "--recipe", *recipe)[0] == 2
    assert said("probe", "format", tiny_model_dir)[0] == 2
    assert said("probe", "taste", tiny_model_dir)[0] == 2
