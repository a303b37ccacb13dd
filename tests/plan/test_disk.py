"""The forecast of a run's disk against what real runs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.build.disk import check_first, planned_disk
from lockstep.checkpoint.store import list_checkpoints
from lockstep.errors import CheckpointError, DoesNotFitError
from lockstep.plan.disk import SPARE, TOLERANCE, DiskPlan, Share, judge_first, require_room, shares
from tests.loops.runs import LORA, NO_EVAL, events, recipe, trained

CASES = {
    "full": (),
    "full-bf16": ("model.dtype=bf16",),
    "full-8bit": ("optimizer.states=8bit",),
    "lora": LORA,
    "lora-bf16": (*LORA, "model.dtype=bf16", "adapter.rank=16"),
    "lora-8bit": (*LORA, "optimizer.states=8bit", "adapter.rank=16"),
    "pissa": (*LORA, "adapter.init=pissa"),
    "dora": (*LORA, "adapter.dora=true"),
    "muon": ("optimizer.kind=muon",),
    "ppo": ("algorithm.kind=ppo",),
    "warm-critic": ("algorithm.kind=ppo", *LORA),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_are_as_large_as_forecast(case: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    overrides = (*CASES[case], NO_EVAL, "save.keep_last=3")
    plan = planned_disk(recipe(tmp_path, tiny_model_dir, *overrides), tiny_model_dir)
    assert plan is not None
    run = trained(tmp_path, tiny_model_dir, *overrides)
    sizes = [sum(p.stat().st_size for p in info.path.iterdir()) for info in list_checkpoints(run.path)]
    assert len(sizes) == plan.kept == 3
    assert sum(sizes) == pytest.approx(plan.kept * plan.checkpoint, rel=TOLERANCE)
    assert "disk: a checkpoint is" in run.log_path.read_text()
    assert not [text for text in events(run, "warning") if "checkpoint" in text]
    rollouts = sum(p.stat().st_size for p in run.rollouts_path.iterdir())
    assert rollouts < plan.rollouts


def test_a_run_that_would_fill_the_disk_does_not_start() -> None:
    plan = DiskPlan(weights=8e9, optimizer=24e9, files=1e6, kept=3, rollouts=1e9, scores=1e8)
    require_room(plan, [Share((Path("runs"),), plan.total, plan.total + SPARE)])
    with pytest.raises(DoesNotFitError, match="but none is free: it is full, or holds no files, as /proc"):
        require_room(plan, shares(plan, Path("/proc/runs"), Path("/proc/runs")))
    with pytest.raises(DoesNotFitError, match=r"needs 97\.37 GB of disk space, but only 50\.00 GB are free"):
        require_room(plan, [Share((Path("runs"),), plan.total, 50e9)])


def test_the_first_checkpoint_is_judged(tiny_model_dir: Path, tmp_path: Path) -> None:
    plan = DiskPlan(weights=91e6, optimizer=182e6, files=1e4, kept=2, rollouts=0, scores=0)
    assert judge_first(plan, 280_000_000)[0] == "fine"
    assert judge_first(plan, 330_000_000)[0] == "off"
    assert judge_first(plan, 203_000_000_000)[0] == "leak"
    asked = recipe(tmp_path, tiny_model_dir, *LORA)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "adapter_model.safetensors").write_bytes(bytes(100_000))
    assert check_first(asked, tiny_model_dir, tmp_path / "step") == ""
    (tmp_path / "step" / "base.safetensors").write_bytes(bytes(20_000_000))
    with pytest.raises(CheckpointError, match=r"the largest files are base\.safetensors 20\.00 MB"):
        check_first(asked, tiny_model_dir, tmp_path / "step")
