"""What `lockstep plan` says of memory and time, without a GPU and without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.config.schema import Model
from lockstep.plan.floors import H200
from lockstep.plan.model_shape import read_shape
from lockstep.plan.preview import adapter_lines, folder_here, preview_lines, recipe_floor
from lockstep.plan.refusals import refusals
from tests import hub

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
    assert any("does not fit: it needs 14" in line for line in said)
    words = [f"model.path={seven}", "task={kind: reasoning_gym}", "rollout.max_tokens=512", "prompts_per_step=64"]
    (refusal,) = refusals(load(words), 139.8)
    assert refusal.fix.startswith("set optimizer.states=8bit (needs ")


def test_memory_and_floor_of_a_gpu_that_is_not_here(seven: Path) -> None:
    said = lines(seven, "adapter.kind=lora")
    assert said[0] == "on a GPU of 139.8 GiB (H200), with prompts of 512 tokens and replies of 512"
    assert any(line.startswith("train ") and "activations" in line for line in said)
    recipe = load(["prompts_per_step=64", "samples_per_prompt=8", "rollout.max_tokens=512", "adapter.kind=lora",
                   "task={kind: reasoning_gym}"])  # fmt: skip
    floor = recipe_floor(recipe, read_shape(seven), H200, old=False, reference=False)
    step = next(line for line in said if line.startswith("step "))
    assert float(step.split()[1]) == pytest.approx(floor.total, abs=0.001)


def test_placements_are_compared(seven: Path) -> None:
    said = lines(seven, "placement={kind: split, train: 4, rollout: 4}")
    step = next(line.split()[1] for line in said if line.startswith("step "))
    (line,) = [line for line in said if line.startswith("placements of 8 GPUs (train + rollout): colocated ")]
    found = line.split(": ", 1)[1]
    assert f"4 + 4 {float(step):.2f} s" in found
    assert found.endswith("; no room: 1 + 7")  # one trainer's masters and moments
    seconds = [float(word.split()[-2]) for word in found.split(";")[0].split(", ")]
    assert seconds == sorted(seconds)
    assert len(seconds) == 5
    assert not any(line.startswith("placements") for line in lines(seven, "adapter.kind=lora"))


def test_rates_of_an_unknown_gpu_are_not_made_up(seven: Path) -> None:
    assert not any("takes at least" in line for line in lines(seven, "adapter.kind=lora", gpu=80))


def test_a_cpu_is_planned_without_refusing(seven: Path) -> None:
    said = lines(seven, "device=cpu", gpu=None)
    assert said[0].startswith("on this machine's CPU")
    assert "may fail" in said[-2] or "no reason to refuse" in said[-2]


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


def test_adapters_are_counted_by_layer_as_the_learner_makes_them(tiny_model_dir: Path) -> None:
    import torch

    from lockstep.learner.adapters import attach, describe
    from lockstep.models import load_model, resolve

    recipe = load(
        [
            f"model.path={tiny_model_dir}",
            "task=reasoning_gym",
            "adapter={kind: lora, rank: 4, targets: [q_proj, up_proj]}",
        ]
    )
    model = attach(load_model(resolve(recipe.model), dtype=torch.float32), recipe.adapter, 0)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers, parameters = adapter_lines(recipe)
    assert layers == "lora of rank 4 on 4 layers: 2 q_proj, 2 up_proj"
    assert parameters.startswith(f"{count:,} of {115_008 + count:,} parameters are trained")
    assert describe(recipe.adapter, model).endswith(parameters), "the run's log says the same"
    assert adapter_lines(load([f"model.path={tiny_model_dir}", "task=reasoning_gym"])) == []


def test_a_hub_model_is_planned_from_its_config_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "org" / "tiny"
    repository.mkdir(parents=True)
    for path in tiny_model_dir.iterdir():
        (repository / path.name).write_bytes(path.read_bytes())
    words = ("plan", "model=org/tiny", "task=reasoning_gym", "adapter=lora", f"runs_dir={tmp_path}/runs")
    with hub.serving(tmp_path / "hub", "models") as served:
        code, said = hub.run(served.url, tmp_path / "home", *words)
        assert code == 0, said
        assert "lora of rank 16 on 14 layers" in said
        assert "on this machine's CPU, with prompts of 512 tokens" in said
        assert served.fetched == ["config.json"]
        code, said = hub.run(served.url, tmp_path / "home", "doctor", *words[1:])
        assert "warn  model          org/tiny is not here yet: a run fetches it first" in said
        code, said = hub.run(served.url, tmp_path / "home", *words, "rollout.max_tokens=5000")
        assert (code, "context: rollout.max_tokens=5000 leaves no room" in said) == (2, True)
        assert served.fetched == ["config.json"]
    assert "not on this machine" in hub.run("http://127.0.0.1:9", tmp_path / "other", *words, offline=True)[1]
