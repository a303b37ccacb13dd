"""The documented way to a loss of one's own: the file trains a model, and the diff makes the same loss a built-in one."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.algorithms.build import build_objective
from lockstep.config.load import load
from lockstep.track.writer import read_metrics
from lockstep.types import LossInput
from tests.docs.pages import block, quoted_files
from tests.loops import runs

ROOT = Path(__file__).parents[2]
SAPO = ROOT / "docs" / "examples" / "sapo.py"
MASKED = ROOT / "docs" / "examples" / "masked_reinforce.py"
DIFF = ROOT / "docs" / "examples" / "sapo_built_in.diff"


@pytest.mark.parametrize("language", ["python", "diff"])
def test_the_page_shows_the_files_themselves(language: str) -> None:
    shown = block(language)
    assert shown == quoted_files()[language].read_text(encoding="utf-8"), "run: python -m tests.docs.pages"


def test_the_file_has_some_twenty_lines() -> None:
    assert len(SAPO.read_text(encoding="utf-8").splitlines()) <= 20


def tokens() -> LossInput:
    generator = torch.Generator().manual_seed(3)
    old_T = -torch.rand(9, generator=generator, dtype=torch.float64)
    new_T = (old_T + torch.randn(9, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages_T = torch.randn(9, generator=generator, dtype=torch.float64)
    sequence_T = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    return LossInput(new_T, old_T, old_T, advantages_T, torch.zeros_like(old_T), sequence_T, 3)


def sapo(r: float, a: float, tau_pos: float, tau_neg: float) -> float:
    """arXiv 2511.20347: f(r) A with f(r) = σ(τ (r - 1)) · 4/τ."""
    tau = tau_pos if a > 0 else tau_neg
    return 4 / tau / (1 + math.exp(-tau * (r - 1))) * a


def test_the_files_loss_is_the_papers_and_takes_settings() -> None:
    inputs = tokens()
    args = [f"algorithm.loss={SAPO}:sapo", "algorithm.loss.settings.tau_neg=1.5"]
    output = build_objective(load(args)).loss(inputs)
    ratios, advantages = (inputs.logprobs_T - inputs.old_logprobs_T).exp().tolist(), inputs.advantages_T.tolist()
    expected = [-sapo(r, a, 1.0, 1.5) for r, a in zip(ratios, advantages, strict=True)]
    torch.testing.assert_close(output.loss_T.detach(), torch.tensor(expected, dtype=torch.float64))


def test_the_file_trains_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    changed = ["update.samples_per_update=4", f"algorithm.loss={SAPO}:sapo", runs.NO_EVAL, "steps=2"]
    run = runs.trained(tmp_path, tiny_model_dir, *changed)
    last = list(read_metrics(run))[-1]
    assert last.step == 2
    assert last.metrics["ratio/max"] > 1  # the second update of a step is off-policy, and the loss reported it
    assert last.metrics["grad/norm"] > 0
    log = (run.path / "log.txt").read_text()
    assert "sapo.py:sapo(inputs)" in log  # the formula names the function


def test_the_other_example_masks_what_is_outside_of_its_band() -> None:
    """Ratios to the engine of 0.4, 0.6, 1.5 and 2.5 with advantage 2: w A is 0, 1.2, 3 and 0, and so is the gradient."""
    logs_T = torch.tensor([0.4, 0.6, 1.5, 2.5], dtype=torch.float64).log()
    new_T = (logs_T - 3).requires_grad_()
    zeros_T = torch.zeros(4, dtype=torch.float64)
    inputs = LossInput(new_T, new_T.detach(), zeros_T - 3, zeros_T + 2, zeros_T, torch.tensor([0, 0, 1, 1]), 2)
    masked = build_objective(load([f"algorithm.loss={MASKED}:masked_reinforce"])).loss(inputs)
    (gradient_T,) = torch.autograd.grad(masked.loss_T.sum(), new_T)
    assert gradient_T.tolist() == pytest.approx([0, -1.2, -3, 0])
    assert masked.means["correction/kept_share"].tolist() == [0, 1, 1, 0]


def test_the_diff_makes_it_a_built_in_loss(tmp_path: Path) -> None:
    """Applied to a copy of the package, it gives the same losses as the file, its own settings, help and formula."""
    shutil.copytree(ROOT / "lockstep", tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    applied = subprocess.run(
        ["git", "apply", "-C1", "--recount", str(DIFF)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    changed = [line[6:] for line in DIFF.read_text(encoding="utf-8").splitlines() if line.startswith("+++ b/")]
    assert sorted(changed) == [
        "lockstep/algorithms/build.py",
        "lockstep/algorithms/losses.py",
        "lockstep/config/algorithm.py",
    ]
    inputs = tokens()
    columns = (inputs.logprobs_T.tolist(), inputs.old_logprobs_T.tolist(), inputs.advantages_T.tolist())
    done = subprocess.run(
        [sys.executable, "-c", BUILT_IN, json.dumps(columns)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    losses, formula, settings = json.loads(done.stdout)
    file = build_objective(load([f"algorithm.loss={SAPO}:sapo"])).loss(inputs)
    assert losses == pytest.approx(file.loss_T.tolist(), abs=1e-14)
    assert "-σ(τ (r_t - 1)) 4/τ A_t" in formula
    assert settings == ["algorithm.loss.tau_pos", "algorithm.loss.tau_neg"]


BUILT_IN = """
import json, sys, torch
from lockstep.algorithms.build import build_objective
from lockstep.config.help import groups
from lockstep.config.load import load
from lockstep.types import LossInput
new, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in json.loads(sys.argv[1]))
objective = build_objective(load(["algorithm.loss.kind=sapo"]))
inputs = LossInput(new, old, old, advantages, torch.zeros_like(old), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2]), 3)
(own,) = (group for group in groups() if group.title == "algorithm.loss (kind: sapo)")
print(json.dumps([objective.loss(inputs).loss_T.tolist(), objective.formula, [s.path for s in own.settings]]))
"""
