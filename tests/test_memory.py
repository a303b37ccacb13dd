"""Main memory in a control group: its limit, and what counts as used."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from lockstep import memory
from lockstep.build.memory import available_bytes
from lockstep.config.load import load
from lockstep.plan.preview import Preview
from lockstep.rollout.paged.scheduler import free_bytes

GIB = 2**30


def test_a_control_group_has_a_limit_or_none(tmp_path: Path) -> None:
    assert memory.memory_limit(tmp_path) == (None, 0.0)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.memory_limit(tmp_path) == (None, 0.0)
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert memory.memory_limit(tmp_path) == (4096.0, 1024.0)
    (tmp_path / "memory.stat").write_text("anon 700\nfile 300\nactive_file 100\ninactive_file 200\n")
    assert memory.memory_limit(tmp_path) == (4096.0, 724.0)  # cached files make room
    old = tmp_path / "old"
    (old / "memory").mkdir(parents=True)
    (old / "memory/memory.limit_in_bytes").write_text("4096\n")
    (old / "memory/memory.usage_in_bytes").write_text("1024\n")
    (old / "memory/memory.stat").write_text("active_file 1\ntotal_active_file 100\ntotal_inactive_file 200\n")
    assert memory.memory_limit(old) == (4096.0, 724.0)


def test_plans_and_the_cache_of_keys_stay_within_a_limit(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    recipe, cpu = load(["smoke", f"model.path={tiny_model_dir}", "device=cpu"]), torch.device("cpu")
    assert memory.main_memory().total == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text(str(GIB // 4))
    (tmp_path / "memory.current").write_text(str(GIB // 8))
    assert memory.main_memory() == (GIB / 4, GIB / 8)
    preview = Preview.of(recipe)
    assert preview is not None
    assert (preview.total, preview.available, preview.host) == (GIB / 4, GIB / 8, GIB / 8)
    assert (available_bytes(cpu), free_bytes(cpu)) == (GIB / 8, GIB / 16)
