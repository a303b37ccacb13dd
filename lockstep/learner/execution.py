"""Chooses how an update runs on its device: settings that change memory and time, but not the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from lockstep.config.schema import Update

Recompute: TypeAlias = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Execution:
    """Choices of the memory plan for settings that the recipe leaves open."""

    tokens_per_microbatch: int
    recompute: Recompute


BY_DEVICE = {"cpu": Execution(8192, "none"), "cuda": Execution(16384, "selective")}
"""Defaults without a plan. 16384 tokens of a 1.5B model are some 22 GiB of activations."""


def execution_of(update: Update, device: torch.device, plan: Execution | None = None) -> Execution:
    """Combine the recipe's own choices, then the plan's, then those of the device."""
    open_ = plan or BY_DEVICE.get(device.type, BY_DEVICE["cuda"])
    return Execution(
        update.tokens_per_microbatch or open_.tokens_per_microbatch,
        open_.recompute if update.recompute == "auto" else update.recompute,
    )
