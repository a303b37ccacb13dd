"""Selects the layers that get an adapter, from `adapter.targets`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.adapter import ATTENTION, REGEX, Targets
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the number of experts of a layer; versions of transformers write one name or another."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Full names of the layers, in the model's order, and lines for the log."""

    layers: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def spelled(self, model: torch.nn.Module) -> list[str]:
        """Return the names as adapter_config.json has them: last parts if these mean the same layers, else full names."""
        last = sorted({name.rsplit(".", 1)[-1] for name in self.layers})
        meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in last}
        return last if meant == set(self.layers) else sorted(self.layers)


def trained_share(trained: int, frozen: int) -> str:
    """Example: "4,884,480 of 139,399,488 parameters are trained (3.50%)"."""
    return f"{trained:,} of {trained + frozen:,} parameters are trained ({trained / (trained + frozen):.2%})"


def choose_targets(model: PreTrainedModel, targets: Targets) -> Chosen:
    """Return the linear layers that `targets` means. Raises ModelError if one matches none, or the head."""
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    experts = experts_of(model)
    notes: tuple[str, ...] = ()
    match targets:
        case "auto" if not experts:
            layers = tuple(linear)
        case "auto" | "attention":
            layers = tuple(name for name in linear if in_attention(name))
            if targets == "auto":
                notes = (
                    f"the model has {experts} experts per layer: of its linear layers those of attention get adapters "
                    "(adapter.targets: auto)",
                )
        case "all-linear":
            layers = tuple(linear)
        case list():
            layers = _named(model, targets, linear)
    if not layers:
        raise ModelError(
            f"{targets} matches no linear layer of {type(model).__name__}",
            where="adapter.targets",
            fix="set adapter.targets to names of linear layers",
        )
    if experts and (outside := [name for name in layers if not in_attention(name)]):
        notes = (
            f"warning: {len(outside)} of the {len(layers)} layers with adapters are outside attention, such as "
            f"{outside[0]}: routing and experts of a mixture shift easily, and each expert sees few tokens",
        )
    return Chosen(layers, notes)


def experts_of(model: PreTrainedModel) -> int:
    """Return the number of experts per layer; 0 for a model without experts."""
    config: Any = model.config.get_text_config()
    return max((int(getattr(config, name, 0) or 0) for name in EXPERTS), default=0)


def in_attention(name: str) -> bool:
    """Return whether a layer belongs to attention, by its full name."""
    *path, last = name.split(".")
    return last in ATTENTION and any("attn" in part or "attention" in part for part in path)


def _named(model: PreTrainedModel, targets: list[str], linear: list[str]) -> tuple[str, ...]:
    modules = [name for name, _ in model.named_modules()]
    wanted: set[str] = set()
    for target in targets or [""]:
        if target.startswith(REGEX):
            matched = [name for name in linear if re.fullmatch(target.removeprefix(REGEX), name)]
        else:
            matched = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matched or set(matched) - set(linear):
            raise _refused(model, target, set(matched), linear)
        wanted.update(matched)
    return tuple(name for name in linear if name in wanted)


def _refused(model: PreTrainedModel, target: str, matched: set[str], linear: list[str]) -> ModelError:
    names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
    head = model.get_output_embeddings()
    if any(module is head for name, module in model.named_modules() if name in matched):
        tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        why = "shares its matrix with the embedding" if tied else "is read as one matrix by the loss"
        return ModelError(
            f"{target!r} is the head, which {why}, so it cannot have an adapter",
            where="adapter.targets",
            fix=f"choose among {names}",
        )
    return ModelError(
        f"{target!r} names no linear layer of {type(model).__name__}",
        where="adapter.targets",
        fix=f"choose among its linear layers: {names}",
    )
