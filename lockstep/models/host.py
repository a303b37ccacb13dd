"""Moves arrays from main memory to the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`. A GPU copies from pinned memory behind the work that it has queued."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
