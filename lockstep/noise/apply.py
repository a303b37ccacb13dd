"""Adds noise to the normalisation weights of a model in memory, and restores the clean weights to the bit.

"Norm" means a normalisation layer here. Noise is written in place, because fused kernels and captured graphs read weights at
fixed addresses. The learner may use the same memory (native engine, vLLM with shared weights). So code that trains, saves or
proves weights calls `require_clean` first, which raises an error while noise is applied.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import EngineError
from lockstep.models.weights import named_weights
from lockstep.seeds import seed_for
from lockstep.types import NormNoise, WeightStream

ZERO_CENTRED = ("Gemma", "Qwen3Next", "Qwen3_5", "NemotronLayerNorm1P", "MiniMaxM3")
"""Prefixes of the names of norm classes that multiply by 1 + w. Noise is added to w, which has the same effect; its size is
relative to ‖1 + w‖.
"""
NOT_CENTRED = ("Gemma3n", "Gemma4")

_NOISY: set[tuple[str, int]] = set()
"""Device and address of the tensors of this process that hold noise now."""


class Outcome(NamedTuple):
    """Result of `NoisyNorms.set`."""

    norms: int
    """Number of norms with noise."""
    share: float
    """‖w' - w‖ / ‖w‖ over all of them, measured in the weights after rounding to their dtype."""


_Held: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Weights with noise by name: the live tensor, and its clean copy."""


class NoisyNorms:
    """The normalisation weights of one model, with or without noise."""

    def __init__(self, model: nn.Module, read: Callable[[nn.Module], WeightStream] = named_weights) -> None:
        """Take the model. `read` yields its live tensors under the checkpoint's names."""
        self._model, self._read = model, read
        self._held: _Held = {}
        # If this object is dropped with noise on, the weights are still cleaned and no address stays marked.
        weakref.finalize(self, _restore, self._held).atexit = False
        self.lost = 0.0
        """Share of the numbers that rounding to the weights' dtype left unchanged."""

    def set(self, noise: NormNoise | None) -> Outcome:
        """Remove earlier noise, to the bit, and apply `noise`; None leaves the weights clean.

        Raises EngineError, with clean weights, if a target is missing, is not a vector of floats, or holds another engine's
        noise.
        """
        _restore(self._held)
        self.lost = 0.0
        if noise is None:
            return Outcome(0, 0.0)
        found = self._find(noise)
        offsets = _offsets(self._model)
        moved = total = 0.0
        same = count = 0
        with torch.no_grad():
            for name, scale in zip(noise.targets, noise.scales, strict=True):
                live = found[name]
                clean = live.detach().clone()
                self._held[name] = live, clean
                _NOISY.add(_place(live))
                z = noise_vector(noise.seed, name, clean.numel()).to(live.device)
                live.copy_(clean.float() + noise.sigma * scale * z)  # in fp32, rounded once
                effective = clean.double() + offsets.get(live.data_ptr(), 0.0)
                step = live.double() - clean.double()
                moved += float(step.square().sum())
                total += float(effective.square().sum())
                same += int((step == 0).sum())
                count += step.numel()
        self.lost = same / count
        return Outcome(len(self._held), math.sqrt(moved / total) if total else math.inf)

    def _find(self, noise: NormNoise) -> dict[str, Tensor]:
        weights = dict(self._read(self._model))
        if not noise.targets or len(set(noise.targets)) < len(noise.targets):
            raise EngineError(
                "the list of normalisation weights is empty, or names one twice",
                where="noise.targets",
                fix="list each normalisation weight once",
            )
        for name in noise.targets:
            live = weights.get(name)
            if live is None:
                near = [other for other in weights if "norm" in other]
                raise EngineError(
                    f"noise needs a weight of this name, but there is none; {len(near)} weights have norm in their names"
                    + (f", such as {near[0]}" if near else ""),
                    where=name,
                    fix="choose norms that the engine knows in noise.targets, or remove the noise section",
                )
            if live.dim() != 1 or not live.is_floating_point():
                raise EngineError(
                    f"the tensor of shape {tuple(live.shape)} and type {live.dtype} is not the weight of a normalisation layer",
                    where=name,
                    fix="list only normalisation weights in noise.targets",
                )
            if _place(live) in _NOISY:
                raise EngineError(
                    "the noise of another engine is applied to this weight",
                    where=name,
                    fix="remove that engine's noise first (engine.set_forward)",
                )
        return weights


def _restore(held: _Held) -> None:
    with torch.no_grad():
        for live, clean in held.values():
            live.copy_(clean)
            _NOISY.discard(_place(live))
    held.clear()


def noise_vector(seed: int, name: str, size: int) -> Tensor:
    """Return standard normal numbers, fp32 on the CPU, from (seed, name) alone: Philox (Salmon et al., SC 2011) under their
    hash.
    """
    generator = np.random.Generator(np.random.Philox(key=seed_for(seed, "norm noise", name)))
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))


def is_noisy(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of these tensors holds noise now."""
    return bool(_NOISY) and any(_place(tensor) in _NOISY for tensor in tensors)


def require_clean(model: nn.Module, what: str) -> None:
    """Raise EngineError if a weight of the model holds noise: `what` must see the weights as they were trained."""
    if is_noisy(model.parameters()):
        raise EngineError(
            f"{what} was requested while the engine's noise is applied to the normalisation weights",
            where="noise",
            fix="set the engine's noise to none first (engine.set_forward)",
        )


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()


def _offsets(model: nn.Module) -> dict[int, float]:
    """Return 1 for the address of each norm weight w of a norm that multiplies by 1 + w."""
    return {
        weight.data_ptr(): 1.0
        for module in model.modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and zero_centred(module)
    }


def zero_centred(norm: nn.Module) -> bool:
    """Return whether a norm multiplies by 1 plus its stored weight."""
    kind = type(norm).__name__
    return "Norm" in kind and kind.startswith(ZERO_CENTRED) and not kind.startswith(NOT_CENTRED)
