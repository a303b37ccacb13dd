"""Selects the norms that get noise, by the names of their weights in the checkpoint.

The noise stands for the rounding of quantised linear layers: on the weight of an RMSNorm it is noise on the input channels of
the matrices behind it (q, k and v share one vector, gate and up another). `all` therefore means the norms of a layer whose
output goes straight into such matrices: the one before attention and the one before the MLP. It leaves out norms whose output
goes into the residual stream (Gemma's and OLMo's post-norms), norms of queries and keys (Qwen3, Gemma 3), the last norm (the
head behind it is never quantised), and norms whose output also chooses experts: a router's input stays clean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.config.schema import Noise
from lockstep.errors import ConfigError, ModelError
from lockstep.models.weights import clean_name

BEFORE_ATTENTION = "input_layernorm"
BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm")
"""Names of the norm before the MLP, in this order: if a layer has the first, the second is a post-norm (Gemma 2 and 3)."""
ROUTERS = frozenset({"gate", "router"})
"""Last parts of the names of modules that choose experts; the gate of a plain MLP is called gate_proj."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The norms that get noise."""

    names: tuple[str, ...]
    """Names of the norms' weights, as in `weights()`, sorted."""
    scales: tuple[float, ...]
    """Factor on sigma for each norm."""
    notes: tuple[str, ...] = ()
    """Remarks about the choice for the user."""


@dataclass(frozen=True, slots=True)
class _Norm:
    name: str
    before_mlp: bool
    routes: bool


def find_targets(model: nn.Module, noise: Noise) -> Targets:
    """Choose the norms of a transformers model, with or without adapters.

    Raises ModelError if none is chosen, ConfigError for a pattern of noise.targets or noise.layer_scale that fits no norm.
    """
    notes: list[str] = []
    if isinstance(noise.targets, list):
        names = _by_patterns(norm_names(model), noise.targets)
    else:
        names, notes = _by_role(list(_feeding(model)), only_before_mlp=noise.targets == "post_attention")
    if not names:
        raise ModelError(
            f"noise.targets={noise.targets} finds no norm that feeds linear layers among {len(norm_names(model))} norms",
            where=type(model).__name__,
            fix="choose norms by regular expressions in noise.targets, or remove the noise section",
        )
    scales = _scales(names, noise.layer_scale)
    kept = [(name, scale) for name, scale in zip(names, scales, strict=True) if scale > 0]
    if not kept:
        raise ConfigError(
            ["noise.layer_scale is 0 for every norm: there would be no noise"], fix="remove the noise section"
        )
    return Targets(tuple(name for name, _ in kept), tuple(scale for _, scale in kept), tuple(notes))


def norm_names(model: nn.Module) -> tuple[str, ...]:
    """Return the weights of all normalisation layers, sorted: modules of a class …Norm… with a vector `weight`."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 1:
            found.append(clean_name(f"{name}.weight"))
    return tuple(sorted(found))


def _feeding(model: nn.Module) -> Iterator[_Norm]:
    """Yield the norms of each layer that feed linear layers."""
    norms = set(norm_names(model))
    for name, module in model.named_modules():
        children: Mapping[str, Any] = dict(module.named_children())
        first, second = children.get(BEFORE_ATTENTION), next((c for c in BEFORE_MLP if c in children), None)
        if first is None:
            continue
        routes = any(inner.rpartition(".")[2] in ROUTERS for inner, _ in module.named_modules())
        if (own := clean_name(f"{name}.{BEFORE_ATTENTION}.weight")) in norms:
            # Without a second norm, attention and MLP both read the first one's output (Phi, Cohere).
            yield _Norm(own, before_mlp=False, routes=routes and second is None)
        if second is not None and (own := clean_name(f"{name}.{second}.weight")) in norms:
            yield _Norm(own, before_mlp=True, routes=routes)


def _by_role(norms: Sequence[_Norm], *, only_before_mlp: bool) -> tuple[list[str], list[str]]:
    routing = [norm.name for norm in norms if norm.routes]
    if only_before_mlp:
        chosen = [norm.name for norm in norms if norm.before_mlp]
        note = (
            f"noise also reaches the routers behind {len(routing)} norms, because noise.targets asks for them by role"
        )
    else:
        chosen = [norm.name for norm in norms if not norm.routes]
        note = f"{len(routing)} norms get no noise because routers read them: experts are chosen from a clean input"
    return sorted(chosen), [note] if routing else []


def _by_patterns(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if re.search(pattern, name)]
        if not found:
            raise _fits_nothing("noise.targets", pattern, names)
        chosen.update(found)
    return sorted(chosen)


def _scales(names: Sequence[str], layer_scale: Mapping[str, float]) -> list[float]:
    """Return the scale of each norm. A whole name wins over patterns; at most one pattern may fit a name."""
    for pattern in layer_scale:
        if not any(_is_whole(pattern, name) or re.search(pattern, name) for name in names):
            raise _fits_nothing("noise.layer_scale", pattern, names)
    return [_scale(name, layer_scale) for name in names]


def _scale(name: str, layer_scale: Mapping[str, float]) -> float:
    whole = [factor for key, factor in layer_scale.items() if _is_whole(key, name)]
    if whole:
        return whole[0]
    found = {key: factor for key, factor in layer_scale.items() if re.search(key, name)}
    if len(set(found.values())) > 1:
        text = " and ".join(f"{key!r} ({factor:g})" for key, factor in found.items())
        raise ConfigError([f"noise.layer_scale: {text} both match {name}"], fix="write patterns that do not overlap")
    return next(iter(found.values()), 1.0)


def _is_whole(key: str, name: str) -> bool:
    return key in (name, name.removesuffix(".weight"))


def _fits_nothing(setting: str, pattern: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        [
            f"{setting}: {pattern!r} matches none of the {len(names)} norms; the first norm is {min(names, default='none')}"
        ],
        fix=f"correct the pattern in {setting}",
    )
