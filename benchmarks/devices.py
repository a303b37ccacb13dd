"""The device that a benchmark runs on: its name, waiting for it, and the memory that was used."""

from __future__ import annotations

import resource


def device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> float:
    """GiB: of a GPU the most that torch had reserved and what the process has besides; of a CPU the most that was resident."""
    import torch

    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return float(torch.cuda.max_memory_reserved() + outside) / 2**30
