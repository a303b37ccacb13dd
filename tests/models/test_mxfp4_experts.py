"""Experts that stay as an MXFP4 checkpoint stores them: the model, its runs and its exports are those of dense experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.errors import ConfigError, ModelError
from lockstep.export.check import answer
from lockstep.export.export import export
from lockstep.learner.adapter_files import Base
from lockstep.models import exact
from lockstep.models.load import load_model
from lockstep.models.mxfp4 import Packed, read_packed
from lockstep.models.mxfp4_experts import Mxfp4Experts
from lockstep.models.resolve import resolve
from lockstep.plan.model_shape import recipe_shape
from lockstep.plan.refusals import refusals
from lockstep.scoring.targets import find_target
from lockstep.track.writer import read_metrics
from tests.loops.runs import LORA, NO_EVAL, trained
from tests.models.mxfp4_files import random_blocks, write_mxfp4_model

FOUR_BITS = (*LORA, NO_EVAL, "steps=2", "adapter.targets=attention")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    write_mxfp4_model(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_with_packed_experts_is_the_dense_one(folder: Path, dtype: torch.dtype) -> None:
    place = resolve(schema.Model(path=str(folder)))
    dense, packed = (load_model(place, dtype=dtype, attention="eager", packed=kept) for kept in (False, True))
    names = {name for name, one in packed.named_parameters() if not one.is_floating_point()}
    assert len(names) == 2 * 2 * 2
    assert all(".experts." in name for name in names)
    ids = torch.arange(3, 63).view(2, 30)
    assert torch.equal(dense(ids).logits, packed(ids).logits)
    assert Base.of(dense, "m") == Base.of(packed, "m")


def test_gradients_pass_through_packed_experts() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=64, intermediate_size=32, num_local_experts=4)
    dense = GptOssExperts(config)
    parts = [Packed.of(*random_blocks(tuple(one.shape))) for one in (dense.gate_up_proj, dense.down_proj)]
    with torch.no_grad():
        for parameter, part in zip((dense.gate_up_proj, dense.down_proj), parts, strict=True):
            parameter.copy_(part.dense(torch.float32))
        for bias in (dense.gate_up_proj_bias, dense.down_proj_bias):
            bias.normal_()
    packed = Mxfp4Experts(dense, *parts)
    x = torch.randn(30, 64, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    weight = torch.rand(30, 2, requires_grad=True)
    inputs = [x, weight, dense.gate_up_proj_bias, dense.down_proj_bias]
    theirs, ours = (experts(x, index, weight) for experts in (dense, packed))
    assert torch.equal(theirs, ours)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (theirs, ours)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_run_on_packed_experts_is_that_on_dense_ones(folder: Path, tmp_path: Path) -> None:
    runs = [trained(tmp_path / base, folder, *FOUR_BITS, f"adapter.base={base}") for base in ("full", "mxfp4")]
    norms = [[row.metrics["grad/norm"] for row in read_metrics(run) if row.step] for run in runs]
    assert norms[0] == norms[1]
    frozen = [next(line for line in run.log_path.read_text().splitlines() if "base unchanged" in line) for run in runs]
    assert ["37 frozen tensors" in frozen[0], "41 frozen tensors" in frozen[1]] == [True, True]  # blocks and scales
    assert all("of 161,488 parameters are trained" in (Path(run.path) / "log.txt").read_text() for run in runs)
    adapters = [next(Path(run.path).glob("checkpoints/*2/adapter_model.safetensors")) for run in runs]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    bases = [json.loads((one.parent / "adapter_base.json").read_text()) for one in adapters]
    assert bases[0] == bases[1]
    merged = [export(find_target(str(run.path)), tmp_path / f"out{i}", check=answer) for i, run in enumerate(runs)]
    assert merged[0].fingerprint == merged[1].fingerprint
    alone = export(find_target(str(runs[1].path)), tmp_path / "adapter", adapter=True, check=answer)
    assert alone.kind == "adapter"


def test_it_is_refused_for_other_models_before_anything_loads(
    folder: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    asked = ["smoke", "adapter={kind: lora, base: mxfp4, targets: attention}", f"runs_dir={tmp_path}"]
    (found,) = refusals(load([*asked, f"model.path={tiny_model_dir}"]))
    assert "adapter.base=mxfp4 needs weights stored in MXFP4" in found.what
    (found,) = refusals(load([*asked, f"model.path={folder}", f"warm_start={tmp_path}"]))
    assert "cannot be used with warm_start" in found.what
    assert refusals(load([*asked, f"model.path={folder}"])) == []
    with pytest.raises(ConfigError, match="use native"):
        load([*asked, f"model.path={folder}", "rollout.engine=vllm", "device=cuda"])


def test_a_scale_that_kernels_cannot_take_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][0, 0, 0] = 128
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_packed(tmp_path, "cpu")
    tensors[name][0, 0, 0] = 129
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="stay in MXFP4 only up to 128"):
        read_packed(tmp_path, "cpu")


def test_the_plan_counts_four_bits(folder: Path) -> None:
    full, packed = (
        recipe_shape(load(["smoke", f"model.path={folder}", f"adapter={{kind: lora, base: {base}}}"]), folder)
        for base in ("full", "mxfp4")
    )
    experts = 2 * 4 * 3 * 64 * 32
    assert full.body_bytes(1000) - packed.body_bytes(1000) == experts * (2 - 18 / 32)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 40, 300, 3000])
def test_kernels_on_four_bits_give_the_bits_of_dense_ones(tokens: int) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from lockstep.models.experts import Experts

    torch.manual_seed(tokens)
    dense = GptOssExperts(GptOssConfig(hidden_size=2880, intermediate_size=352, num_local_experts=8)).cuda().bfloat16()
    parts = [
        Packed.of(*(half.cuda() for half in random_blocks(tuple(p.shape))))
        for p in (dense.gate_up_proj, dense.down_proj)
    ]
    with torch.no_grad():
        for parameter, part in zip((dense.gate_up_proj, dense.down_proj), parts, strict=True):
            parameter.copy_(part.dense(torch.bfloat16))
        for bias in (dense.gate_up_proj_bias, dense.down_proj_bias):
            bias.normal_()
    x = torch.randn(tokens, 2880, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = torch.stack([torch.randperm(8, device="cuda")[:2] for _ in range(tokens)])
    weight = torch.rand(tokens, 2, device="cuda", dtype=torch.bfloat16)
    found = []
    for module in (dense, Mxfp4Experts(dense, *parts)):
        experts = Experts.of(module)
        assert experts is not None
        with exact.on_trial():
            with torch.no_grad():
                found.append([experts(x, index, weight)])
            out = experts(x, index, weight)
            found[-1] += [out, *torch.autograd.grad(out.float().square().sum(), x)]
    for what, ours, theirs in zip(("decoding", "training", "gradient"), found[1], found[0], strict=True):
        assert torch.equal(ours, theirs), what


def test_experts_that_would_keep_no_weights_are_refused(
    folder: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what has a module of ours keeps MXFP4 weights: the rest would hold zeros."""
    dense = resolve(schema.Model(path=str(tiny_model_dir)))
    with pytest.raises(ModelError, match="the files hold no MXFP4 weights of all experts"):
        load_model(dense, dtype=torch.bfloat16, attention="eager", packed=True)
    monkeypatch.setattr("lockstep.models.known.kind_of_experts", lambda module: None)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.experts\.down_proj.*experts whose code Lockstep does not know"
    ):
        load_model(resolve(schema.Model(path=str(folder))), dtype=torch.bfloat16, attention="eager", packed=True)
