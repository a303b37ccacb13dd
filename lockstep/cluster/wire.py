"""Messages between the driver and its workers as bytes, and names of the files by which tensors travel.

A message is msgpack, which holds plain values alone and runs nothing when read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

GIVEN, WEIGHTS, PART = "given.safetensors", "weights.safetensors", "part_{rank}.safetensors"
"""Files in the folder of the workers: what the driver gives them, the weights of one, and each one's part of an optimizer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a worker, which it gets with its first message."""

    rank: int
    size: int
    folder: str
    """Folder of the run for logs, stacks and tensors under way."""
    rendezvous: str
    """File, new for each start, through which the ranks find each other."""
    threads: int
    """CPU threads, unless the recipe says how many."""
    samplers: int = 0
    """Workers that only sample; their ranks come after the `size` that train."""


def dumps(value: Any) -> bytes:
    """Return lists, dicts, texts, numbers and bytes as one message. Raises TypeError for anything else."""
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def loads(message: bytes) -> Any:
    """Reverse `dumps`; tuples come back as lists."""
    return msgpack.unpackb(message, unicode_errors="surrogatepass", strict_map_key=False)
