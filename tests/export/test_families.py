"""Models that transformers joins on loading, several classes of config, and a base in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open

from lockstep.errors import ConfigError
from lockstep.export import check
from lockstep.export.export import export
from lockstep.export.verify import EXACT
from lockstep.scoring.targets import find_target
from tests.learner.models import SMALL
from tests.loops.runs import LORA, NO_EVAL, trained
from tests.tiny import VOCABULARY, write_tiny_tokenizer

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": ("GptOss", {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def family(folder: Path, name: str) -> Path:
    kind, more = FAMILIES[name]
    config = getattr(hf, f"{kind}TextConfig", None) or getattr(hf, f"{kind}Config")
    folder.mkdir()
    torch.manual_seed(1)
    model = getattr(hf, f"{kind}ForCausalLM")(config(**(SMALL | {"vocab_size": VOCABULARY} | more)))
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exported_under_its_published_names(name: str, adapter: bool, tmp_path: Path) -> None:
    model = family(tmp_path / "model", name)
    narrow = ("model.dtype=bf16",) if name == "glm4-moe" else ()  # whose buffer is kept in fp32
    run = trained(tmp_path, model, NO_EVAL, "steps=1", *narrow, *(LORA if adapter else ()))
    done = export(find_target(str(run.path)), tmp_path / "out", check=check.answer)
    assert done.verified.trained.max <= (done.verified.tolerance.max if narrow else EXACT)
    names = []
    for folder in (model, tmp_path / "out"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        f"{FAMILIES[name][0]}ForCausalLM"
    ]


def test_a_base_in_four_bits_is_merged_as_what_it_stands_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1", "adapter.base=nf4")
    done = export(find_target(str(run.path)), tmp_path / "out", check=check.answer)
    assert done.verified.trained.max <= EXACT
    with pytest.raises(ConfigError, match="base in 4 bits"):
        export(find_target(str(run.path)), tmp_path / "adapter", adapter=True, check=check.answer)
