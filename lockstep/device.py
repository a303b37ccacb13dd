"""The device of a process: CPU or GPU, its memory, and waiting for its work. Code for CUDA alone calls torch.cuda itself."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from lockstep.bf16_products import has_bf16_products, speed_up_bf16_products
from lockstep.errors import ConfigError, MachineError
from lockstep.openmp import leave_out_tiles

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
COLLECT_AFTER = 5000
"""New objects after which a run looks for garbage, which might hold memory of a GPU. Python's own number is 700."""
SPARE = 2**30
"""Bytes of a GPU beside what is asked for: to map memory takes some, and so do libraries."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # from glibc's malloc.h


def gpus() -> list[Any]:
    """Return torch's properties of the visible GPUs: name, total_memory (bytes), uuid."""
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def has_gpu() -> bool:
    return torch.cuda.is_available()


@cache
def since_hopper() -> bool:
    """Return whether the GPU of this process is an NVIDIA one of Hopper's or a later generation (compute capability 9.0)."""
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def use_gpu(rank: int, *, alone: bool = False) -> None:
    """Make the GPU of this number the one of this process; `alone`: the only one that it sees, from before CUDA starts.

    Raises MachineError, before others wait, if it cannot compute.
    """
    if alone and not torch.cuda.is_initialized():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    number = 0 if alone else rank
    try:
        torch.ones(1, device=f"cuda:{number}").item()
        torch.cuda.set_device(number)
    except (RuntimeError, AssertionError) as error:  # CUDA's errors, and a torch without CUDA
        what = f"it reports an error before any work: {str(error).splitlines()[0]}"
        raise MachineError(
            what, where=f"GPU {rank}", fix="look at it with nvidia-smi; no process may hold it alone"
        ) from error


def gpu_memory(device: torch.device | None = None) -> tuple[float, float, float]:
    """Return the bytes of a GPU: free, all, and those that torch keeps of it for this process."""
    free, total = torch.cuda.mem_get_info(device)
    return float(free), float(total), float(torch.cuda.memory_reserved(device))


class GpuPeak(NamedTuple):
    """The most bytes of a GPU so far."""

    used: int
    kept: int
    """By torch's allocator, in use or not."""
    total: int
    """All of the GPU."""


def gpu_peak() -> GpuPeak | None:
    """Return that of this process; None if it has used no GPU."""
    if not torch.cuda.is_initialized():
        return None
    return GpuPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), int(gpu_memory()[1]))


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one block of a GPU can have; a CPU, which only interprets kernels, sets no limit."""
    if device.type != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def wait() -> None:
    """Wait until the GPU has done what it was given, if this process has used one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def make_room(needed: int) -> None:
    """Give the GPU what torch has cached if it has not `needed` bytes free, and SPARE: other allocators cannot take it."""
    if torch.cuda.is_initialized() and gpu_memory()[0] < needed + SPARE:
        torch.cuda.empty_cache()


def free_memory() -> None:
    """Give back what nothing refers to any more, to the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def keep_objects(after: int = COLLECT_AFTER) -> Callable[[], None]:
    """Leave all objects that live now out of garbage collections, which from now on come after `after` new objects.

    Returns a function that undoes both.

    To look at the objects of an imported torch, a collection takes longer than a step's own work in Python, and the tuples of a
    batch's tokens are many new objects, none of them garbage.
    """
    before = gc.get_threshold()
    if has_gpu():
        gc.collect()  # garbage would hold its memory
    gc.freeze()
    if before[0]:  # else there are none
        gc.set_threshold(max(after, before[0]), *before[1:])

    def undo() -> None:
        gc.unfreeze()
        gc.set_threshold(*before)

    return undo


def choose_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Choose the device; auto is the GPU if there is one. Raises ConfigError for a missing GPU."""
    if setting == "cuda" and not has_gpu():
        raise ConfigError(["device=cuda: torch finds no GPU on this machine"], fix="use device=auto or device=cpu")
    if setting == "auto":
        setting = "cuda" if has_gpu() else "cpu"
    return torch.device(setting)


def prepare_process(device: torch.device, threads: int | None) -> None:
    """Set the number of threads; on a CPU also deterministic kernels, and freed memory kept for reuse; on a GPU fp32 sums, and no
    convolutions in TF32.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        # A long sum that is split over blocks would otherwise be rounded to bf16 block by block: gradients are such sums.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.allow_tf32 = False  # torch's own default for matrix products, but not for convolutions
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        keep_freed_memory()
        leave_out_tiles(os.environ)
        if not has_bf16_products():
            speed_up_bf16_products()


def allow_repeatable_products(device: torch.device) -> None:
    """Make torch's deterministic algorithms usable on a GPU, which `numerics.exact` needs. For the start of a process.

    torch refuses matrix products then unless a variable of the environment fixes cuBLAS's workspace, which it checks at the first
    product. While the variable is there, every product costs the host several times as much (measured with torch 2.11). So it is
    there for the first product only. The size is the one that a Hopper GPU has anyway.
    """
    if device.type != "cuda" or WORKSPACE in os.environ:
        return
    os.environ[WORKSPACE] = ":4096:8"
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)
    del os.environ[WORKSPACE]
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        torch.mm(one, one)
    except RuntimeError:  # a torch that checks it each time
        os.environ[WORKSPACE] = ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before)


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
