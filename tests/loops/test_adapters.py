"""Adapter runs end to end: the checkpoint of every kind is evaluated as the very weights that were trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.scoring.targets import build_eval_session, find_target
from tests.loops.runs import NO_EVAL, fingerprints, trained

KINDS = {
    "dora": ("adapter.kind=lora", "adapter.rank=4", "adapter.dora=true"),
    "pissa": ("adapter.kind=lora", "adapter.rank=4", "adapter.init=pissa"),
    "olora-rslora": ("adapter.kind=lora", "adapter.rank=4", "adapter.init=olora", "adapter.rslora=true"),
    "nf4": ("adapter.kind=lora", "adapter.rank=4", "adapter.base=nf4"),
    "vera": ("adapter.kind=peft", "adapter.method=vera", "adapter.options={r: 4}"),
    "oft": ("adapter.kind=peft", "adapter.method=oft", "adapter.options={oft_block_size: 8}"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shared", "copy"])
def test_a_run_trains_and_its_checkpoint_is_evaluated(
    kind: str, transport: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    asked = (*KINDS[kind], NO_EVAL, "steps=2", "optimizer.lr=0.01", f"sync.transport={transport}")
    run = trained(tmp_path, tiny_model_dir, *asked)
    prints = fingerprints(run)
    assert len(set(prints.values())) == len(prints)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "another"))
    target = find_target(str(run.path))
    session = build_eval_session(target.recipe)
    assert target.checkpoint is not None
    base = session.prove()
    proof = session.prove_saved(session.read(target.checkpoint))
    assert proof.passed
    assert proof.fingerprint == prints[2] != base.fingerprint
