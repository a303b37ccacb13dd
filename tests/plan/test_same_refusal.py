"""For pairs of a model and settings: plan, doctor and train give one answer, before any weights are read.

There are no weights in these folders: what answers has read config.json alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.errors import RefusedError
from lockstep.plan.model_shape import read_shape
from lockstep.plan.refusals import refusals, require_allowed
from tests.learner.models import DELTA, LATENT, SMALL, WINDOW
from tests.loops.runs import words

W4A4, W4A16 = ("numerics.train=mxfp4-w4a4",), ("numerics.train=nvfp4-w4a16",)
EVAL = ("numerics.eval=mxfp4-w4a4",)
ROLLOUT = ("numerics.rollout=nvfp4-w4a4",)
SPARED = (*W4A4, "numerics.exclude=[experts]")
VLLM = ("rollout.engine=vllm", "device=auto", "rollout.slots=auto")
LORA, GATE = ("adapter.kind=lora",), ("adapter.kind=lora", "adapter.targets=[gate_proj]")
EXPERTS, WIDE = (f"adapter={{kind: lora, expert_rank: {rank}}}" for rank in (4, 32))
MXFP4: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "vocab_size_per_layer_input": 300,
          "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
ROUTED = LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": MOE | {"head_dim": 16},
    "mixtral": MOE,
    "gpt_oss": MOE | {"head_dim": 16, "sliding_window": WINDOW},
    "gemma4_text": GEMMA4,
    "deepseek_v3": ROUTED,
    "qwen3_next": DELTA | MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "bloom": {"n_head": 4},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "mamba": {},
    "llama4_text": {"num_local_experts": 2, "head_dim": 16},
    "deepseek_v32": ROUTED,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "nemotron": {},
    "bert": {"is_decoder": False},
    "minimax": {"num_local_experts": 2, "head_dim": 16},
}
PACKED = (*W4A4, "adapter={kind: lora, base: mxfp4, targets: attention}")
OWN = "vLLM keeps experts (down_proj, "
EVEN = "latent attention, of layers with a state or with other heads"

PAIRS: list[tuple[str, tuple[str, ...], str, str]] = [
    *((name, (), "", "") for name in list(MODELS)[:8]),
    *((name, LORA, "", "") for name in list(MODELS)[:8]),
    ("bloom", (), "family", "bloom (BloomForCausalLM) is not computed as transformers does it"),
    ("gptj", (), "family", "its attention is not one of transformers' registry"),
    ("mamba", (), "family", "its layers with a state (MambaMixer) are not told where sequences begin"),
    ("llama4_text", (), "family", "chunked_attention: attention in chunks of tokens"),
    ("deepseek_v32", (), "family", "indexed_attention: attention to tokens that an index chooses"),
    ("recurrent_gemma", (), "family", "linear_attention: a state without a convolution, or a cache of its own"),
    ("nemotron", (), "family", "the model was called without a token layout"),
    ("bert", (), "family", "it is an encoder, whose tokens see later ones"),
    ("minimax", (), "family", "the model has linear_attention layers"),
    *((name, W4A4, "", "") for name in ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")),
    *((name, settings, "", "") for name in ("gpt_oss", "qwen3_moe") for settings in (W4A16, EVAL, ROLLOUT)),
    *((name, SPARED, "", "") for name in ("qwen3_moe", "qwen3_next")),
    *((name, W4A4, "", "") for name in ("llama", "qwen3_5_text", "gemma4_text")),
    ("mixtral", GATE, "adapter", "'gate_proj' names no linear layer"),
    *((name, (EXPERTS,), "", "") for name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "gpt_oss+mxfp4")),
    *((name, (*VLLM, EXPERTS), "", "") for name in ("qwen3_moe", "gpt_oss")),
    *((name, (EXPERTS,), "adapter", "has no experts") for name in ("llama", "qwen3_5_text")),
    ("qwen3_moe", (WIDE,), "adapter", "rank 32 is not below 32, the smallest size of the experts' matrices"),
    *((name, VLLM, "serving", OWN) for name in ("mixtral", "qwen3_next")),
    *((name, VLLM, "", "") for name in ("qwen3_moe", "gpt_oss")),
    ("qwen3_moe", (*VLLM, *ROLLOUT), "serving", "vLLM does not quantise experts"),
    ("gpt_oss", (*VLLM, *ROLLOUT, "numerics.exclude=[experts]"), "", ""),
    *((name, VLLM, "serving", EVEN) for name in ("gemma4_text", "deepseek_v3", "qwen3_5_text")),
    ("gpt_oss+mxfp4", VLLM, "serving", "vLLM would run the checkpoint's MXFP4 weights"),
    ("gpt_oss+mxfp4", W4A4, "", ""),
    ("gpt_oss+mxfp4", PACKED, "numerics", "they stay in MXFP4, or Lockstep does not know their form"),
    ("gpt_oss+mxfp4", (), "", ""),
]  # fmt: skip
"""Model, settings, and the one refusal that they must have; none if it is empty."""


def folder_of(name: str, tokenizer: Path, folder: Path) -> Path:
    family, _, quantised = name.partition("+")
    config = CONFIG_MAPPING[family](**(SMALL | MODELS[family] | {"vocab_size": 640}))
    folder.mkdir()
    for path in tokenizer.iterdir():
        if "safetensors" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    said = config.to_dict() | (MXFP4 if quantised else {}) | {"model_type": family}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_the_table_is_long_enough_and_both_answers_are_in_it() -> None:
    assert len(PAIRS) >= 50
    assert len(set(PAIRS)) == len(PAIRS)
    assert sum(not name for _, _, name, _ in PAIRS) >= 20


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("model", "settings", "name", "says"), PAIRS)
def test_plan_doctor_and_train_give_one_answer(
    model: str,
    settings: tuple[str, ...],
    name: str,
    says: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = words(tmp_path, folder_of(model, tiny_model_dir, tmp_path / "model"), *settings)
    found = refusals(load(args))
    assert [one.name for one in found] == ([name] if name else [])
    assert main(["plan", *args]) == (2 if name else 0)
    planned = capsys.readouterr().err
    main(["doctor", *args, "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    if not name:
        assert checks["settings"]["verdict"] == "ok"
        return
    assert says in found[0].what
    assert (checks[name]["found"], checks[name]["fix"]) == (found[0].what, found[0].fix)
    assert f"{name}: {found[0].what}" in planned
    if settings[: len(VLLM)] == VLLM:  # without a GPU, train asks for one first
        with pytest.raises(RefusedError) as caught:
            require_allowed(load(args))
        assert f"{name}: {found[0].what}" in caught.value.mistakes
        return
    assert main(["train", *args]) == 2
    assert capsys.readouterr().err == planned
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("family", list(MODELS)[4:8])
def test_sizes_of_layers_that_differ_are_their_sums(family: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    shape = read_shape(folder_of(family, tiny_model_dir, tmp_path / "model"))
    numbers = {
        "gemma4_text": 2 * 2 * (16 + 32),  # two heads, key and value, 16 and 32 wide
        "deepseek_v3": 2 * 4 * (24 + 20),
        "qwen3_next": 2 * 2 * 16,  # one layer of two has attention
        "qwen3_5_text": 2 * 2 * 16,
    }
    assert shape.kv_bytes(1) == numbers[family]
    last_inputs, memory = 4 * (2 * 2 * 16 + 4 * 12), 4 * 16 * 12
    assert shape.state == (0 if family in ("gemma4_text", "deepseek_v3") else 4 * (last_inputs + memory))
    assert shape.adapter_parameters(1) == sum(x.inputs + x.outputs for x in shape.every_linear)
