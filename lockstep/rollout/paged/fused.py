"""Fused decoding of the layers that forms.py reads: eight kernel launches a layer, not thirty, with the learner's own weights.

The query, key and value matrices of a layer are in one tensor, and so are gate and up; the model's parameters are views of it,
so that training writes to the memory that decoding reads. An adapter's up matrices are in the same tensor, to the right of the
weights that they add to: x Wᵀ + s (x Aᵀ) Bᵀ = [x, s x Aᵀ] [W, B]ᵀ enlarges one matrix multiplication a little. (28 layers of
the Qwen2.5-1.5B shape with rank 32, 512 rows, on an H200: 2.4 ms without adapters, 3.3 in this way, 4.0 with a matrix
multiplication for each up matrix.)

Legend: B rows, X features, H query heads, O outputs, R ranks of the adapters of one tensor together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import EngineError
from lockstep.models import exact
from lockstep.models.attention import AttentionKind, kind_of_layer
from lockstep.models.merged_weights import joined_merged
from lockstep.models.weights import clean_name
from lockstep.numerics.apply import ModelNumerics
from lockstep.numerics.linear import Quantiser
from lockstep.rollout.paged.forms import FAMILIES, CannotFuse, Form, form_of, row_norm_of, turns_of
from lockstep.rollout.paged.joined import joined, side_by_side, slices
from lockstep.rollout.paged.ops import Ops
from lockstep.rollout.paged.plain import RowNorm, Turn, Unsummed
from lockstep.rollout.paged.state import PageCache, Rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The adapters of the parts of one fused matrix."""

    down_RX: Tensor
    parts: tuple[tuple[slice, slice, Tensor], ...]
    """For each part: its outputs, its ranks, and its up matrix."""
    factors: tuple[Mapping[str, float], ...]
    """PEFT's own scalings of each part: load() may change them."""
    wide_OY: Tensor | None
    """The weight with the up matrices to its right, each in its own rows and columns; Y = X + R. None for fp32 weights: these
    are their own masters, and torch's fused optimizers ignore strides when they write.
    """

    @property
    def ranks(self) -> int:
        return self.down_RX.shape[0]

    @property
    def scaling(self) -> float:
        """Common scaling of all parts. Raises EngineError if load() brought different ones."""
        first, *others = {float(factors["default"]) for factors in self.factors}
        if others:
            raise EngineError("the adapters of matrices that read one input now have different scalings", where="load")
        return first


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Linear layers with the same input as one product."""

    layers: tuple[nn.Linear, ...]
    weight_OX: Tensor
    bias_O: Tensor | None
    adapter: _Adapter | None
    quantiser: Quantiser | None = None
    """Quantiser of its input; the adapter sees the unquantised input."""

    @property
    def room(self) -> int:
        """Number of columns that must be free after each row of its input."""
        adapter = self.adapter
        return 0 if adapter is None or adapter.wide_OY is None or self.quantiser is not None else adapter.ranks

    def __call__(self, x_BX: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """Return the product. `product` makes the largest part of it, unless more is added to that."""
        adapter = self.adapter
        if adapter is not None and adapter.wide_OY is not None and self.room:
            count, size = x_BX.shape
            wide_BY = x_BX.as_strided((count, size + self.room), x_BX.stride())
            down_BR = wide_BY[:, size:]
            if exact.enabled():
                exact.adapter_into(down_BR, x_BX, adapter.down_RX, adapter.scaling)
                return exact.linear(wide_BY, adapter.wide_OY, self.bias_O)
            torch.addmm(down_BR, x_BX, adapter.down_RX.T, beta=0, alpha=adapter.scaling, out=down_BR)
            return product(wide_BY, adapter.wide_OY, self.bias_O)
        if exact.enabled():
            return exact.linear(x_BX, self.weight_OX, self.bias_O)
        if adapter is None and self.quantiser is None:
            return product(x_BX, self.weight_OX, self.bias_O)
        used_BX = x_BX if self.quantiser is None else self.quantiser.activation(x_BX)
        out_BO = nn.functional.linear(used_BX, self.weight_OX, self.bias_O)
        if adapter is not None:
            down_BR = x_BX @ adapter.down_RX.T
            for outputs, ranks, up_OR in adapter.parts:
                out_BO[:, outputs].addmm_(down_BR[:, ranks], up_OR.T, alpha=adapter.scaling)
        return out_BO

    def quantised(self, numerics: ModelNumerics, quantiser: Quantiser) -> _Matrix:
        """Return the matrix on quantised operands, if its layers are quantised. Raises CannotFuse if only some of them are."""
        targets = {id(layer) for layer in numerics.targets.values()}
        found = [id(layer) in targets for layer in self.layers]
        if all(found):
            return replace(self, weight_OX=numerics.joined(quantiser, self.layers), quantiser=quantiser)
        if any(found):
            raise CannotFuse("numerics.exclude leaves some of the matrices that read one input alone")
        return self


@dataclass(frozen=True, slots=True)
class _Gated:
    """A gated MLP."""

    gate_up: _Matrix
    down: _Matrix
    gelu: bool

    @property
    def room(self) -> int:
        return self.gate_up.room

    def __call__(self, x_BX: Tensor, ops: Ops) -> Tensor:
        return self.down(ops.gate(self.gate_up(x_BX, ops.product), self.down.room, gelu=self.gelu), ops.before_norm)

    def quantised(self, numerics: ModelNumerics, quantiser: Quantiser) -> _Gated:
        parts = {name: getattr(self, name).quantised(numerics, quantiser) for name in ("gate_up", "down")}
        return replace(self, **parts)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A mixture of experts, by the model's own module; on a GPU its router and experts are the kernels of models.experts."""

    module: nn.Module
    room: int = 0

    def __call__(self, x_BX: Tensor, ops: Ops) -> Tensor | Unsummed:
        return ops.mixture(self.module, x_BX)

    def quantised(self, numerics: ModelNumerics, quantiser: Quantiser) -> _Mixture:
        return self


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer."""

    qkv: _Matrix
    out: _Matrix
    mlp: _Gated | _Mixture
    form: Form
    turn: Turn | None
    kind: AttentionKind

    def quantised(self, numerics: ModelNumerics, quantiser: Quantiser) -> _Block:
        parts = {name: getattr(self, name).quantised(numerics, quantiser) for name in ("qkv", "out", "mlp")}
        return replace(self, **parts)


@dataclass(slots=True)
class FusedDecoder:
    """The decode step of a fused model: from tokens to the hidden states of the last norm."""

    embedding_VX: Tensor
    blocks: list[_Block]
    norm: RowNorm
    heads: int
    scale: float = 1.0
    """Factor of the embeddings."""
    fused: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are read instead of the parameters of these names."""

    def __call__(self, count: int, ops: Ops, rows: Rows, cache: PageCache, splits: int) -> Tensor:
        """Return hidden states [B, X] of one new token for each of the first `count` rows."""
        residual_BX = nn.functional.embedding(rows.next_B[:count], self.embedding_VX)
        residual_BX = residual_BX if self.scale == 1.0 else residual_BX * self.scale
        x_BX: Tensor | Unsummed | None = None
        after: RowNorm | None = None
        for layer, block in enumerate(self.blocks):
            form = block.form
            residual_BX, normed_BX = ops.add_norm(x_BX, residual_BX, form.norm, block.qkv.room, after)
            heads_BX = block.qkv(normed_BX, ops.product).view(count, -1, cache.size)
            heads = heads_BX.transpose(0, 1).split([self.heads, cache.heads, cache.heads])
            attended_BX = ops.attend(heads, rows, cache, layer, block.kind, splits, block.out.room, block.turn)
            x_BX = block.out(attended_BX, ops.before_norm)
            residual_BX, normed_BX = ops.add_norm(x_BX, residual_BX, form.mlp_norm, block.mlp.room, form.after)
            x_BX, after = block.mlp(normed_BX, ops), form.mlp_after
        return ops.add_norm(x_BX, residual_BX, self.norm, 0, after)[1]

    def computing(self, numerics: ModelNumerics, numeric: str) -> FusedDecoder | None:
        """Return this decoder in a numeric; itself in that of the weights, None if it can only be run layer by layer."""
        quantiser = numerics.quantiser(numeric)
        if quantiser is None:
            return self
        try:
            blocks = [block.quantised(numerics, quantiser) for block in self.blocks]
        except CannotFuse as reason:
            _log_unfused(reason)
            return None
        return replace(self, blocks=blocks)

    def read(self, name: str, parameter: Tensor) -> Tensor:
        """Return the tensor that is read instead of a parameter: the parameter itself if its memory is the same, so that
        torch's count of its writes stays valid.
        """
        place = self.fused.get(name)
        return parameter if place is None or place.is_set_to(parameter) else place


def fuse_or_log(base: Any, positions: int) -> FusedDecoder | None:
    """Call `fuse`; return None for a model that cannot be fused."""
    try:
        return fuse(base, positions)
    except CannotFuse as reason:
        _log_unfused(reason)
        return None


def _log_unfused(reason: CannotFuse) -> None:
    log.info("decoding runs the model's own forward pass: %s", reason)
    if exact.enabled():
        exact.enable(f"exact: off, decoding runs the model's own forward pass: {reason}", on=False)
        log.warning("numerics.exact has no effect: decoding runs the model's own forward pass (%s)", reason)


def fuse(base: Any, positions: int) -> FusedDecoder:
    """Arrange the weights of a transformers model for fused decoding; its parameters become views of them.

    `base` is the causal language model without PEFT around it. Raises CannotFuse for a model of another shape, which is then
    unchanged.
    """
    config, decoder = base.config.get_text_config(), base.get_decoder()
    if config.model_type not in FAMILIES:
        raise CannotFuse(f"{config.model_type} is not among {', '.join(sorted(FAMILIES))}")
    layers = list(decoder.layers)
    forms = [form_of(layer) for layer in layers]
    for form in forms:
        _check(form.linears)
    norm, turns = row_norm_of(decoder.norm), turns_of(decoder, layers, config.model_type, positions)
    names = {id(p): clean_name(n) for n, p in base.named_parameters()}
    fused: dict[str, Tensor] = {}
    blocks = [
        _block(form, turn, kind_of_layer(layer.self_attn, config), names, fused)
        for layer, form, turn in zip(layers, forms, turns, strict=True)
    ]
    scale = getattr(
        decoder.embed_tokens, "embed_scale", None
    )  # a tensor, which is rounded to the embeddings' precision
    embedding_VX: Tensor = decoder.embed_tokens.weight
    return FusedDecoder(
        embedding_VX=embedding_VX,
        blocks=blocks,
        norm=norm,
        heads=int(config.num_attention_heads),
        scale=1.0 if scale is None else float(scale.to(embedding_VX.dtype)),
        fused=fused,
    )


def _check(groups: Sequence[Sequence[Any]]) -> None:
    for linear in (linear for group in groups for linear in group):
        if not isinstance(_plain(linear), nn.Linear):
            raise CannotFuse(f"{type(linear).__name__} is not a linear layer")
        if hasattr(linear, "base_layer") and not hasattr(linear, "lora_A"):
            raise CannotFuse(f"its adapter is {type(linear).__module__.split('.')[-2]}")
        if hasattr(linear, "lora_A") and (linear.merged or linear.disable_adapters):
            raise CannotFuse("its adapter is merged, or off")
        if hasattr(linear, "lora_A") and list(linear.active_adapters) != ["default"]:
            raise CannotFuse("there are several adapters")
        if getattr(linear, "lora_variant", None):
            raise CannotFuse(f"its adapter is {type(linear.lora_variant['default']).__name__}")
    for group in groups:
        if len({_plain(linear).bias is None for linear in group}) > 1:
            raise CannotFuse("only some of the matrices that read one input have a bias")
        if len({"default" in getattr(linear, "lora_A", {}) for linear in group}) > 1:
            raise CannotFuse("only some of the matrices that read one input have an adapter")
        if len({linear.scaling["default"] for linear in group if hasattr(linear, "lora_A")}) > 1:
            raise CannotFuse("the adapters of matrices that read one input have different scalings")


def _block(
    form: Form, turn: Turn | None, kind: AttentionKind, names: dict[int, str], fused: dict[str, Tensor]
) -> _Block:
    qkv, out = _matrix(form.inputs, names, fused), _matrix([form.out], names, fused)
    if form.mixture is not None:
        return _Block(qkv, out, _Mixture(form.mixture), form, turn, kind)
    gate_up = _matrix(form.gate_up, names, fused)
    return _Block(qkv, out, _Gated(gate_up, _matrix([form.down], names, fused), form.gelu), form, turn, kind)


def _matrix(linears: Sequence[Any], names: dict[int, str], fused: dict[str, Tensor]) -> _Matrix:
    plain = [_plain(linear) for linear in linears]
    weights = [p.weight for p in plain]
    bias = None if plain[0].bias is None else joined([p.bias for p in plain], names, fused)
    merged = [linear.merged_weight for linear in linears if hasattr(linear, "merged_weight")]
    if merged:
        joined([linear.lora_A["default"].weight for linear in linears], names, fused)  # for the gradients in training
        return _Matrix(tuple(plain), joined_merged(merged), bias, None)
    if not hasattr(linears[0], "lora_A"):
        return _Matrix(tuple(plain), joined(weights, names, fused), bias, None)
    down = joined([linear.lora_A["default"].weight for linear in linears], names, fused)
    ups = [linear.lora_B["default"].weight for linear in linears]
    wide = side_by_side(weights, ups, names, fused) if down.dtype.itemsize == 2 else None
    weight = joined(weights, names, fused) if wide is None else wide[:, : down.shape[1]]
    outputs, ranks = slices([w.shape[0] for w in weights]), slices([up.shape[1] for up in ups])
    parts = tuple(zip(outputs, ranks, ups, strict=True))
    return _Matrix(tuple(plain), weight, bias, _Adapter(down, parts, tuple(linear.scaling for linear in linears), wide))


def _plain(linear: Any) -> Any:
    return linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear
