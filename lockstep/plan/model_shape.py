"""Finds the shape of a model: it is built on the meta device, which takes no memory for weights, and its modules are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.config.adapter import keeps_mxfp4
from lockstep.errors import ModelError
from lockstep.learner.adapter_targets import EXPERTS
from lockstep.models.decoder import context_of, even_heads
from lockstep.models.known import kind_of_experts
from lockstep.models.load import refuse_unlike, structure
from lockstep.models.states import first_state, state_layers
from lockstep.plan.shapes import MXFP4_BYTES, Linear, ModelShape
from lockstep.text import reason_of

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe

WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_size")
"""Config keys of the width of a dense MLP."""
CHOSEN_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""Config keys of the number of experts of a token."""


def recipe_shape(recipe: Recipe, folder: Path) -> ModelShape:
    """Return the shape of the model in a folder as the recipe's run holds it. Raises ModelError as `read_shape` does."""
    shape = read_shape(folder)
    return replace(shape, expert_bytes=MXFP4_BYTES) if keeps_mxfp4(recipe.adapter) else shape


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in a folder. Raises ModelError as `whole_model` does, or if it is no decoder."""
    model = whole_model(folder)
    try:
        return shape_of_model(model)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
    ) as error:  # a family with words of its own
        what = f"the sizes of this model cannot be determined: {reason_of(error)}"
        raise ModelError(
            what, where=str(folder / "config.json"), fix="check config.json, or choose another model"
        ) from error


def whole_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return a model without memory for weights. Raises ModelError if it cannot be built, or the weight files are not its own or
    cut off.
    """
    model = meta_model(folder, trust_remote_code)
    refuse_unlike(folder, model)
    return model


def meta_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return a transformers model whose weights take no memory. Raises ModelError if it cannot be built."""
    try:
        return structure(folder, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # whatever transformers makes of a config that lies
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"transformers cannot build a model from this file: {reason}",
            where=str(folder / "config.json"),
            fix="check config.json, or fetch the model again",
        ) from error


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a transformers causal language model, on any device."""
    config = model.config.get_text_config()
    words, heads, hidden = config.to_dict(), int(config.num_attention_heads), int(config.hidden_size)
    blocks = _blocks(model.get_decoder())
    layers = [
        tuple(
            Linear(name.rsplit(".", 1)[-1], module.out_features, module.in_features)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        )
        for layer in blocks
    ]
    alike = all(one == layers[0] for one in layers)
    names = {linear.name: linear for one in reversed(layers) for linear in reversed(one)}
    experts = next((int(words[name]) for name in EXPERTS if words.get(name)), 0)
    width = words.get("moe_intermediate_size") if experts else None
    width = width or next((words[name] for name in WIDTHS if words.get(name)), 4 * hidden)
    window, windowed = _windows(words)
    modules = dict(model.get_decoder().named_modules())
    kv_heads, size = even_heads(model)
    return ModelShape(
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads or int(words.get("num_key_value_heads") or heads),
        head_dim=size or max(_sizes(model), default=hidden // heads),
        intermediate=int(max(width) if isinstance(width, (list, tuple)) else width),
        vocab=int(config.vocab_size),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        parameters=sum(p.numel() for p in model.parameters()),
        linears=layers[0] if alike else tuple(reversed(names.values())),
        experts=experts,
        experts_per_token=next((int(words[name]) for name in CHOSEN_NAMES if words.get(name)), 1) if experts else 0,
        grouped=any(kind_of_experts(module) for module in modules.values()),
        qk_norm=any(name.endswith(("q_norm", "q_layernorm")) for name in modules),
        window=window,
        windowed=windowed,
        softcap=bool(words.get("attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        norms=sum("norm" in name for name, _ in blocks[0].named_children()),
        every_linear=() if alike else tuple(linear for one in layers for linear in one),
        cached=0 if size else sum(_cached(model)),
        context=context_of(config),
        state=sum(t.nbytes for layer in state_layers(model) for t in first_state(layer, hidden).values()),
    )


def _blocks(decoder: Any) -> Any:
    """Return the layers of a decoder, which families in GPT-2's words (GPTBigCode, CTRL) call h."""
    return decoder.layers if hasattr(decoder, "layers") else decoder.h


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


def _windows(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the sliding window and in how many layers it is in force."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or (config.get("use_sliding_window") is not True and "qwen" in config["model_type"]):
        return None, 0
    windowed = int(config["num_hidden_layers"]) if kinds is None else list(kinds).count("sliding_attention")
    return (int(window), windowed) if windowed else (None, 0)
