"""LoRA on experts: PEFT reads what is saved and saves what is read, merged weights are the same model, runs resume to the bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.build.adapter_folder import AdapterTarget, adapter_settings, find_adapter
from lockstep.config.adapter import Lora, NoAdapter
from lockstep.config.load import load
from lockstep.errors import ModelError
from lockstep.export.check import answer
from lockstep.export.export import export
from lockstep.learner.adapter_files import Base, read_adapter, save_adapter, saved_tensors
from lockstep.learner.adapter_set import AdapterSet
from lockstep.learner.adapters import as_reference, attach
from lockstep.learner.lora_experts import TARGETS, ExpertsAdapter, attach_to_experts
from lockstep.learner.merge import base_names, merged_weights
from lockstep.loops.start import resume_run
from lockstep.models import exact
from lockstep.models.mxfp4 import Packed
from lockstep.models.mxfp4_experts import Mxfp4Experts
from lockstep.models.weights import frozen_names, named_weights
from lockstep.numerics.experts import mix
from lockstep.plan.refusals import refusals
from lockstep.scoring.targets import find_target
from lockstep.sync.merged import merged_names
from lockstep.track.writer import read_metrics
from lockstep.types import Sampling
from tests.learner.models import logprobs_of, plain, tokens, twin
from tests.loops.runs import LORA, NO_EVAL, trained, weights
from tests.loops.test_resume import stopped
from tests.models.mxfp4_files import random_blocks, write_mxfp4_model
from tests.rollout.engines import engine_over, finish, request

FAMILIES = ("qwen3-moe", "gpt-oss")
ADAPTER = Lora(rank=8, expert_rank=4, targets="attention", alpha=12)
IDS = tokens(24, 5)


def adapted(
    family: str, adapter: Lora = ADAPTER, attention: Callable[[nn.Module], Any] = lambda base: base
) -> nn.Module:
    """A model with an adapter that has moved away from its start."""
    base = attention(plain(family))
    model = attach(base, adapter, 0, Base.of(base, family))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_as_the_base_and_can_be_switched_off(family: str) -> None:
    base: Any = plain(family)
    fresh = attach(copy.deepcopy(base), ADAPTER, 0)
    near(logprobs_of(fresh, IDS), logprobs_of(base, IDS))
    model = adapted(family)
    assert float((logprobs_of(model, IDS) - logprobs_of(base, IDS)).abs().max()) > 0.1
    with as_reference(model):
        near(logprobs_of(model, IDS), logprobs_of(base, IDS))
    matrices = [p for n, p in model.named_parameters() if "_adapter.lora_" in n]
    assert len(matrices) == 2 * 2 * 2
    modules = [module for module in model.modules() if isinstance(module, ExpertsAdapter)]
    assert not any(hasattr(module, name) for module in modules for name in ("weight", "bias"))
    assert all(p.requires_grad and p.ndim == 3 for p in matrices)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [4, 8])
def test_peft_reads_it_as_the_same_model(family: str, rank: int, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = ADAPTER.model_copy(update={"expert_rank": rank})
    base: Any = plain(family)
    model = adapted(family, adapter)
    save_adapter(tmp_path, model, adapter, Base.of(base, family))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))
    near(logprobs_of(theirs, IDS), logprobs_of(model, IDS))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_saves_is_the_same_model(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8, lora_alpha=12, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.gate_up_proj": 4, "experts.down_proj": 4}, init_lora_weights=False,
    )  # fmt: skip
    base: Any = plain(family)
    torch.manual_seed(2)
    theirs = get_peft_model(copy.deepcopy(base), config)
    theirs.save_pretrained(str(tmp_path))
    said = logprobs_of(theirs, IDS)
    adapters = AdapterSet(copy.deepcopy(base), Base.of(base, family))
    assert "does not say which weights" in adapters.attach("theirs", tmp_path)
    adapters.activate("theirs")
    near(logprobs_of(adapters.model, IDS), said)
    adapters.activate(None)
    near(logprobs_of(adapters.model, IDS), logprobs_of(base, IDS))
    found = find_adapter(tmp_path)
    assert found is not None
    settings: Any = adapter_settings(found, NoAdapter())
    assert (settings.rank, settings.expert_rank, settings.alpha) == (8, 4, 12)
    begun = attach(copy.deepcopy(base), settings.model_copy(update={"start": str(tmp_path)}), 0)
    near(logprobs_of(begun, IDS), said)
    assert {n: t.tolist() for n, t in saved_tensors(begun).items()} == {
        n: t.tolist() for n, t in _files(tmp_path).items()
    }


def _files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_the_same_model(family: str) -> None:
    model, merged = adapted(family), plain(family)
    found = dict(merged_weights(model))
    assert found.keys() == dict(named_weights(merged)).keys()
    merged.load_state_dict(found, strict=False)
    near(logprobs_of(merged, IDS), logprobs_of(model, IDS))
    names = frozenset(name for name, _ in named_weights(model))
    left = merged_names(frozen_names(model), names)
    assert not [name for name in left if name.endswith(("gate_up_proj", "down_proj", "q_proj.weight"))]
    assert {*base_names(model)} == {*found}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_from_it(family: str) -> None:
    model = adapted(family)
    asked = [request(str(i), IDS[: 4 + i], Sampling(12, ignore_eos=True), seed=i) for i in range(3)]
    for done in finish(engine_over(adapted(family, attention=twin)), asked).values():
        own = logprobs_of(model, [*done.request.prompt_ids, *done.ids])[-12:]
        near(torch.tensor(done.logprobs), own)


@pytest.mark.slow
def test_runs_on_packed_and_dense_experts_are_one_and_resume_to_the_bit(tmp_path: Path) -> None:
    write_mxfp4_model(tmp_path / "model")
    asked = (*LORA, NO_EVAL, "adapter.targets=attention", "adapter.expert_rank=2", "save.every=1")
    asked += ("update.recompute=selective", "update.replay_routing=true")  # which look at all modules
    runs = [
        trained(tmp_path / b, tmp_path / "model", *asked, f"adapter.base={b}", "steps=2") for b in ("full", "mxfp4")
    ]
    norms = [[row.metrics["grad/norm"] for row in read_metrics(run) if row.step] for run in runs]
    assert norms[0] == norms[1]
    files = [_files(next(Path(run.path).glob("checkpoints/*2"))) for run in runs]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    moved = [name for name in files[0] if ".experts." in name and "lora_B" in name]
    assert len(moved) == 4
    assert all(float(files[0][name].abs().max()) > 0 for name in moved)
    again = resume_run(stopped(tmp_path / "again", tmp_path / "model", *asked, "adapter.base=full", "steps=2", step=2))
    assert weights(again, 2) == weights(runs[0], 2)
    merged = [export(find_target(str(run.path)), tmp_path / f"out{i}", check=answer) for i, run in enumerate(runs)]
    assert merged[0].fingerprint == merged[1].fingerprint
    assert export(find_target(str(runs[0].path)), tmp_path / "adapter", adapter=True, check=answer).kind == "adapter"
    assert read_adapter(tmp_path / "adapter").config["rank_pattern"]["experts.down_proj"] == 2


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"rank_pattern": {"experts.down_proj": "many"}}, "expert_rank is many: Input should be a valid integer"),
        ({"rank_pattern": 5}, "it uses rank_pattern"),
        ({"target_parameters": 5}, "it uses target_parameters"),
    ],
)
def test_a_rank_of_experts_that_is_no_number_is_refused(entries: dict[str, object], says: str) -> None:
    config: dict[str, object] = {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "target_parameters": list(TARGETS),
    }
    with pytest.raises(ModelError, match=says):
        adapter_settings(AdapterTarget(Path("adapter"), "base", config | entries), NoAdapter())


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("llama", {"expert_rank": 4}, "LlamaForCausalLM has no experts"),
        ("qwen3-moe", {"expert_rank": 64}, "rank 64 is not below"),
        ("qwen3-moe", {"expert_rank": 4, "dora": True}, "cannot be combined with dora"),
        ("qwen3-moe", {"expert_rank": 4, "init": "pissa"}, "cannot be combined with init=pissa"),
        ("qwen3-moe", {"expert_rank": 4, "base": "nf4"}, "cannot be combined with base=nf4"),
    ],
)
def test_what_cannot_be_is_refused(family: str, settings: dict[str, Any], says: str) -> None:
    model: Any = plain(family)
    with pytest.raises((ModelError, ValueError), match=says):
        attach(model, Lora(targets="attention", **settings), 0)


def test_it_is_refused_before_anything_loads(tiny_model_dir: Path, tmp_path: Path) -> None:
    asked = ["smoke", "adapter={kind: lora, expert_rank: 4}", f"runs_dir={tmp_path}", f"model.path={tiny_model_dir}"]
    (found,) = refusals(load(asked))
    assert "has no experts" in found.what


def experts_with_adapters(family: str, rank: int, device: str, size: int) -> Any:
    """Random experts in bf16 with adapters: those of a family, or gpt-oss's in MXFP4. `size`: width of an expert."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    module: Any = (
        Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=size, num_experts=8))
        if family == "qwen3-moe"
        else GptOssExperts(GptOssConfig(hidden_size=2880, intermediate_size=size, num_local_experts=8))
    ).to(device, torch.bfloat16)
    if family == "mxfp4":
        shapes = [tuple(one.shape) for one in (module.gate_up_proj, module.down_proj)]
        module = Mxfp4Experts(module, *(Packed.of(*(half.to(device) for half in random_blocks(one))) for one in shapes))
    attach_to_experts(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": module})}), "default", rank, 0.7)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.03)
    return module


def bits_and_values(family: str, rank: int, count: int, device: str, size: int) -> None:
    """Check that decoding and training of `count` tokens have the same bits, and the values and gradients of a loop."""
    from lockstep.models.experts import Experts

    torch.manual_seed(count)
    module = experts_with_adapters(family, rank, device, size)
    x = torch.randn(count, 2048 if family == "qwen3-moe" else 2880, device=device, dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(8, device=device)[:2] for _ in range(count)])
    weight = torch.rand(count, 2, device=device, dtype=torch.bfloat16)
    experts = Experts.of(module)
    assert experts is not None
    with exact.on_trial(), torch.no_grad():
        decoded = experts.unsummed(x, index, weight).summed()
    learnt = [x.requires_grad_(), *(p for name, p in module.named_parameters() if "lora_" in name)]
    assert len(learnt) == 5
    with exact.on_trial():
        trained = experts(x, index, weight)
    assert torch.equal(trained, decoded)
    looped = mix(module, None, (None, None), x, index, weight)
    ours, theirs = ((out, *torch.autograd.grad(out.float().square().sum(), learnt)) for out in (trained, looped))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).float().norm() <= 0.03 * other.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "mxfp4"])
@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("count", [1, 9, 40, 300, 3000])
def test_decoding_has_the_bits_of_training_on_a_gpu(family: str, rank: int, count: int) -> None:
    bits_and_values(family, rank, count, "cuda", 768 if family == "qwen3-moe" else 352)
