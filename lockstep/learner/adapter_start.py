"""Adapters that are initialised from the base's own weights (PiSSA, OLoRA); the base keeps the residual.

W = residual + scaling · B₀·A₀ with B₀·A₀ the largest singular values of W (PiSSA, arXiv 2404.02948) or the first columns of its
QR decomposition (OLoRA, arXiv 2406.01775). The factors are rounded to the model's precision first, and the residual is the
remainder, so that the model begins as the base except for one rounding. B₀ and A₀ stay in the layer: they are the reference
policy, and with them an adapter is saved in a form that fits the original base: B·A - B₀·A₀ is a LoRA of twice the rank.

The factors are cached by fingerprint of the base, layers, rank and method.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lockstep.config.adapter import Lora
from lockstep.errors import ModelError
from lockstep.learner.top_singular import exact_values, top_singular
from lockstep.models.cache import cache_root, cached_folder
from lockstep.models.weights import clean_name

Method: TypeAlias = Literal["pissa", "olora"]
START_A, START_B = ".lora_start_A", ".lora_start_B"
"""Suffixes of a saved adapter's start among the weights of lockstep.run.state."""
TOLERANCE = 0.01
"""Largest relative error of a singular value, on the layers that are compared with a full decomposition."""
SAMPLED = 2
FILE = "factors.safetensors"


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of one layer, fp32, for scaling 1: up_OR · down_RI."""

    down_RI: Tensor
    up_OR: Tensor


def start_from_weights(model: nn.Module, adapter: Lora, method: Method, fingerprint: str) -> str:
    """Move the start of each LoRA layer of a fresh adapter out of its weight. Returns a line for the log.

    `fingerprint` identifies the original base. Raises ModelError if the singular values are not within 1 % of exact ones.
    """
    begin = time.perf_counter()
    layers = lora_layers(model)
    refuse_small({name: layer.get_base_layer().weight for name, layer in layers.items()}, adapter.rank)
    folder = cache_root() / "adapter_starts" / _key(layers, adapter.rank, method, fingerprint)
    if folder.exists():
        factors, how = _read(cached_folder(folder, lambda fresh: None) / FILE, layers), "from the cache"
    else:
        factors, how = _computed(layers, adapter.rank, method)
        cached_folder(folder, lambda fresh: _write(fresh / FILE, factors))
    for name, layer in layers.items():
        scale = layer.scaling["default"] ** -0.5
        dtype, device = layer.get_base_layer().weight.dtype, layer.get_base_layer().weight.device
        down_RI, up_OR = factors[name].down_RI.to(device), factors[name].up_OR.to(device)
        set_start(layer, (down_RI * scale).to(dtype), (up_OR * scale).to(dtype))
    seconds = time.perf_counter() - begin
    return f"{method} start of {len(layers)} layers in {seconds:.1f} s, {how}"


@torch.no_grad()
def set_start(layer: Any, down_RI: Tensor, up_OR: Tensor) -> None:
    """Set these factors, in the layer's precision, as the start of a layer whose base is the original weight."""
    weight_OI: nn.Parameter = layer.get_base_layer().weight
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    weight_OI.copy_(torch.addmm(weight_OI.to(wide), up_OR.to(wide), down_RI.to(wide), alpha=-layer.scaling["default"]))
    layer.lora_A["default"].weight.copy_(down_RI)
    layer.lora_B["default"].weight.copy_(up_OR)
    layer.lockstep_start = (down_RI.clone(), up_OR.clone())


def start_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return (A₀, B₀) of a layer whose base is a residual; None for any other."""
    start: tuple[Tensor, Tensor] | None = getattr(layer, "lockstep_start", None)
    return start


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the model's LoRA layers by the checkpoint's names."""
    return {clean_name(n): m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")}


def has_residual_base(model: nn.Module) -> bool:
    return any(start_of(layer) is not None for layer in lora_layers(model).values())


def refuse_small(weights: Mapping[str, Tensor], rank: int) -> None:
    """Raise ModelError if a layer's weight has fewer singular values than the rank of an adapter that begins from them."""
    for name, weight in weights.items():
        if rank > (smallest := min(weight.shape)):
            raise ModelError(
                f"rank {rank} is more than the {smallest} singular values of {name}",
                where="adapter.rank",
                fix=f"set adapter.rank to {smallest} or less, or leave that layer out of adapter.targets",
            )


# --- computing ------------------------------------------------------------------------------------------------------
def _computed(layers: Mapping[str, Any], rank: int, method: Method) -> tuple[dict[str, Factors], str]:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, layer in layers.items():
        by_shape.setdefault(tuple(layer.get_base_layer().weight.shape), []).append(name)
    factors: dict[str, Factors] = {}
    values: dict[str, Tensor] = {}
    for names in by_shape.values():
        weights = [layers[name].get_base_layer().weight.detach() for name in names]
        if method == "olora":
            factors |= {name: _by_qr(weight, rank) for name, weight in zip(names, weights, strict=True)}
            continue
        top = top_singular(weights, rank)
        for place, name in enumerate(names):
            factors[name] = Factors(top.down_NRI[place], top.up_NOR[place])
            values[name] = top.values_NR[place]
    if method == "olora":
        return factors, "by QR"
    worst = _check({name: layers[name].get_base_layer().weight.detach() for name in _sampled(by_shape)}, values)
    return factors, f"largest error of a singular value on {SAMPLED} sampled layers {worst:.1e}"


@torch.no_grad()
def _by_qr(weight_OI: Tensor, rank: int) -> Factors:
    q_OS, r_SI = torch.linalg.qr(weight_OI.float())
    return Factors(r_SI[:rank], q_OS[:, :rank])


def _sampled(by_shape: Mapping[tuple[int, ...], Sequence[str]]) -> list[str]:
    """Return one layer of the largest and one of the smallest shape."""
    shapes = sorted(by_shape, key=lambda shape: (shape[0] * shape[1], shape))
    first, last = by_shape[shapes[0]][0], by_shape[shapes[-1]][-1]
    return list(dict.fromkeys([first, last]))


def _check(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> float:
    worst = 0.0
    for name, weight in weights.items():
        exact_R = exact_values(weight, len(values[name]))
        error = float(((values[name].double() - exact_R).abs() / exact_R.clamp_min(1e-12)).max())
        worst = max(worst, error)
        if not error <= TOLERANCE:
            raise ModelError(
                f"a computed singular value is wrong by {error:.1%}, more than {TOLERANCE:.0%}",
                where=name,
                fix="set adapter.init=default, which needs no singular values, and report the model",
            )
    return worst


# --- cache ----------------------------------------------------------------------------------------------------------
def _key(layers: Mapping[str, Any], rank: int, method: Method, fingerprint: str) -> str:
    names = hashlib.sha256("\n".join(sorted(layers)).encode()).hexdigest()[:8]
    return f"{fingerprint}-{method}-r{rank}-{names}"


def _write(path: Path, factors: Mapping[str, Factors]) -> None:
    from safetensors.torch import save_file

    tensors = {f"{name}{START_A}": f.down_RI.contiguous() for name, f in factors.items()}
    tensors |= {f"{name}{START_B}": f.up_OR.contiguous() for name, f in factors.items()}
    save_file(tensors, path)


def _read(path: Path, layers: Mapping[str, Any]) -> dict[str, Factors]:
    from safetensors.torch import load_file

    device = next(iter(layers.values())).get_base_layer().weight.device
    tensors = load_file(path, device=str(device))
    return {name: Factors(tensors[name + START_A], tensors[name + START_B]) for name in layers}
