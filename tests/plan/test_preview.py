"""What `lockstep plan` says of memory and time, without a GPU and without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.config.schema import Model
from lockstep.plan.floors import H200
from lockstep.plan.preview import folder_here, preview_lines, recipe_floor
from lockstep.plan.shapes import read_shape

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights: a plan needs none."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def lines(folder: Path, *overrides: str, gpu: float | None = 139.8) -> list[str]:
    words = [f"model.path={folder}", "task={kind: reasoning_gym}", "rollout={max_tokens: 512, slots: 512}", *overrides]
    return preview_lines(load(["prompts_per_step=64", "samples_per_prompt=8", *words]), gpu)


def test_a_recipe_that_does_not_fit_is_told_so(seven: Path) -> None:
    said = lines(seven)
    assert any("does not fit: needs 14" in line for line in said)
    assert said[-1].startswith("to fix: optimizer.states=8bit (then ")


def test_memory_and_floor_of_a_gpu_that_is_not_here(seven: Path) -> None:
    said = lines(seven, "adapter.kind=lora")
    assert said[0] == "on a GPU of 139.8 GiB (H200), with prompts of 512 tokens and replies of 512"
    assert any(line.startswith("train ") and "activations" in line for line in said)
    recipe = load(["prompts_per_step=64", "samples_per_prompt=8", "rollout.max_tokens=512", "adapter.kind=lora",
                   "task={kind: reasoning_gym}"])  # fmt: skip
    floor = recipe_floor(recipe, read_shape(seven), H200, old=False, reference=False)
    step = next(line for line in said if line.startswith("step "))
    assert float(step.split()[1]) == pytest.approx(floor.total, abs=0.001)


def test_rates_of_an_unknown_gpu_are_not_made_up(seven: Path) -> None:
    assert not any("takes at least" in line for line in lines(seven, "adapter.kind=lora", gpu=80))


def test_a_cpu_is_planned_without_refusing(seven: Path) -> None:
    said = lines(seven, "device=cpu", gpu=None)
    assert said[0].startswith("on this machine's CPU")
    assert "may fail" in said[-1] or "no reason to refuse" in said[-1]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    assert folder_here(Model(path="nobody/no-such-model")) is None
    assert folder_here(Model(path="not a name at all")) is None
    assert folder_here(Model(path=str(tmp_path))) is None
    said = lines(tmp_path / "missing")
    assert len(said) == 1
    assert "not on this machine" in said[0]


def test_a_built_in_model_that_was_converted_is_found(smollm2_dir: Path) -> None:
    assert folder_here(Model(path="smollm2-135m-instruct")) == smollm2_dir
    assert read_shape(smollm2_dir).parameters == 134_515_008
