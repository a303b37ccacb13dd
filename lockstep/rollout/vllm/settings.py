"""Start settings of a vLLM engine, derived from the recipe and the model. Imports neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.config.schema import Recipe
from lockstep.config.vllm import cache_bytes, longest_of, quantised_numerics
from lockstep.models.decoder import context_of

GIB = 2**30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Everything that an engine needs to know, as plain values: sent to the engine's process as JSON."""

    folder: str
    """Model folder; only its configuration is read, the weights come from the learner."""
    dtype: str
    """Type of weights and computation. Example: "bfloat16"."""
    slots: int
    """Number of sequences decoded together."""
    max_model_len: int
    """Most tokens of prompt and reply together."""
    kv_cache_bytes: int
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion."""
    seeded: bool = True
    enforce_eager: bool = False
    sleep: bool = True
    trust_remote_code: bool = False
    numerics: tuple[str, ...] = ()
    """Numerics with quantised layers that the engine may be set to; without any it is built without such layers."""
    scale: str = "floor"
    """Scale mode of MXFP4 blocks."""
    exclude: tuple[str, ...] = ()
    """Linear layers that are not quantised."""


def settings_of(
    recipe: Recipe, folder: str, config: Any, *, dtype: str, stop_ids: frozenset[int], gpu_bytes: int
) -> VllmSettings:
    """Derive the settings. `config` is transformers' configuration of the model; `gpu_bytes` the memory of the whole GPU."""
    vllm, text = recipe.rollout.vllm, config.get_text_config()
    length = longest_of(vllm, recipe.longest_reply, context_of(config))
    wanted = recipe.vllm_room * length * bytes_per_token(text, 4 if dtype == "float32" else 2)
    return VllmSettings(
        folder=folder,
        dtype=dtype,
        slots=recipe.slots("cuda"),
        max_model_len=length,
        kv_cache_bytes=cache_bytes(vllm, wanted, gpu_bytes),
        stop_ids=tuple(sorted(stop_ids)),
        seeded=vllm.seeded,
        enforce_eager=vllm.enforce_eager,
        sleep=vllm.sleep,
        trust_remote_code=recipe.model.trust_remote_code,
        numerics=quantised_numerics(recipe.numerics),
        scale=recipe.numerics.scale,
        exclude=tuple(recipe.numerics.exclude),
    )


def bytes_per_token(config: Any, element: int) -> int:
    """Return the bytes of a token's keys and values in all layers, as if every layer kept all tokens (windows keep fewer)."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * element)
