"""Utilisation of processors and GPUs during a step. A thread reads each GPU's usage from its driver every second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean

import psutil

from lockstep.types import Metrics

EVERY_S = 1.0
Reading = tuple[float, float]
"""Share of the time in which a GPU was computing, and share of its memory in use."""


class Utilisation:
    """Collects readings; `step` returns the metrics since its last call. `read` returns a reading of each GPU in use."""

    def __init__(self, read: Callable[[], Sequence[Reading]] | None) -> None:
        self._read = read
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._began, self._cpu = self._used = time.monotonic(), _cpu_seconds()
        if read is not None:
            threading.Thread(target=self._watch, name="utilisation", daemon=True).start()

    def step(self) -> Metrics:
        """Return shares of the time since the last call."""
        now, cpu = (time.monotonic(), _cpu_seconds()) if self._read is None else self._used
        wall = (now - self._began) * len(os.sched_getaffinity(0))
        found: Metrics = {"cpu/utilisation": min(1.0, max(0.0, cpu - self._cpu) / wall)} if wall > 0 else {}
        self._began, self._cpu = now, cpu
        readings, self._readings = self._readings, []
        if readings:
            found["gpu/utilisation"] = fmean(busy for busy, _ in readings)
            found["gpu/memory_share"] = max(memory for _, memory in readings)
            found["gpu/seen"] = float(len(readings))
        return found

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while self._read is not None and not self._over.wait(EVERY_S):
            with suppress(Exception):  # a driver that does not answer ends no run; its readings are absent
                self._used = time.monotonic(), _cpu_seconds()
                found = self._read()  # a step may end meanwhile, and begin another list
                self._readings.extend(found)


def gpu_reader() -> Callable[[], Sequence[Reading]] | None:
    """Return a function that reads the visible GPUs; None without a GPU or without nvidia-ml-py."""
    from lockstep.device import gpus

    if not (found := gpus()):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}") for gpu in found]
    except Exception:  # not installed, or a driver without it
        return None

    def read() -> list[Reading]:
        found = []
        for handle in handles:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append((pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, memory.used / memory.total))
        return found

    return read


def _cpu_seconds() -> float:
    """Return the processor time of this process, its living children and those that it waited for."""
    own = psutil.Process().cpu_times()
    total = float(own.user + own.system + own.children_user + own.children_system)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total
