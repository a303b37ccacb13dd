"""Main memory that this process may use: the machine's, or less in a control group with a limit, such as a container."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

GROUP = Path("/sys/fs/cgroup")
"""Files of this process's control group."""


class MainMemory(NamedTuple):
    """Bytes."""

    total: float
    free: float


def main_memory() -> MainMemory:
    """Return the main memory of this process; what caches of files hold is free."""
    memory = psutil.virtual_memory()
    total, free = float(memory.total), float(memory.available)
    limit, used = memory_limit(GROUP)
    return MainMemory(total, free) if limit is None or limit >= total else MainMemory(limit, min(free, limit - used))


def memory_limit(root: Path) -> tuple[float | None, float]:
    """Bytes that a control group allows, and those it has used beside cached files, which give way; None without a limit."""
    for folder, limit, used, total in (
        (root, "memory.max", "memory.current", ""),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        text = read_group(folder / limit)
        if text.isdecimal():
            facts = dict(line.split(maxsplit=1) for line in read_group(folder / "memory.stat").splitlines())
            cached = sum(float(facts.get(f"{total}{name}_file", 0)) for name in ("active", "inactive"))
            return float(text), max(0.0, float(read_group(folder / used) or 0) - cached)
    return None, 0.0


def read_group(path: Path) -> str:
    """Return the content of a file of a control group; "" if this system has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
