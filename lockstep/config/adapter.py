"""Settings that choose which weights are trained: all of them, or adapters through PEFT."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias, assert_never

from pydantic import Field, model_validator

from lockstep.config.section import Json, Place, Section

Targets: TypeAlias = Literal["auto", "all-linear", "attention"] | list[str]
REGEX = "re:"
"""Begins a target that is a regular expression over full layer names."""
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
DELTA = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
FUSED = ("qkv_proj", "query_key_value", "c_attn")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", *FUSED, *LATENT, *DELTA)
"""Last names of linear layers of attention, of latent attention and gated delta nets too. `dense` only inside of a module whose
name has attn or attention in it."""
RESIDUAL_INITS = ("pissa", "olora")
"""Starts that move a part of each weight into its adapter and leave the residual in the base."""


class NoAdapter(Section):
    """Train all weights."""

    kind: Literal["none"] = "none"


class _Adapted(Section):
    """Settings that all adapters share."""

    targets: Targets = "auto"
    """Linear layers that get an adapter: all-linear (all but the head), attention, or a list of names and regular expressions
    (re:…) over full names. auto is attention for a model with experts and all-linear for others."""
    start: Place | None = None
    """A folder with an adapter of this kind and shape to start from, in PEFT's layout (a checkpoint of an adapter run is one).
    It must have been made for this base."""

    @model_validator(mode="after")
    def _targets_can_be_read(self) -> Self:
        for target in [] if isinstance(self.targets, str) else self.targets:
            if target.startswith(REGEX):
                try:
                    re.compile(target.removeprefix(REGEX))
                except re.error as error:
                    raise ValueError(f"targets: {target!r} is not a valid regular expression: {error}") from error
        return self


class Lora(_Adapted):
    """Train low-rank adapters by PEFT (LoRA and its relatives); the base is frozen and shared by policy, reference and engine."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank, with rslora by alpha / √rank."""
    expert_rank: int = Field(default=0, ge=0, le=1024)
    """Rank of adapters on the experts of a mixture too, two pairs of matrices for each expert; 0 leaves the experts alone. They
    are scaled by alpha / expert_rank. rank divided by the experts of a token trains about as many numbers for each token as a
    dense model's MLP would."""
    rslora: bool = False
    """Scale by alpha / √rank (rsLoRA, arXiv 2312.03732), so that high ranks learn as fast as low ones."""
    dora: bool = False
    """Train each row's length apart from its direction (DoRA, arXiv 2402.09353). Slower; no fused passes."""
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = "default"
    """Initial adapter. default and gaussian draw A and begin with B = 0; pissa (arXiv 2404.02948) begins with the
    largest singular values of each weight and olora (arXiv 2406.01775) with its QR decomposition, and the base keeps the rest;
    orthogonal draws both factors so that their product is zero."""

    base: Literal["full", "nf4", "mxfp4"] = "full"
    """Form of the frozen weights. nf4 keeps the layers under adapters in 4.25 bits a weight (QLoRA, arXiv 2305.14314): a
    quarter of the memory, a slower, slightly different model, which is the one trained and sampled. mxfp4 keeps the experts of
    an MXFP4 checkpoint (gpt-oss) in four bits, 4.5 with their scales: the same model. Native engine only."""

    merged: bool = False
    """Compute with W + scaling · B·A, rounded to the weights' precision, in training, sampling and evaluation alike, and not with
    the adapter's own products: rollouts take as long as in full training, and vLLM has exactly the learner's weights. In bf16
    changes far below a unit of a weight are kept on average, with more noise than without merging. It takes a second set of the
    adapted weights. Adapters on experts stay apart."""

    @property
    def scaling(self) -> float:
        """The factor on B·A."""
        return self.scaling_of(self.rank)

    def scaling_of(self, rank: int) -> float:
        """Return the factor on B·A for layers of another rank."""
        return self.alpha / (rank**0.5 if self.rslora else rank)

    @property
    def label(self) -> str:
        """Example: "rsLoRA with DoRA, PiSSA start"."""
        name = "rsLoRA" if self.rslora else "LoRA"
        starts = {"pissa": "PiSSA", "olora": "OLoRA", "gaussian": "gaussian", "orthogonal": "orthogonal", "default": ""}
        start = f", {starts[self.init]} start" if starts[self.init] else ""
        packed = "" if self.base == "full" else "Q"
        return f"{packed}{name}{' with DoRA' if self.dora else ''}{start}"

    @model_validator(mode="after")
    def _start_base_and_experts_agree(self) -> Self:
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"init=orthogonal needs an even rank, got {self.rank}")
        plain = self.init in ("default", "gaussian") and not self.dora and self.base != "nf4"
        if self.expert_rank and not plain:
            odd = "dora" if self.dora else "base=nf4" if self.base == "nf4" else f"init={self.init}"
            raise ValueError(
                f"expert_rank: adapters on experts cannot be combined with {odd}; leave one of the two out"
            )
        if self.base == "nf4" and (self.init in RESIDUAL_INITS or self.dora):
            what = "dora" if self.dora else f"init={self.init}"
            raise ValueError(f"{what} is made from weights in full precision; with base=nf4 leave it out")
        if self.merged and (self.base == "nf4" or self.dora):
            raise ValueError(
                f"merged cannot be combined with {'dora' if self.dora else 'base=nf4'}; leave one of the two out"
            )
        return self


class OtherPeft(_Adapted):
    """Train an adapter by another method of PEFT that can be merged into linear layers. Native engine only."""

    kind: Literal["peft"] = "peft"
    method: Literal["ia3", "vera", "oft", "boft", "hra", "loha", "lokr", "miss", "delora", "randlora"]
    """PEFT's name of it. IA3: arXiv 2205.05638, VeRA: 2310.11454, OFT: 2306.07280, BOFT: 2311.06243, HRA: 2405.17484, LoHa:
    2108.06098, LoKr: 2309.14859, MiSS: 2409.15371, DeLoRA: 2503.18225, RandLoRA: 2502.00987."""
    options: dict[str, Json] = Field(default_factory=dict)
    """Settings of PEFT's own config for this method. Example: {r: 8}"""


Adapter: TypeAlias = Annotated[NoAdapter | Lora | OtherPeft, Field(discriminator="kind")]


def keeps_mxfp4(adapter: Adapter) -> bool:
    """Return whether experts stay in MXFP4, as their checkpoint stores them."""
    return isinstance(adapter, Lora) and adapter.base == "mxfp4"


def vllm_refuses(adapter: Adapter) -> str:
    """Return why vLLM, which gets adapters merged into the weights, cannot serve this one; "" if it can."""
    if isinstance(adapter, OtherPeft):
        return f"rollout.engine=vllm serves LoRA and its relatives, not adapter.method={adapter.method}; use native"
    if isinstance(adapter, Lora) and adapter.base != "full":
        return f"rollout.engine=vllm needs merged weights, which adapter.base={adapter.base} does not have; use native"
    return ""


def packed_mistake(adapter: Adapter, numerics: Sequence[str]) -> str:
    """Return why a base in four bits, or merged weights, cannot be quantised; "" if no phase asks for it."""
    asked = next((numeric for numeric in numerics if numeric), "")
    if asked and isinstance(adapter, Lora) and adapter.base == "nf4":
        return (
            f"{asked} quantises linear layers, which adapter.base=nf4 has packed in 4 bits already; set one of the two"
        )
    if asked and isinstance(adapter, Lora) and adapter.merged:
        return f"{asked} quantises the base alone, and adapter.merged has one weight for base and adapter; set one of the two"
    return ""


def adapter_name(adapter: Adapter) -> str:
    """Return the adapter's name for reports. Examples: "full fine-tuning", "LoRA rank 16, merged", "ia3 by PEFT"."""
    match adapter:
        case NoAdapter():
            return "full fine-tuning"
        case Lora():
            experts = f", {adapter.expert_rank} on experts" if adapter.expert_rank else ""
            return f"{adapter.label} rank {adapter.rank}{experts}{', merged' if adapter.merged else ''}"
        case OtherPeft():
            return f"{adapter.method} by PEFT"
        case _:
            assert_never(adapter)
