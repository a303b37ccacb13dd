"""Reads the sizes of a transformers model from its modules. They may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.models.decoder import even_heads
from lockstep.models.known import kind_of_experts
from lockstep.models.states import first_state, state_layers
from lockstep.plan.shapes import EXPERT_NAMES, Linear, ModelShape, number_of_experts, windows_of

WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_size")
"""Config keys of the width of a dense MLP."""


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a transformers causal language model, on any device."""
    config = model.config.get_text_config()
    words, heads, hidden = config.to_dict(), int(config.num_attention_heads), int(config.hidden_size)
    layers = [_linears(layer) for layer in model.get_decoder().layers]
    alike = all(one == layers[0] for one in layers)
    names = {linear.name: linear for one in reversed(layers) for linear in reversed(one)}
    experts = number_of_experts(words) if any(words.get(name) for name in EXPERT_NAMES) else 0
    width = words.get("moe_intermediate_size") if experts else None
    window, windowed = windows_of(words)
    modules = dict(model.get_decoder().named_modules())
    kv_heads, size = even_heads(model)
    return ModelShape(
        family=str(config.model_type),
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads or int(words.get("num_key_value_heads") or heads),
        head_dim=size or max(_sizes(model), default=hidden // heads),
        intermediate=_width(width or next((words[name] for name in WIDTHS if words.get(name)), 4 * hidden)),
        vocab=int(config.vocab_size),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        parameters=sum(p.numel() for p in model.parameters()),
        linears=layers[0] if alike else tuple(reversed(names.values())),
        experts=experts,
        experts_per_token=int(words.get("num_experts_per_tok") or words.get("top_k_experts") or 1) if experts else 0,
        grouped=any(kind_of_experts(module) for module in modules.values()),
        qk_norm=any(name.endswith(("q_norm", "q_layernorm")) for name in modules),
        window=window,
        windowed=windowed,
        softcap=bool(words.get("attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        norms=sum("norm" in name for name, _ in model.get_decoder().layers[0].named_children()),
        every_linear=() if alike else tuple(linear for one in layers for linear in one),
        cached=0 if size else sum(_cached(model)),
        state=sum(t.nbytes for layer in state_layers(model) for t in first_state(layer, hidden).values()),
    )


def _linears(layer: nn.Module) -> tuple[Linear, ...]:
    return tuple(
        Linear(name.rsplit(".", 1)[-1], module.out_features, module.in_features)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    )


def _width(stated: int | list[int]) -> int:
    """Return the width of the MLP; of several the largest."""
    return int(max(stated) if isinstance(stated, (list, tuple)) else stated)


def _attentions(model: Any) -> Iterator[Any]:
    """Yield the modules with attention."""
    states = {id(module) for module in state_layers(model)}
    for module in model.get_decoder().modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj") and id(module) not in states:
            yield module


def _sizes(model: Any) -> Iterator[int]:
    """Yield the size of a key's head in each layer."""
    for module in _attentions(model):
        size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if size:
            yield int(size)


def _cached(model: Any) -> Iterator[int]:
    """Yield the numbers of keys and values of one token in each layer with attention."""
    before: dict[Any, int] = {}
    for module in _attentions(model):
        kind, key, value = (
            getattr(module, "layer_type", None),
            getattr(module, "k_proj", None),
            getattr(module, "v_proj", None),
        )
        if hasattr(module, "kv_b_proj"):
            before[kind] = module.num_heads * (module.qk_head_dim + module.v_head_dim)
        elif isinstance(key, nn.Linear):
            before[kind] = key.out_features + (value if isinstance(value, nn.Linear) else key).out_features
        yield before.get(kind, 0)  # without a key of its own it has that of the layer of its kind before it
