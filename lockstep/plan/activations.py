"""Activation memory: the bytes per token that a decoder keeps for its backward pass, and what a layer needs while it runs.

Counted tensor by tensor as the layers save them; tests/plan compares the sums with what autograd keeps. e is the bytes of an
element of the model's precision. A width below stands for its bytes: h hidden, q queries, k keys (and values), i MLP.

              plain (transformers' own)                fused
    norm      fp32 input, scaled input *, output       input, output
    heads' norm of queries and keys, likewise (Qwen3, Gemma 3)
    attention q + 2k + output, and an fp32 log-sum-exp for each head
    MLP       gate, act(gate), up, product: 4i         gate, up, product: 3i
                                                       * only where the norm's weight is trained

With update.recompute=selective, the outputs of the layers' norms and the product are computed again: their inputs are kept, h
and 2i. With full, only the input of each layer is kept, and one layer at a time holds the rest.

Without a fused attention kernel the scores are tensors [heads, queries, keys], which grow with the square of the length. This
is so for short sequences on a CPU, and on a GPU with soft-capping, or with sinks or a window in fp32. See `scores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lockstep.plan.shapes import ModelShape

Recompute: TypeAlias = Literal["none", "selective", "full"]

FP32 = 4
SMALL = 2**16
"""Queries × keys up to which a CPU multiplies the matrices outright (models.attention.SMALL)."""
PAIRS = 2**16
"""Queries × keys of a block (models.blockwise.PAIRS)."""
PAIR = 8 + 3 * 4 + 2
"""Bytes of a pair of token and expert: its number, its places among the sorted ones and its expert, and its weight."""
STREAM = 7 * 8
"""Bytes of a token of a stream: ids and positions, both again with padding, and of those with loss row, target and sequence."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The way in which the layers of a model run."""

    element: int
    """Bytes of an element: 2 for bf16, 4 for fp32."""
    fused: bool
    """Norms and activations by fused kernels; else by transformers' own operations."""
    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    expert_rank: int = 0
    """Rank of adapters on experts."""

    @property
    def trains_norms(self) -> bool:
        return not self.rank


@dataclass(frozen=True, slots=True)
class PerToken:
    """Bytes per token."""

    kept: float
    """Bytes of all layers, and of what follows them up to the head, until the backward pass."""
    working: float
    """At most, on top, while one layer runs backwards."""
    forward: float
    """At most while a layer runs in a forward pass that keeps nothing."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Attention whose scores are tensors. Bytes per pair of query and key, all heads."""

    layers: int
    """Number of layers with such scores; 0 where a fused kernel serves all."""
    whole: bool
    """True if replies behind a shared prompt have them too: a window alone is a mask there, which the kernels take."""
    kept: float
    """Bytes of one layer, until the backward pass."""
    working: float
    """While a layer runs, forwards or backwards."""
    blocks: bool = False
    """True if they are made in blocks of PAIRS pairs, and again for the backward pass: nothing is kept."""
    window: int | None = None
    """Tokens that windowed layers see by flash-attention kernels, if sequences are longer. Responses that share a prompt
    then have keys of their own (learner.flash.Copies).
    """


def scores(shape: ModelShape, layers: Layers, device: Literal["cuda", "cpu"], longest: int) -> Scores:
    """Count what attention over sequences of up to `longest` tokens takes beside what `per_token` counts.

    Kept are the probabilities in fp32, again as they are rounded for the product with the values, and the tanh of capped scores.
    At work are two such tensors in fp32 and the product in the model's precision, or with a cap or sinks three in fp32. A CPU
    makes those of longer sequences in blocks (models.blockwise).
    """
    narrow = shape.window is not None and shape.window < longest
    if device == "cpu" and (longest - 1) ** 2 > SMALL:
        at_work = FP32 * (3 + 2 * shape.softcap) if shape.softcap or shape.sinks or narrow else 0
        return Scores(0, False, 0.0, float(shape.heads * at_work), blocks=True)
    if device == "cuda" and _flash_serves(shape, layers):
        return Scores(0, False, 0.0, 0.0, window=shape.window if shape.windowed and narrow else None)
    whole = shape.softcap or shape.sinks or device == "cpu"
    rounded = layers.element if layers.element < FP32 else 0
    kept = FP32 + FP32 * shape.softcap + rounded
    working = 3 * FP32 if shape.softcap or shape.sinks else 2 * FP32 + rounded
    count = shape.layers if whole else shape.windowed * narrow
    return Scores(count, whole, float(shape.heads * kept), float(shape.heads * working))


def copied_keys(shape: ModelShape, layers: Layers, *, backward: bool) -> float:
    """Count a key and a value in a layer where segments have keys of their own: backwards with their gradients, which the kernels
    make for each query head first.
    """
    query, key = layers.element * shape.query_size, layers.element * shape.kv_size
    return 4.0 * key + 2 * query * (shape.heads != shape.kv_heads) if backward else 2.0 * key


def _flash_serves(shape: ModelShape, layers: Layers) -> bool:
    """Return whether a GPU has torch's flash-attention kernels for all layers (models.varlen.flash_serves). Those of models with
    heads that differ are counted as if it had none.
    """
    size = shape.head_dim
    return layers.element < FP32 and size <= 256 and size % 8 == 0 and not shape.softcap and not shape.cached


def per_token(shape: ModelShape, layers: Layers, recompute: Recompute) -> PerToken:
    """Count the bytes of a stream of tokens, per token."""
    hidden = layers.element * shape.hidden
    inner = layers.element * shape.intermediate * max(1, shape.experts_per_token)
    whole = _layer(shape, layers, "none")
    outside = _norm(layers, shape.hidden, recompute) + _rotary(
        shape, layers
    )  # the last norm; its output goes to the head
    # Backwards, gate and up have gradients while the product's is alive and the product itself is gone.
    working = 2.0 * (hidden + inner) + (_copies(shape, layers) + inner if _grouped(shape, layers) else 0.0)
    working += _copies(shape, layers) * (layers.expert_rank > 0)  # the gradient that comes through the adapters
    if recompute == "full":
        kept, working = float(shape.layers * hidden), working + whole - hidden
    else:
        kept = shape.layers * _layer(shape, layers, recompute)
        working += (hidden + inner) * (recompute == "selective")
    return PerToken(kept + outside, working, _forward(shape, layers))


def _forward(shape: ModelShape, layers: Layers) -> float:
    """Count the stream itself, the embeddings, and the worst moment of a layer that keeps nothing, beside what it adds to.

    Attention has queries, keys and values, rotated queries, and two parts of the output; transformers' own operations rotate
    in three pieces. The MLP has the layer's input, the norm's output, gate, up and product; a norm has two copies in fp32.
    """
    hidden, query, key = (layers.element * width for width in (shape.hidden, shape.query_size, shape.kv_size))
    inner = layers.element * shape.intermediate * max(1, shape.experts_per_token)
    attention = hidden + (3 if layers.fused else 4) * query + 2 * key
    norm = 0.0 if layers.fused else hidden + 2 * FP32 * shape.hidden
    copies = _grouped(shape, layers) + (layers.expert_rank > 0)  # what adapters add is a tensor of its own
    mlp = 2 * hidden + 3 * inner + copies * _copies(shape, layers)
    return STREAM + _rotary(shape, layers) + 2 * hidden + max(attention, norm, mlp)


def _layer(shape: ModelShape, layers: Layers, recompute: Recompute) -> float:
    """Return one layer's share of what is kept, its input included."""
    element = layers.element
    query, key = element * shape.query_size, element * shape.kv_size
    inner = element * shape.intermediate * max(1, shape.experts_per_token)
    attention = 2.0 * query + 2 * key + FP32 * shape.heads
    if shape.qk_norm:  # their outputs go on to the rotary embedding, which keeps nothing of them
        attention += _norm(layers, shape.query_size, "none", rows=shape.heads)
        attention += _norm(layers, shape.kv_size, "none", rows=shape.kv_heads)
    clamped = shape.sinks and shape.experts > 0  # gpt-oss: gate and up are clamped, and each step of the gate is kept
    grouped = _grouped(shape, layers)  # these keep gate and up alone
    copies = 2 if grouped else 3 if layers.fused else 7 if clamped else 4
    mlp = (2 if recompute == "selective" else copies) * inner
    adapters = element * layers.rank * len(shape.linears)
    adapters += element * layers.expert_rank * 2 * shape.experts_per_token
    routed = PAIR * shape.experts_per_token if grouped else _copies(shape, layers)
    outputs = 0 if recompute == "selective" else 2 * element * shape.hidden
    return shape.norms * _norm(layers, shape.hidden, recompute) + outputs + attention + mlp + adapters + routed


def _grouped(shape: ModelShape, layers: Layers) -> bool:
    """Return whether experts run by models.experts."""
    return layers.fused and shape.grouped


def _copies(shape: ModelShape, layers: Layers) -> float:
    """Count the copies of a token's hidden state, one for each of its experts."""
    return layers.element * shape.hidden * shape.experts_per_token


def _norm(layers: Layers, width: int, recompute: Recompute, rows: int = 1) -> float:
    """Count what a norm over `width` features keeps of its input, with `rows` fp32 factors a token; its output is not counted."""
    if layers.fused:
        return layers.element * width + FP32 * rows
    if recompute == "selective":
        return layers.element * width
    return FP32 * width + layers.element * width * layers.trains_norms + FP32 * rows


def _rotary(shape: ModelShape, layers: Layers) -> float:
    return 2 * layers.element * shape.head_dim
