"""A small model that vLLM's kernels take (heads of 64), and a vLLM engine over it. Used by the contract and the smoke script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lockstep.rollout.vllm.engine import VllmEngine
from lockstep.rollout.vllm.process import vllm_process
from lockstep.rollout.vllm.settings import VllmSettings
from lockstep.types import RolloutEngine
from tests.rollout import contract
from tests.tiny import VOCABULARY, write_tiny_tokenizer

STOPS = tuple(range(5, VOCABULARY, 9))
CONTEXT = 1024


def write_model(folder: Path, *, tied: bool = True, family: str = "llama") -> None:
    """A model of three layers in bf16 whose vocabulary (635) is no multiple of 64: vLLM pads it."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY - 5,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.05,  # at 0.1 the rounding of bf16 alone moves log-probabilities by 0.03
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    more: dict[str, dict[str, Any]] = {
        "llama": {"max_position_embeddings": CONTEXT},
        "qwen3_moe": {"max_position_embeddings": CONTEXT, "num_experts": 8, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 128},
        # each token takes all experts: its router is so undecided that rounding alone makes it choose others (0.03 nats)
        "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 8, "sliding_window": 128, "tie_word_embeddings": False},
    }  # fmt: skip
    config = AutoConfig.for_model(family, **sizes | more[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    write_tiny_tokenizer(folder)


def settings(folder: Path, *, sleep: bool = True, eager: bool = False) -> VllmSettings:
    return VllmSettings(
        folder=str(folder),
        dtype="bfloat16",
        slots=256,
        max_model_len=CONTEXT,
        kv_cache_bytes=2**30,
        stop_ids=STOPS,
        enforce_eager=eager,
        sleep=sleep,
    )


def reference(folder: Path, seed: int = 0) -> nn.Module:
    """transformers' own model on the GPU; with a seed, of other weights."""
    sinks = AutoConfig.from_pretrained(folder).model_type == "gpt_oss"  # which sdpa does not know
    attention = "eager" if sinks else "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.bfloat16)
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.data += noise.to(parameter.dtype)
    return model.cuda().eval()


def subject(folder: Path, *, process: str, through_host: bool = False, family: str = "llama") -> contract.Subject:
    """`process` is "in" or "own"."""
    write_model(folder, family=family)
    decode = AutoTokenizer.from_pretrained(folder).decode
    engine: RolloutEngine
    if process == "in":
        engine = VllmEngine(settings(folder), decode)
    else:
        engine = vllm_process(settings(folder), torch.device("cuda", 0), through_host=through_host)
    made = contract.Subject(
        engine=engine,
        reference=reference(folder),
        other=reference(folder, 1),
        stop_ids=frozenset(STOPS),
        decode=decode,
        vocab=VOCABULARY - 5,
        context=CONTEXT,
        tolerance=0.03,
    )
    engine.load(contract.weights_of(made.reference), 0)
    return made
