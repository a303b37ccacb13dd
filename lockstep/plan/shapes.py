"""The sizes that a model's config.json describes: layers, heads, vocabulary, and the exact number of parameters.

For the families below nothing but JSON is read, so that a plan is printed before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PACKED_BYTES = 0.5 + 1 / 32
"""Bytes of a weight in 4 bits with its share of a scale, in NF4 (models.nf4.BYTES) as in MXFP4."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a decoder layer. Example: Linear("k_proj", 256, 1536)"""

    name: str
    outputs: int
    inputs: int

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `parameters` counts tied weights once."""

    family: str
    """model_type of the config. Example: "qwen2"."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    vocab: int
    tied: bool
    """The head's weight is the embedding."""
    parameters: int
    linears: tuple[Linear, ...]
    """nn.Linear layers of one decoder layer: what adapter.targets = all-linear means. Where layers differ, one of each name."""
    experts: int = 0
    """Experts of a layer; 0 is a dense MLP."""
    experts_per_token: int = 0
    expert_bytes: float = 2.0
    """Bytes of a weight of theirs that decoding reads; of the MLP, if it is dense."""
    grouped: bool = False
    """On a GPU they run by models.experts."""
    qk_norm: bool = False
    """Queries and keys are normalised per head (Qwen3, Gemma 3)."""
    window: int | None = None
    """Sliding-window layers see this many tokens."""
    windowed: int = 0
    """Number of those layers."""
    softcap: bool = False
    """Attention scores are capped (Gemma 2)."""
    sinks: bool = False
    """Each head has a score of its own in the softmax (gpt-oss)."""
    norms: int = 2
    """Norms of a layer, those of heads apart."""
    every_linear: tuple[Linear, ...] = ()
    """Those of all layers, where layers differ in them."""
    cached: int = 0
    """Numbers of keys and values of one token in all layers, where layers differ in them, or a value from a key; else 0."""
    state: int = 0
    """Bytes of what layers with a state hold of one sequence."""

    @property
    def all_linears(self) -> tuple[Linear, ...]:
        return self.every_linear or self.linears * self.layers

    @property
    def query_size(self) -> int:
        """d_a of the formulas: query heads × head size."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def head(self) -> int:
        """Parameters of the head's matrix."""
        return self.hidden * self.vocab

    @property
    def attention_body(self) -> int:
        """Parameters of the attention matrices of all layers."""
        return self.layers * (2 * self.hidden * self.query_size + 2 * self.hidden * self.kv_size)

    @property
    def body(self) -> int:
        """Parameters of the layers' matrices that one token passes: with experts, those that it is sent to."""
        active = max(1, self.experts_per_token)
        router = self.layers * self.hidden * self.experts
        return self.attention_body + router + self.layers * active * 3 * self.hidden * self.intermediate

    def body_bytes(self, tokens: float) -> float:
        """Bytes of the layers' matrices that a step over `tokens` tokens reads: of experts, as many as they can reach."""
        reached = min(self.experts, tokens * self.experts_per_token) if self.experts else 1
        router = self.layers * self.hidden * self.experts
        read = self.layers * reached * 3 * self.hidden * self.intermediate
        return 2.0 * (self.attention_body + router) + self.expert_bytes * read

    def kv_bytes(self, element: int = 2) -> int:
        """Bytes of keys and values of one token, all layers."""
        return (self.cached or 2 * self.layers * self.kv_size) * element

    def adapter_parameters(self, rank: int, targets: str | list[str] = "all-linear") -> int:
        """Parameters of LoRA matrices of `rank` on the named layers."""
        chosen = [x for x in self.all_linears if targets == "all-linear" or x.name in targets]
        return sum(rank * (linear.inputs + linear.outputs) for linear in chosen)


@dataclass(frozen=True, slots=True)
class _Family:
    """The way in which a family's parameters follow from its config. A text names the config's own switch."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    norms: int = 2
    """RMSNorm vectors of a layer."""
    sinks: bool = False
    tied: bool = False
    """Default of tie_word_embeddings."""
    experts: bool = False
    """An MLP per expert instead of a dense one."""
    expert_width: str = "intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    every_layer: bool = True
    """Experts in every layer; else decoder_sparse_step and mlp_only_layers must say so."""


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "granite": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "smollm3": _Family("attention_bias", "attention_bias", "mlp_bias", tied=True),
    "mistral": _Family(),
    "mixtral": _Family(experts=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family("attention_bias", "attention_bias", qk_norm=True),
    "qwen3_moe": _Family(
        "attention_bias",
        "attention_bias",
        qk_norm=True,
        experts=True,
        expert_width="moe_intermediate_size",
        every_layer=False,
    ),
    "gemma": _Family("attention_bias", "attention_bias", tied=True),
    "gemma2": _Family("attention_bias", "attention_bias", norms=4, tied=True),
    "gemma3_text": _Family("attention_bias", "attention_bias", qk_norm=True, norms=4, tied=True),
    "gpt_oss": _Family(
        "attention_bias",
        "attention_bias",
        sinks=True,
        experts=True,
        router_bias=True,
        expert_bias=True,
    ),
}
"""Families whose parameters are counted from the config alone."""

EXPERT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys of the number of experts of a layer."""


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape that a config's own words give; None if its family is unknown or a size is not written out."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or (not family.every_layer and not _experts_everywhere(config)):
        return None
    try:
        sizes = _sizes(config, family)
    except KeyError:
        return None
    return replace(sizes, parameters=_parameters(config, family, sizes))


# --- from a config --------------------------------------------------------------------------------------------------
def _sizes(config: Mapping[str, Any], family: _Family) -> ModelShape:
    hidden, heads, layers = (
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
        int(config["num_hidden_layers"]),
    )
    size = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config[family.expert_width])
    query, kv = heads * size, kv_heads * size
    linears = [Linear("q_proj", query, hidden), Linear("k_proj", kv, hidden)]
    linears += [Linear("v_proj", kv, hidden), Linear("o_proj", hidden, query)]
    if not family.experts:
        linears += [Linear("gate_proj", width, hidden), Linear("up_proj", width, hidden)]
        linears += [Linear("down_proj", hidden, width)]
    window, windowed = windows_of(config)
    return ModelShape(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        intermediate=width,
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        parameters=0,
        linears=tuple(linears),
        experts=number_of_experts(config) if family.experts else 0,
        experts_per_token=int(config["num_experts_per_tok"]) if family.experts else 0,
        grouped=family.experts,
        qk_norm=family.qk_norm,
        window=window,
        windowed=windowed,
        softcap=bool(config.get("attn_logit_softcapping", 50.0 if config["model_type"] == "gemma2" else None)),
        sinks=family.sinks,
        norms=family.norms,
    )


def _parameters(config: Mapping[str, Any], family: _Family, shape: ModelShape) -> int:
    def on(switch: bool | str) -> bool:
        return bool(config.get(switch, False)) if isinstance(switch, str) else switch

    hidden, width = shape.hidden, shape.intermediate
    layer = sum(linear.parameters for linear in shape.linears) + family.norms * hidden
    layer += (shape.query_size + 2 * shape.kv_size) * on(family.qkv_bias) + hidden * on(family.output_bias)
    layer += 2 * shape.head_dim * family.qk_norm + shape.heads * family.sinks
    if shape.experts:
        layer += shape.experts * (hidden + family.router_bias)
        layer += shape.experts * (3 * hidden * width + (2 * width + hidden) * family.expert_bias)
    else:
        layer += (2 * width + hidden) * on(family.mlp_bias)
    embeddings = shape.head * (1 if shape.tied else 2)
    return shape.layers * layer + hidden + embeddings


def windows_of(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the sliding window and in how many layers it is in force."""
    window, kinds, layers = config.get("sliding_window"), config.get("layer_types"), int(config["num_hidden_layers"])
    if not window or (config.get("use_sliding_window") is not True and "qwen" in config["model_type"]):
        return None, 0
    if kinds is not None:
        windowed = list(kinds).count("sliding_attention")
    elif config["model_type"].startswith(("gemma", "gpt_oss")):
        # Gemma 2 and gpt-oss alternate, Gemma 3 has one layer of full attention in six.
        windowed = layers - layers // int(config.get("sliding_window_pattern") or 2)
    else:
        windowed = layers
    return (int(window), windowed) if windowed else (None, 0)


def _experts_everywhere(config: Mapping[str, Any]) -> bool:
    return config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers")


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Raises KeyError if the config names none: versions of transformers write one name or the other."""
    return int(next((config[name] for name in EXPERT_NAMES if config.get(name)), None) or config[EXPERT_NAMES[0]])
