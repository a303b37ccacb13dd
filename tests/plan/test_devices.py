"""What workers need: a GPU each, and the memory of a share."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError, MachineError
from lockstep.plan import devices
from lockstep.plan.devices import require_devices
from lockstep.plan.floors import H200
from lockstep.plan.memory import Phase
from lockstep.plan.memory_inputs import GIB
from lockstep.plan.preview import Preview, recipe_floor
from lockstep.plan.refusals import refusals

SPLIT = "placement={kind: split, train: 2, rollout: 1}"


def recipe(model: Path, *words: str) -> Recipe:
    return load(
        [
            "recipes/smoke.yaml",
            f"model.path={model}",
            "model.dtype=bf16",
            "prompts_per_step=8",
            "rollout.slots=64",
            *words,
        ]
    )


def phases(model: Path, *words: str) -> dict[str, Phase]:
    preview = Preview.of(recipe(model, *words), 80)
    assert preview is not None
    return {phase.name: phase for phase in preview.memory().phases}


def terms(phase: Phase) -> dict[str, float]:
    return {term.name: term.bytes for term in phase.terms}


def test_a_run_that_needs_more_gpus_than_there_are_is_refused_with_a_table(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="3 workers need a GPU each, and this machine has") as caught:
        require_devices(recipe(tiny_model_dir, SPLIT, "device=cuda"))
    if not devices.gpus_here():
        table = caught.value.mistakes[1:]
        assert [line.split()[2] for line in table[1:]] == ["trains", "trains", "samples"]
        assert all(line.endswith("missing") for line in table[1:])
        (refusal, *_) = refusals(recipe(tiny_model_dir, SPLIT, "device=cuda"))
        assert refusal.name == "gpus"
        assert refusal.what.count("\n") == 4
    require_devices(recipe(tiny_model_dir, SPLIT, "device=cpu"))


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, "AB"),
        ("1", "B"),
        ("1,0", "BA"),
        ("", ""),
        ("-1", ""),
        ("0,-1,1", "A"),
        ("7,0", ""),
        ("GPU-8f3a", ""),
        ("GPU-b,0", "BA"),
        ("GPU-", ""),
        ("MIG-b", "AB"),
    ],
)
def test_the_gpus_are_those_that_cuda_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, found: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 0, GPU-a1, A\necho 1, GPU-b2, B\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert devices.gpus_here() == [*found]


def test_masters_and_moments_are_shared_out_and_weights_are_whole(tiny_model_dir: Path) -> None:
    alone = terms(phases(tiny_model_dir, "adapter.kind=none")["train"])
    four = terms(phases(tiny_model_dir, "adapter.kind=none", "placement={kind: colocated, gpus: 4}")["train"])
    assert four["weights"] == alone["weights"]
    parameters = alone["fp32 masters"] / 4
    assert parameters / 4 <= four["fp32 masters"] / 4 < parameters / 2  # no tensor is cut
    assert four["moments"] == 2 * four["fp32 masters"]
    assert four["gradients sent"] == 2 * parameters
    assert "gradient sums" not in {name for name, size in four.items() if size}


def test_a_sampler_has_no_optimizer_and_each_engine_a_share_of_the_samples(tiny_model_dir: Path) -> None:
    split = terms(phases(tiny_model_dir, "adapter.kind=none", SPLIT)["generate"])
    assert "moments" not in split
    alone = terms(phases(tiny_model_dir, "adapter.kind=none")["generate"])
    two = terms(phases(tiny_model_dir, "adapter.kind=none", "placement={kind: colocated, gpus: 2}")["generate"])
    assert two["keys and values"] == alone["keys and values"] / 2 < GIB


def test_the_floor_of_workers_is_that_of_their_shares(tiny_model_dir: Path) -> None:
    def floor(*words: str) -> dict[str, float]:
        asked = recipe(tiny_model_dir, "adapter.kind=none", *words)
        preview = Preview.of(asked, 80)
        assert preview is not None
        found = recipe_floor(asked, preview.shape, H200, old=False, reference=False)
        return {"train": found.train, "generate": found.generate}

    alone, two = floor(), floor("placement={kind: colocated, gpus: 2}")
    assert two["train"] == alone["train"] / 2
    assert alone["generate"] / 2 <= two["generate"] < alone["generate"]


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_only_gpus_that_this_process_may_use_are_counted(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, "printf '0, GPU-a, NVIDIA A\\n1, GPU-b, NVIDIA B\\n2, GPU-c, NVIDIA C\\n'", monkeypatch)
    for chosen, names in (("2,0", "CA"), ("", ""), ("GPU-c, GPU-a", "CA")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert "".join(name[-1] for name in devices.gpus_here()) == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="3 workers need a GPU each, and this machine has 1"):
        require_devices(recipe(tiny_model_dir, SPLIT, "device=cuda"))


def test_a_tool_that_hangs_is_named_and_not_asked_for_one_process(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(devices, "SMI_SECONDS", 0.5)
    require_devices(recipe(tiny_model_dir, "device=cuda"))
    with pytest.raises(MachineError, match="nvidia-smi has not answered"):
        require_devices(recipe(tiny_model_dir, SPLIT, "device=cuda"))
