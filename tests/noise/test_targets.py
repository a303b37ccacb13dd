"""Which norms: told from names in the package, and here from what flows where in a forward pass of each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.schema import Lora, Noise
from lockstep.errors import ConfigError, ModelError
from lockstep.learner.adapters import attach
from lockstep.models.weights import clean_name
from lockstep.noise.apply import zero_centred
from lockstep.noise.targets import find_targets, norm_names
from tests.noise.families import FAMILIES, tiny

POST_NORMS_ONLY = ("Olmo2",)
MIXTURES = ("Qwen3Moe", "GptOss", "Mixtral")


def flows(model: Any) -> tuple[set[str], set[str]]:
    """The norms whose output is read by linear layers of a block, and those that a router reads, from watching a pass."""
    made: dict[int, str] = {}
    keep: list[torch.Tensor] = []
    feeds: set[str] = set()
    routed: set[str] = set()
    norms = set(norm_names(model))

    def note(name: str) -> Any:
        def after(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            keep.append(output)  # so that no later tensor gets its address
            made[output.data_ptr()] = name

        return after

    def look(router: bool) -> Any:
        def before(module: nn.Module, inputs: Any, named: Any = None) -> None:
            given = [x for x in (*inputs, *(named or {}).values()) if isinstance(x, torch.Tensor)]
            for tensor in given:
                if (name := made.get(tensor.data_ptr())) is not None:
                    (routed if router else feeds).add(name)

        return before

    for name, module in model.named_modules():
        weight = clean_name(f"{name}.weight")
        last = name.rpartition(".")[2]
        if weight in norms:
            module.register_forward_hook(note(weight))
        elif last in ("gate", "router"):
            module.register_forward_pre_hook(look(True), with_kwargs=True)
        elif (isinstance(module, nn.Linear) and last != "lm_head") or last == "experts":
            module.register_forward_pre_hook(look(False), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 5, 7, 9]]), use_cache=False)
    return feeds, routed


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in POST_NORMS_ONLY])
def test_the_names_are_those_of_the_norms_that_feed_linear_layers(family: str) -> None:
    chosen = find_targets(tiny(family), Noise())
    feeds, routed = flows(tiny(family))
    assert set(chosen.names) == feeds - routed
    assert bool(routed) == (family in MIXTURES) == bool(chosen.notes)
    assert list(chosen.names) == sorted(chosen.names)


def test_qwen_norms_of_queries_and_keys_and_the_last_norm_get_none() -> None:
    names = find_targets(tiny("Qwen3"), Noise()).names
    assert len(names) == 4
    assert "model.layers.0.input_layernorm.weight" in names
    assert not any("q_norm" in name or name == "model.norm.weight" for name in names)
    assert "model.layers.0.self_attn.q_norm.weight" in norm_names(tiny("Qwen3"))


def test_a_model_of_post_norms_alone_is_refused() -> None:
    with pytest.raises(ModelError, match="finds no norm that feeds linear layers"):
        find_targets(tiny("Olmo2"), Noise())


def test_post_attention_is_the_norm_before_the_mlp() -> None:
    assert find_targets(tiny("Llama"), Noise(targets="post_attention")).names == tuple(
        f"model.layers.{i}.post_attention_layernorm.weight" for i in (0, 1)
    )
    assert find_targets(tiny("Gemma2"), Noise(targets="post_attention")).names == tuple(
        f"model.layers.{i}.pre_feedforward_layernorm.weight" for i in (0, 1)
    )


def test_by_role_a_router_may_be_reached_and_it_is_said() -> None:
    chosen = find_targets(tiny("Qwen3Moe"), Noise(targets="post_attention"))
    assert len(chosen.names) == 2
    assert "also reaches the routers" in chosen.notes[0]


def test_adapters_change_no_name() -> None:
    plain = find_targets(tiny("Llama"), Noise())
    assert find_targets(attach(tiny("Llama"), Lora(rank=2, targets=["q_proj", "down_proj"]), 0), Noise()) == plain


def test_patterns_choose_and_scale() -> None:
    noise = Noise(
        targets=["input_layernorm", r"^model\.norm"],
        layer_scale={r"layers\.1\.": 2.5, "model.norm": 0.0, "model.layers.0.input_layernorm": 0.5},
    )
    chosen = find_targets(tiny("Llama"), noise)
    # The last norm's factor is 0: it gets none. A whole name wins over a pattern.
    assert chosen.names == ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
    assert chosen.scales == (0.5, 2.5)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (Noise(targets=["layer_norm_x"]), "'layer_norm_x' matches none of the 5 norms"),
        (Noise(layer_scale={"layers.7": 2.0}), "'layers.7' matches none of the 4 norms"),
        (Noise(layer_scale={"layers": 2.0, "input": 3.0}), "both match model.layers.0.input_layernorm.weight"),
        (Noise(layer_scale={"layers": 0.0}), "0 for every norm"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(noise: Noise, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_targets(tiny("Llama"), noise)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_that_add_one_are_known(family: str) -> None:
    """A norm of a vector whose root mean square is 1 returns its factor: w, or 1 + w."""
    model = tiny(family)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            continue
        signs = torch.ones(weight.numel())
        signs[::2] = -1  # mean 0, so that a LayerNorm leaves it, too
        with torch.no_grad():
            factor = (module(signs[None]) / signs)[0]
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            factor = factor - bias.detach() / signs
        assert torch.allclose(factor, weight + (1.0 if zero_centred(module) else 0.0), atol=1e-4)
