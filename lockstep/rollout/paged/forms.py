"""Reads the parts of a model's layers that fused decoding needs, whatever a family calls them.

Legend: X features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from lockstep.models.fused_layers import norm_kind
from lockstep.rollout.paged.plain import RowNorm, Turn

FAMILIES = frozenset({
    "cwm", "dots1", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "internlm3", "llama", "ministral",
    "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
})  # fmt: skip
"""Model types whose blocks are known to compute as `fused.FusedDecoder` does."""
_INTERLEAVED = ("glm", "glm4")
"""Those that rotate neighbours together."""
_AROUND = (
    ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
"""Names of the norms after attention, before the MLP and after it, where a layer has all three."""


class CannotFuse(Exception):
    """Reason why a model's blocks are not run in fused form."""


@dataclass(frozen=True, slots=True)
class Form:
    """The modules of one layer."""

    inputs: tuple[Any, ...]
    """Query, key and value, or one linear layer for all three."""
    out: Any
    gate_up: tuple[Any, ...]
    """Gate and up, or one linear layer for both; empty for a mixture of experts."""
    down: Any
    mixture: Any
    """A mixture of experts, or None."""
    gelu: bool
    norm: RowNorm
    after: RowNorm | None
    """Norm of attention's output, before it is added."""
    mlp_norm: RowNorm
    mlp_after: RowNorm | None

    @property
    def linears(self) -> tuple[tuple[Any, ...], ...]:
        """Linear layers, together those that read one input."""
        mlp = () if self.mixture is not None else (self.gate_up, (self.down,))
        return self.inputs, (self.out,), *mlp


def form_of(layer: Any) -> Form:
    """Return the modules of a layer. Raises CannotFuse for a norm or an activation that is not known."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (
        (attention.qkv_proj,)
        if hasattr(attention, "qkv_proj")
        else (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    around = next((names for names in _AROUND if all(hasattr(layer, name) for name in names)), None)
    after, mlp_norm, mlp_after = around or (None, "post_attention_layernorm", None)

    def norm(name: str) -> RowNorm:
        return row_norm_of(getattr(layer, name))

    norms = (
        norm("input_layernorm"),
        norm(after) if after else None,
        norm(mlp_norm),
        norm(mlp_after) if mlp_after else None,
    )
    if hasattr(mlp, "experts"):
        return Form(inputs, attention.o_proj, (), None, mlp, False, *norms)
    gate_up = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
    return Form(inputs, attention.o_proj, gate_up, mlp.down_proj, None, _is_gelu(mlp), *norms)


def row_norm_of(module: nn.Module) -> RowNorm:
    """Return what a norm computes. Raises CannotFuse for one that is not known."""
    kind, norm = norm_kind(module), cast(Any, module)
    if kind is None:
        raise CannotFuse(f"its norm is {type(module).__name__}")
    return RowNorm(norm.weight, float(getattr(module, kind.epsilon)), kind.offset, kind.late)


def _is_gelu(mlp: Any) -> bool:
    function = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    match type(function).__name__:
        case "SiLU" | "SiLUActivation":
            return False
        case "GELUTanh" | "PytorchGELUTanh":
            return True
        case name:
            raise CannotFuse(f"its activation is {name}")


def turns_of(decoder: Any, layers: Iterable[Any], model_type: str, positions: int) -> list[Turn | None]:
    """Return what each layer does to its heads before attention. Raises CannotFuse for frequencies that depend on the length."""
    made: dict[str, Turn] = {}
    turns: list[Turn | None] = []
    for attention in (layer.self_attn for layer in layers):
        if not getattr(attention, "use_rope", True):
            turns.append(None)
            continue
        kind = attention.layer_type if isinstance(decoder.rotary_emb.rope_type, dict) else ""
        if kind not in made:
            made[kind] = _turn(decoder, model_type, positions, kind)
        normed = hasattr(attention, "q_norm")
        norms = (row_norm_of(attention.q_norm), row_norm_of(attention.k_norm)) if normed else None
        turns.append(replace(made[kind], norms=norms))
    return turns


def _turn(decoder: Any, model_type: str, positions: int, kind: str) -> Turn:
    rotary = decoder.rotary_emb
    rope = rotary.rope_type[kind] if kind else rotary.rope_type
    if "dynamic" in rope or rope == "longrope":
        raise CannotFuse(f"its rotary frequencies depend on the length ({rope})")
    device, dtype = decoder.embed_tokens.weight.device, decoder.embed_tokens.weight.dtype
    position_1T = torch.arange(positions, device=device)[None]
    with torch.no_grad():
        tables = rotary(torch.zeros(1, device=device), position_1T, *([kind] if kind else []))
    pairs = tables[0].shape[-1] // (1 if model_type == "gpt_oss" else 2)  # gpt-oss gives each number once
    cos, sin = (table[0, :, :pairs].to(dtype).float().contiguous() for table in tables)  # rounded as the model's
    return Turn(cos, sin, None, model_type in _INTERLEAVED)
