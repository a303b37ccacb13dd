"""Tensors as safetensors files of limited size with the index that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from lockstep.checkpoint.state import write_tensors
from lockstep.models.folder import INDEX

SHARD_BYTES = 5 * 10**9
"""As large as transformers makes them."""
WHOLE = "model.safetensors"


def write_sharded(folder: Path, stream: Iterable[tuple[str, Tensor]], limit: int = SHARD_BYTES) -> int:
    """Write a stream into files of at most `limit` bytes (a larger tensor has one of its own); returns the bytes of all tensors.

    One file is named model.safetensors; several are model-00001-of-00002.safetensors and so on, with their index.
    """
    parts: list[list[str]] = []
    kept: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        write_tensors(_temporary(folder, len(parts)), kept)
        parts.append(list(kept))
        kept.clear()

    for name, tensor in stream:
        if kept and sum(t.nbytes for t in kept.values()) + tensor.nbytes > limit:
            flush()
        kept[name] = tensor
        total += tensor.nbytes
    if kept:
        flush()
    if len(parts) == 1:
        _named(folder, 0, WHOLE)
        return total
    files = [f"model-{place + 1:05d}-of-{len(parts):05d}.safetensors" for place in range(len(parts))]
    for place, file in enumerate(files):
        _named(folder, place, file)
    weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def tensor_names(folder: Path) -> set[str]:
    """Names in the safetensors files of a folder's model."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _named(folder: Path, place: int, name: str) -> None:
    """Give a part its name, readable for others: safetensors makes files for their owner alone."""
    path = _temporary(folder, place).rename(folder / name)
    path.chmod(0o644)


def _temporary(folder: Path, place: int) -> Path:
    return folder / f".part-{place:05d}.safetensors"
