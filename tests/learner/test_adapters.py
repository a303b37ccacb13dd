"""LoRA through PEFT: what is trained, what is refused, and that PEFT alone can read what a run saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.build.warm_start import read_weights
from lockstep.checkpoint.store import open_checkpoint
from lockstep.config.schema import Lora, NoAdapter, OtherPeft, Recipe
from lockstep.errors import ModelError
from lockstep.learner.adapter_files import BASE, CONFIG, Base, save_adapter
from lockstep.learner.adapters import attach, describe
from lockstep.learner.learner import TorchLearner
from lockstep.run.state import save_checkpoint
from tests.learner.batches import make_batch
from tests.learner.models import logits_of, plain, tokens, twin
from tests.learner.test_learner import gradient_step


def adapted(adapter: Lora | None = None, seed: int = 0, family: str = "llama-tied", **more: Any) -> nn.Module:
    return attach(twin(plain(family, **more)), adapter or Lora(rank=4), seed)  # type: ignore[arg-type]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_only_adapters_are_trained():
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = TorchLearner(
        model, Recipe.model_validate({"adapter": {"kind": "lora"}, "optimizer": {"kind": "adamw", "lr": 1e-2}})
    )
    for number in range(3):
        gradient_step(learner, number)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            assert parameter.requires_grad, name
            assert not torch.equal(parameter, before[name]), name
        else:
            assert not parameter.requires_grad, name
            assert torch.equal(parameter, before[name]), name
            assert parameter.grad is None, name
    assert set(learner.trainable) == {
        f"model.layers.{layer}.{part}.{factor}"
        for layer in (0, 1)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *MLP)
        for factor in ("lora_A", "lora_B")
    }


def test_a_fresh_adapter_changes_nothing_and_its_seed_is_its_start():
    base, model = plain("llama-tied"), adapted()
    learner = TorchLearner(model, Recipe())
    ids = tokens(20, 1)
    assert learner.logprobs([ids]) == TorchLearner(twin(base), Recipe()).logprobs([ids])
    torch.manual_seed(77)  # the global state plays no part, and is left alone
    state = torch.get_rng_state()
    again, other = adapted(), adapted(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in trained(model).items():
        assert torch.equal(parameter, trained(again)[name])
        if "lora_A" in name:
            assert not torch.equal(parameter, trained(other)[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adapters_have_the_bases_precision(dtype: torch.dtype):
    assert {p.dtype for p in adapted(dtype=dtype).parameters()} == {dtype}


def test_the_fused_pass_is_pefts_pass():
    """Outputs against PEFT's own layers with the same factors, on a base with biases."""
    ours = adapted(Lora(rank=4, alpha=10), family="qwen2")
    theirs: Any = get_peft_model(plain("qwen2"), LoraConfig(r=4, lora_alpha=10, target_modules="all-linear"))  # type: ignore[arg-type]
    names = dict(theirs.named_parameters())
    for number, (name, parameter) in enumerate(trained(ours).items()):
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
        names[name].data.copy_(parameter.data)
    ids = tokens(25, 2)
    learner = TorchLearner(ours, Recipe())
    (found,) = learner.logprobs([ids])
    with torch.no_grad():
        expected = logits_of(theirs.eval(), ids)[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)
    with ours.disable_adapter(), torch.no_grad():  # type: ignore[operator]
        base = logits_of(plain("qwen2"), ids)[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        (off,) = learner.logprobs([ids])
    torch.testing.assert_close(torch.tensor(off), base, rtol=1e-5, atol=1e-5)
    assert (expected - base).abs().max() > 0.1


@pytest.mark.parametrize(
    "targets", [["qproj"], ["q_proj", "qproj"], ["embed_tokens"], ["self_attn"], ["input_layernorm"], []], ids=str
)
def test_targets_that_name_no_linear_layer_are_refused(targets: list[str]):
    with pytest.raises(ModelError, match="names no linear layer of LlamaForCausalLM") as caught:
        adapted(Lora(targets=targets))
    assert caught.value.where == "adapter.targets"
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.fix


def test_targets_may_name_one_layer_of_many():
    model = adapted(Lora(rank=2, targets=["layers.1.self_attn.q_proj", "up_proj"]))
    layers = {name.split(".lora_")[0].removeprefix("base_model.model.model.") for name in trained(model)}
    assert layers == {"layers.1.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"}


def test_what_is_trained_is_described_in_one_line():
    model = plain("llama-tied")
    total = sum(p.numel() for p in model.parameters())
    assert describe(NoAdapter(), model) == f"full training: {total:,} of {total:,} parameters are trained (100.00%)"
    assert attach(model, NoAdapter(), seed=0) is model  # type: ignore[arg-type]
    adapter = Lora(rank=4, alpha=6, targets=["q_proj"])
    count = 2 * (4 * 64 + 64 * 4)
    line = describe(adapter, adapted(adapter))
    assert line.startswith(f"LoRA rank 4, scaling = alpha / rank = 1.5: {count:,} of {total + count:,} parameters")


# --- targets ----------------------------------------------------------------------------------------------------------
def test_a_regular_expression_chooses_layers() -> None:
    model = adapted(Lora(rank=2, targets=["re:model\\.layers\\.1\\..*_proj", "layers.0.self_attn.q_proj"]))
    layers = {name.split(".lora_")[0].removeprefix("base_model.model.model.") for name in trained(model)}
    assert layers == {"layers.0.self_attn.q_proj"} | {
        f"layers.1.{part}"
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *MLP)
    }
    with pytest.raises(ModelError, match="names no linear layer"):
        adapted(Lora(targets=["re:.*queries"]))
    with pytest.raises(ValueError, match="is not a valid regular expression"):
        Lora(targets=["re:("])


@pytest.mark.parametrize("family", ["llama-tied", "llama"])
def test_the_head_takes_no_adapter(family: str) -> None:
    """Merged into tied weights it would change the embedding too, and untie them (4.4 B parameters out of 4 B)."""
    why = "shares its matrix with the embedding" if family == "llama-tied" else "is read as one matrix by the loss"
    with pytest.raises(ModelError, match=f"'lm_head' is the head, which {why}"):
        adapted(Lora(targets=["lm_head"]), family=family)
    assert not any("lm_head" in name for name in trained(adapted(Lora(targets="all-linear"), family=family)))


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_a_mixture_of_experts_gets_adapters_on_attention(family: str) -> None:
    model = adapted(family=family)
    parts = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(model)}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "the model has 4 experts per layer: of its linear layers those of attention get adapters" in describe(
        Lora(), model
    )


def test_adapters_elsewhere_in_a_mixture_are_warned_of() -> None:
    """A dense layer among experts, as some models have in front."""
    base = twin(plain("qwen3-moe"))
    base.model.layers[0].mlp.shared_expert = nn.Linear(64, 64, bias=False)  # type: ignore[union-attr, index]
    asked = Lora(targets="all-linear")
    model = attach(base, asked, 0)  # type: ignore[arg-type]
    assert "warning: 1 of the 9 layers with adapters are outside attention, such as" in describe(asked, model)
    assert "warning" not in describe(
        Lora(targets="attention"), attach(twin(plain("qwen3-moe")), Lora(targets="attention"), 0)
    )  # type: ignore[arg-type]


def test_attention_alone_on_a_dense_model() -> None:
    parts = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(adapted(Lora(targets="attention")))}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj"}


# --- other methods ----------------------------------------------------------------------------------------------------
def test_options_are_pefts_and_are_checked() -> None:
    with pytest.raises(ModelError, match="vera has no option 'vera_dropot'; did you mean vera_dropout") as caught:
        adapted(OtherPeft(method="vera", options={"vera_dropot": 0.1}))  # type: ignore[arg-type]
    assert caught.value.where == "adapter.options"
    assert "d_initial" in caught.value.fix
    for name in ("target_modules", "modules_to_save", "bias"):
        with pytest.raises(ModelError, match=f"no option '{name}'"):
            adapted(OtherPeft(method="hra", options={name: "all"}))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="PEFT rejects these options"):
        adapted(OtherPeft(method="oft", options={"r": 3, "oft_block_size": 5}))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="PEFT rejects these options"):  # whatever PEFT makes of a wrong type
        adapted(OtherPeft(method="loha", options={"rank_pattern": "q_proj"}))  # type: ignore[arg-type]
    for method, options in (
        ("oft", {"oft_block_size": 5}),
        ("oft", {"r": 7, "oft_block_size": 0}),
        ("hra", {"r": 3}),
        ("vera", {"r": 0}),
        ("loha", {"rank_pattern": {"q_porj": 2}}),
    ):
        with pytest.raises(ModelError, match="PEFT rejects these options: "):  # else it takes another value
            adapted(OtherPeft(method=method, options=options))  # type: ignore[arg-type]
    adapted(OtherPeft(method="oft", options={"oft_block_size": 4}))  # type: ignore[arg-type]


def test_a_start_away_from_the_base_is_refused() -> None:
    """Step 0 is called the base, and is the reference."""
    for method, options in (
        ("loha", {"init_weights": False}),
        ("lokr", {"init_weights": None}),
        ("ia3", {"init_ia3_weights": False}),
        ("hra", {"r": 8, "apply_GS": True}),
    ):
        with pytest.raises(ModelError, match="would change the base's results") as caught:
            adapted(OtherPeft(method=method, options=options))  # type: ignore[arg-type]
        assert caught.value.where == "adapter.options"
    adapted(OtherPeft(method="loha", options={"init_weights": True}))  # type: ignore[arg-type]


def test_dropout_is_refused_because_nothing_is_dropped_out() -> None:
    for method, name in (("vera", "vera_dropout"), ("loha", "module_dropout"), ("lokr", "rank_dropout")):
        with pytest.raises(ModelError, match=f"{name} would have no effect") as caught:
            adapted(OtherPeft(method=method, options={name: 0.5}))  # type: ignore[arg-type]
        assert caught.value.where == "adapter.options"
        adapted(OtherPeft(method=method, options={name: 0.0}))  # type: ignore[arg-type]


def test_names_of_the_scaling() -> None:
    for adapter, line in (
        (Lora(rank=4, alpha=6, rslora=True), "rsLoRA rank 4, scaling = alpha / √rank = 3: "),
        (Lora(rank=4, alpha=6, dora=True), "LoRA with DoRA rank 4, scaling = alpha / rank = 1.5: "),
    ):
        assert describe(adapter, adapted(adapter)).startswith(line)


# --- adapter.start ----------------------------------------------------------------------------------------------------
def saved(folder: Path, adapter: Lora) -> Path:
    base: Any = plain("llama-tied")
    origin = Base.of(base, "made-here")
    model = attach(base, adapter, 3, origin)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    save_adapter(folder, model, adapter, origin)
    return folder


def test_a_start_is_taken_over(tmp_path: Path) -> None:
    folder = saved(tmp_path, Lora(rank=4, alpha=6))
    model = adapted(Lora(rank=4, alpha=6, start=str(folder)))
    from safetensors.torch import load_file

    file = load_file(folder / "adapter_model.safetensors")
    for name, parameter in trained(model).items():
        assert torch.equal(parameter, file[name.replace(".default", "")])
    assert f"adapter starts from {folder}" in describe(Lora(rank=4, alpha=6), model)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"rank": 8},
            r"28 tensors of the saved adapter do not fit .*lora_A: \(4, 96\) in the folder, \(8, 96\) in the recipe",
        ),
        ({"alpha": 12}, "scaling 1.5, but the recipe gives 3"),
        ({"rslora": True}, "scaling 1.5, but the recipe gives 3"),
        ({"dora": True}, r"lora_magnitude_vector: nothing in the folder"),
        ({"targets": ["q_proj"]}, "in the recipe"),
        ({"init": "pissa"}, "was trained without adapter.init=pissa or olora"),
    ],
    ids=str,
)
def test_a_start_of_another_shape_is_refused(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, Lora(rank=4, alpha=6))
    with pytest.raises(ModelError, match=told) as caught:
        adapted(Lora.model_validate({"rank": 4, "alpha": 6, "start": str(folder)} | changed))
    assert caught.value.where == str(folder)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"alpha_pattern": {"q_proj": 64}}, "settings that a recipe has not: alpha_pattern"),
        ({"init_lora_weights": "pissa"}, r"fits only a base that its initialisation \(pissa\) had changed"),
        ({"r": 0}, "gives r as 0, not as a number above 0"),
        ({"lora_alpha": None}, "gives lora_alpha as None"),
        ({"lora_alpha": "x"}, "gives lora_alpha as x"),
    ],
    ids=str,
)
def test_settings_that_no_shape_shows_are_refused(setting: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, Lora(rank=4, alpha=6))
    (folder / BASE).unlink()
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | setting))
    with pytest.raises(ModelError, match=told):
        adapted(Lora(rank=4, alpha=6, start=str(folder)))


def test_a_start_of_another_base_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, Lora(rank=4))
    base: Any = plain("llama-tied", seed=5)
    with pytest.raises(ModelError, match=r"adapter was made for made-here \(weights .*\), but the base is mine"):
        attach(base, Lora(rank=4, start=str(folder)), 0, Base.of(base, "mine"))


# --- files ----------------------------------------------------------------------------------------------------------
def run_parts(model_dir: Path, adapter: dict[str, Any]) -> tuple[Recipe, Parts]:
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(model_dir)},
            "adapter": adapter,
            "device": "cpu",
            "optimizer": {"kind": "adamw", "lr": 1e-2},
            "task": {"kind": "reasoning_gym", "size": 20, "settings": {"min_terms": 2, "max_terms": 2}},
        }
    )
    return recipe, build_parts(recipe, build_task_of(recipe))


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("alpha", [32, 5.5])
def test_peft_reads_the_adapter_of_a_checkpoint(tiny_model_dir: Path, tmp_path: Path, alpha: float):
    recipe, parts = run_parts(tiny_model_dir, {"kind": "lora", "rank": 4, "alpha": alpha})
    for _ in range(2):
        parts.learner.update(make_batch(old=False, ref=False), parts.objective.loss)
    proof = parts.sync.push(parts.learner, parts.engine)
    path = save_checkpoint(tmp_path, parts, recipe, 1, proof, best=None)

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa").eval()
    ids = tokens(30, 3)
    with torch.no_grad():
        untrained = logits_of(base, ids)
        loaded = PeftModel.from_pretrained(base, path).eval()
        found = logits_of(loaded, ids)
    ours = torch.tensor(parts.learner.logprobs([ids])[0])
    theirs = found[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (found - untrained).abs().max() > 0.1
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, alpha, "LORA")
    assert config["base_model_name_or_path"] == str(tiny_model_dir)

    weights, state = read_weights(open_checkpoint(tmp_path))
    assert state.step == 1
    live = {name: p.detach() for name, p in parts.learner.trainable.items()}
    assert weights.keys() == live.keys()
    assert all(torch.equal(weights[name], live[name]) for name in live)


@pytest.mark.usefixtures("process_settings")
def test_transformers_reads_the_weights_of_a_checkpoint(tiny_model_dir: Path, tmp_path: Path):
    recipe, parts = run_parts(tiny_model_dir, {"kind": "none"})
    parts.learner.update(make_batch(old=False, ref=False), parts.objective.loss)
    path = save_checkpoint(tmp_path, parts, recipe, 1, parts.sync.push(parts.learner, parts.engine), best=None)
    loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    ids = tokens(30, 3)
    with torch.no_grad():
        theirs = logits_of(loaded, ids)[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(parts.learner.logprobs([ids])[0]), theirs, rtol=1e-5, atol=1e-5)
