"""`lockstep plan --fit` proposes settings whose plan fits, and says why for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.plan.preview import Preview
from lockstep.plan.proposal import fit_lines, propose
from lockstep.plan.refusals import refusals

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def seven(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))  # no weights at all
    return [f"model.path={tmp_path}", "task=reasoning_gym", "rollout.max_tokens=512", "prompts_per_step=16"]


@pytest.mark.parametrize("gib", [24.0, 48.0, 80.0, 139.8])
def test_what_is_proposed_fits_and_can_be_pasted(seven: list[str], gib: float) -> None:
    preview = Preview.of(load(seven), gib)
    assert preview is not None
    proposed, _, plan = propose(preview)
    assert plan.fits
    assert all(one.why for one in proposed)
    settings = [one.setting for one in proposed]
    assert refusals(load([*seven, *settings]), gib) == []
    change = {
        24.0: "adapter.kind=lora",
        48.0: "adapter.kind=lora",
        80.0: "optimizer.offload=cpu",
        139.8: "optimizer.states=8bit",
    }
    assert settings[0] == change[gib]
    assert "adapter.kind=lora" not in settings[1:]
    assert fit_lines(preview)[-1].endswith(f"lockstep train RECIPE {' '.join(settings)}")


def test_more_memory_gives_larger_micro_batches_and_longer_replies(seven: list[str]) -> None:
    sizes = []
    for gib in (24.0, 120.0):
        preview = Preview.of(load([*seven, "adapter.kind=lora"]), gib)
        assert preview is not None
        sizes.append(propose(preview)[2].sizes)
    assert sizes[0].tokens < sizes[1].tokens


def test_nothing_is_proposed_where_nothing_fits(seven: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *seven, "--gpu-gib", "8", "--fit"]) == 2
    assert "nothing that leaves the model as it is fits" in capsys.readouterr().out
