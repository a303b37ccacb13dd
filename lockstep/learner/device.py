"""Choosing the device and setting the process up for it."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Literal

import torch

from lockstep.errors import ConfigError

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # from glibc's malloc.h


def choose_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Choose the device; auto is the GPU if there is one. Raises ConfigError for a missing GPU."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["device = 'cuda': torch sees no GPU on this machine"], fix="use device=auto or device=cpu")
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(setting)


def prepare_process(device: torch.device, threads: int | None) -> None:
    """Set the number of threads; on a CPU also deterministic kernels, and freed memory kept for reuse; on a GPU fp32 sums."""
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        # A long sum that is split over blocks would otherwise be rounded to bf16 block by block: gradients are such sums.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # torch asks for it before updates with a fixed order of sums (numerics.exact); it is Hopper's default size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks: otherwise each new tensor costs page faults for its whole size."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library: this call does not apply
        return
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 * 2**20), (_M_ARENA_MAX, 1)):
        libc.mallopt(option, value)
