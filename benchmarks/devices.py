"""The device that a benchmark runs on: its name, waiting for it, the memory that was used, and the power that it draws."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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


@contextmanager
def power() -> Iterator[dict[str, float]]:
    """Read what a GPU draws while this runs: at its end there are the means "watts", "most" (the limit) and "mhz" (of the SMs).

    Nothing without a GPU or nvidia-smi.
    """
    import torch

    found: dict[str, float] = {}
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        yield found
        return
    device = f"GPU-{torch.cuda.get_device_properties().uuid}"
    asked = "--query-gpu=power.draw.instant,enforced.power.limit,clocks.sm"
    command = [tool, f"--id={device}", asked, "--format=csv,noheader,nounits", "--loop-ms=100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            lines = process.communicate()[0].split("\n")[:-1]  # what stands behind the last one was cut off
    rows = []
    for line in lines:
        with suppress(ValueError):  # "[N/A]"
            rows.append([float(one) for one in line.split(",")])
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    found.update(zip(("watts", "most", "mhz"), means, strict=False))
