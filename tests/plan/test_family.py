"""A causal family is computed as plain transformers does, or refused by name before a run has a folder.

tests/docs/test_models_page.py computes all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import lockstep.plan.family as module
from lockstep.cli import main
from lockstep.errors import ModelError, RefusedError
from lockstep.loops.start import start_run
from lockstep.models.decoder import context_of
from lockstep.models.small import ORIGINAL, WINDOW, random_model, small_config
from lockstep.plan.family import require_family
from tests.loops.runs import recipe, words

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + place / 48 for place in range(48)],
    "long_factor": [1.0 + place for place in range(48)],
    "original_max_position_embeddings": 4096,
}
UNSAID: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
"""What a family's default config leaves out, and its published models say."""
SERVED = {
    "llama": {},
    "qwen2_moe": {},  # its window is 0, which is none
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "phi3": {"rope_parameters": LONGROPE, "max_position_embeddings": 131072},
    "phimoe": {"sliding_window": 2048},
    "glm4_moe": {},
    "gemma4_text": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
}
REFUSED = {
    "doge": "one sequence is off by",
    "bert": "one sequence is off by",
    "bart": "two packed sequences is off by",
    "bloom": "bloom .BloomForCausalLM.",
    "codegen": "codegen .CodeGenForCausalLM.",
    "nemotron": "called without a token layout",
    "mamba": "mamba .MambaForCausalLM. cannot be computed on packed sequences: the model was called without a token",
    "llama4_text": "chunked_attention layers",
    "deepseek_v32": "indexed_attention layers",
}


def of(family: str, **settings: object) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[family](**(UNSAID.get(family, {}) | settings))
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[attr-defined]
    return kind[0] if isinstance(kind, (tuple, list)) else kind, config


@pytest.mark.parametrize("family", SERVED)
def test_families_that_are_served_pass_within_rounding(family: str) -> None:
    assert require_family(*of(family, **SERVED[family])) <= 1e-5


@pytest.mark.parametrize(
    ("family", "setting"),
    [("falcon_h1", "lm_head_multiplier"), ("hyperclovax", "logits_scaling"), ("granite", "logits_scaling")],
)
def test_logits_may_be_scaled_in_the_familys_own_words(family: str, setting: str) -> None:
    assert require_family(*of(family, **{setting: 0.25})) <= 1e-5


def test_a_family_that_passes_no_window_on_has_it_only_in_the_layers_listed() -> None:
    kind, config = of("qwen2_moe", use_sliding_window=True)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    assert require_family(kind, config) <= 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window = 0, in which a token would not see even itself"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "sliding_window = null, but layer_types has sliding_attention"),
    ],
)  # fmt: skip
def test_a_window_that_no_model_can_have_is_named_instead_of_the_family(
    family: str, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        require_family(*of(family, **settings))
    assert "set sliding_window in config.json" in caught.value.fix


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_computed_otherwise_are_refused_by_name(family: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[family]) as caught:
        require_family(*of(family))
    assert "docs/models.md" in caught.value.fix or "attention in every layer" in caught.value.fix


def test_the_small_copy_keeps_what_matters() -> None:
    _, config = of("gemma2")
    small = small_config(config)
    assert (config.sliding_window, config.num_hidden_layers) == (4096, 26), "the config itself is left alone"
    assert small.sliding_window == WINDOW
    assert set(small.layer_types) == {"full_attention", "sliding_attention"}
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    _, config = of("phi3", **SERVED["phi3"])
    small = small_config(config)
    assert small.rope_parameters["original_max_position_embeddings"] == ORIGINAL
    assert small.max_position_embeddings == 32 * ORIGINAL
    assert len(small.rope_parameters["long_factor"]) == 8
    assert (context_of(config), context_of(small)) == (4096, ORIGINAL)


def test_a_small_copy_is_always_the_same() -> None:
    """Mamba layers draw a part of their vectors when they are made."""
    kind, config = of("nemotron_h")
    first = random_model(kind, small_config(config), "eager").state_dict()
    torch.manual_seed(7)
    again = random_model(kind, small_config(config), "eager").state_dict()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, again[name])] == []


@pytest.mark.parametrize("wrong", ["window", "cap", "scale"])
def test_an_attention_that_forgets_something_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same check, with a model that is told other settings than the plain one."""

    def told(kind: Any, config: Any, attention: str) -> Any:
        if attention != "eager":
            config.sliding_window = None if wrong == "window" else config.sliding_window
            config.attn_logit_softcapping = None if wrong == "cap" else config.attn_logit_softcapping
            config.query_pre_attn_scalar *= 2 if wrong == "scale" else 1
        return random_model(kind, config, attention)

    monkeypatch.setattr(module, "random_model", told)
    monkeypatch.setattr(module, "_passed", {})
    with pytest.raises(ModelError, match=r"gemma2 .* is off by .* nats"):
        require_family(*of("gemma2"))


def test_a_run_is_refused_before_it_has_a_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bloom"
    folder.mkdir()
    for path in tiny_model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = {"model_type": "bloom", "vocab_size": 640, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=r"family: model\.path: .*bloom \(BloomForCausalLM\)"):
        start_run(recipe(tmp_path, folder))
    assert not (tmp_path / "runs").exists()
    assert main(["train", *words(tmp_path, folder)]) == RefusedError.exit_code
