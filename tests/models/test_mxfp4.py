"""MXFP4 checkpoints against a decoder written as loops, against transformers' own, and against its memory promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models.attention import NAME
from lockstep.models.load import _fill_experts, load_model
from lockstep.models.mxfp4 import Packed, dequantise, is_mxfp4, read_dense, read_weights
from lockstep.models.resolve import resolve
from lockstep.models.stored import stored_parameters
from lockstep.plan.shapes import MXFP4_BYTES
from tests.models.mxfp4_files import decoded, random_blocks, write_mxfp4_model

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    write_mxfp4_model(path)
    return path


def loaded(folder: Path, dtype: torch.dtype, attention: str = NAME) -> Any:
    return load_model(resolve(Model(path=str(folder))), dtype=dtype, attention=attention)


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_two_codes_of_a_byte_and_a_scale() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 15] = 0x7A, 0x1F  # -1 then 6; -6 then 0.5
    numbers = dequantise(blocks, torch.tensor([[129]], dtype=torch.uint8), torch.float32)[:, 0].tolist()
    assert (numbers[0], numbers[1], numbers[30], numbers[31]) == (-4.0, 24.0, -24.0, 2.0)
    assert not any(numbers[2:30])


@pytest.mark.parametrize("inputs", [32, 64, 96, 128])
def test_rearranged_numbers_are_those_that_loops_read(inputs: int) -> None:
    """Steps of 32 and of 64 inputs, every byte in every place, and scales from the least to the largest."""
    blocks, _ = random_blocks((2, inputs, 300))
    scales = torch.randint(0, 129, blocks.shape[:3], dtype=torch.uint8)
    packed = Packed.of(blocks, scales)
    assert (packed.experts, packed.inputs, packed.outputs) == (2, inputs, 300)
    assert torch.equal(packed.dense(torch.float32), decoded(blocks, scales))
    assert packed.words.nbytes + packed.powers.nbytes == MXFP4_BYTES * 2 * inputs * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_read_as_loops_and_as_transformers_read_them(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_blocks((3, 64, 10))
    found = torch.stack([dequantise(b, s, dtype) for b, s in zip(blocks, scales, strict=True)])
    assert torch.equal(found.float(), decoded(blocks, scales))
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.parametrize("scale", [0, 1, 127, 250])
def test_extreme_scales_are_exact_in_bf16(scale: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    found = dequantise(blocks, torch.full((1, 16), scale, dtype=torch.uint8), torch.bfloat16)
    wanted = decoded(blocks[None], torch.full((1, 1, 16), scale, dtype=torch.uint8))[0]
    assert torch.equal(found.float(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loads_with_all_parameters_in_one_dtype(folder: Path, dtype: torch.dtype) -> None:
    assert is_mxfp4(folder)
    model = loaded(folder, dtype)
    stored = load_file(folder / "model.safetensors")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}  # the router, which is stored in fp32, too
    for name in ("gate_up_proj", "down_proj"):
        wanted = decoded(stored[f"{EXPERTS}.{name}_blocks"], stored[f"{EXPERTS}.{name}_scales"])
        assert torch.equal(model.get_parameter(f"{EXPERTS}.{name}").float(), wanted)
    router = "model.layers.1.mlp.router.weight"
    assert torch.equal(model.get_parameter(router), stored[router].to(dtype))
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == [2, 7]  # end tokens come from the folder as for any model
    assert stored_parameters(folder) == sum(parameter.numel() for parameter in model.parameters())


def test_the_model_is_the_one_that_transformers_dequantises(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    ours = loaded(folder, torch.float32, "eager")
    state = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor.float(), state[name]), name
    ids = torch.tensor([[5, 9, 70, 8, 300]])
    with torch.no_grad():
        assert torch.equal(theirs.float()(ids).logits, ours(ids).logits)


def test_shards_may_part_blocks_from_scales(folder: Path, tmp_path: Path) -> None:
    write_mxfp4_model(tmp_path, shards=True)
    one, two = dict(read_weights(folder, torch.bfloat16)), dict(read_weights(tmp_path, torch.bfloat16))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    name = f"{EXPERTS}.down_proj"

    def broken(label: str, tensors: dict[str, torch.Tensor]) -> Path:
        path = copied(folder, tmp_path / label)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    without = {key: value for key, value in stored.items() if key != f"{name}_scales"}
    with pytest.raises(ModelError, match="its blocks or its scales are missing"):
        list(read_weights(broken("a", without), torch.float32))
    nan = stored[f"{name}_scales"].clone()
    nan[1, 2, 0] = 255
    with pytest.raises(ModelError, match="an MXFP4 scale is NaN"):
        list(read_dense(broken("b", stored | {f"{name}_scales": nan}), torch.float32, "cpu"))
    flat = stored[f"{name}_blocks"].flatten(2).contiguous()
    with pytest.raises(ModelError, match="but U8"):
        list(read_weights(broken("c", stored | {f"{name}_blocks": flat}), torch.float32))
    fewer = broken("d", {key: value for key, value in stored.items() if not key.startswith(name)})
    with pytest.raises(ModelError, match="random values would be used"):
        loaded(fewer, torch.float32)


def test_a_weight_without_a_parameter_of_its_name_is_no_zero(folder: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="another name"):
        _fill_experts(model, folder, "cpu", [])
    unused = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    _fill_experts(model, folder, "cpu", unused)  # these were named in a warning


def test_other_quantised_models_are_still_refused(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "awq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quant_method: awq"):
        resolve(Model(path=str(path)))


def test_what_is_saved_beside_trained_weights_says_nothing_of_mxfp4(folder: Path, tmp_path: Path) -> None:
    from lockstep.checkpoint.state import CheckpointState, ModelFiles, write_files

    model = loaded(folder, torch.float32)
    state = CheckpointState(1, dict(model.named_parameters()), {})
    write_files(tmp_path, state, ModelFiles(copy_from=folder))
    again = loaded(tmp_path, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_needs_little_memory_beside_the_result(folder: Path, tmp_path: Path) -> None:
    """Peak resident memory of a process that loads, beyond what it had before."""
    write_mxfp4_model(tmp_path, hidden=1024, width=512, experts=24)
    code = """
import sys
from pathlib import Path

import torch

from lockstep.config.schema import Model
from lockstep.models import attention, load_model, resolve

def status(key):  # MiB
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024

load_model(resolve(Model(path=sys.argv[2])), dtype=torch.float32, attention=attention.NAME)  # imports what loading imports
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
model = load_model(resolve(Model(path=sys.argv[1])), dtype=torch.float32, attention=attention.NAME)
sizes = [p.nbytes / 2**20 for p in model.parameters()]
print(status("VmHWM") - before, sum(sizes), max(sizes))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    grown, size, largest = map(float, done.stdout.split())
    assert size > 290
    assert largest > 90
    print(grown, size, largest)
    assert size < grown < size + largest, (grown, size, largest)
