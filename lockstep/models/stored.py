"""Reads which tensors a folder's weight files hold, from their headers alone. Does not import torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.folder import weight_files
from lockstep.models.mxfp4 import BLOCKS, SCALES


def stored_parameters(folder: Path) -> int | None:
    """Return the number of elements in a folder's safetensors files, from their headers alone; None without such files."""
    stored = stored_tensors(folder)
    return None if stored is None else sum(stored.values())


def stored_tensors(folder: Path) -> dict[str, int] | None:
    """Return the number of elements of each tensor in a folder's safetensors files; None without such files."""
    names = weight_files(folder)
    if not all((folder / name).is_file() for name in names):
        return None
    return {tensor: count for name in names for tensor, count in _elements(folder / name).items()}


def _elements(path: Path) -> dict[str, int]:
    """Return the elements of each tensor in one safetensors file: eight bytes of length, then JSON (as the format says)."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = file.read(min(length, path.stat().st_size))
    try:
        tensors = {name: entry for name, entry in dict(json.loads(header)).items() if name != "__metadata__"}
        counts = {name: _numbers(name, entry) for name, entry in tensors.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ModelError(
            f"the header of the weight file cannot be read, perhaps because the file is cut off: {error}",
            where=str(path),
            fix="fetch the model again",
        ) from error
    if end > (size := path.stat().st_size):
        raise ModelError(
            f"the weight file is cut off: it has {size:,} of {end:,} bytes",
            where=str(path),
            fix="fetch the model again",
        )
    if quantised := [name for name, entry in tensors.items() if _is_quantised(name, str(entry.get("dtype")))]:
        raise ModelError(
            f"{quantised[0]} is stored as {tensors[quantised[0]]['dtype']}, which means nothing without its scales; "
            "only bf16, fp16, fp32 and mxfp4 weights can be read",
            where=str(path),
            fix="use the unquantised version of this model, or dequantise it into a folder and use that",
        )
    return counts


def _is_quantised(name: str, dtype: str) -> bool:
    """Return whether a tensor is a quantised weight; masks and positions, which some files hold, are whole numbers, too."""
    return dtype.startswith("F8") or (name.endswith("weight") and dtype in ("I8", "U8", "I32"))


def _numbers(name: str, entry: Mapping[str, Any]) -> int:
    """Return the parameters in one stored tensor: MXFP4 packs two into a byte, and its scales do not count."""
    return weights_of(name, math.prod(entry["shape"]), packed=entry.get("dtype") == "U8")


def weights_of(name: str, count: int, *, packed: bool) -> int:
    """Return the parameters that `count` numbers of a tensor are, which are bytes if it is `packed`."""
    if packed and name.endswith((BLOCKS, SCALES)):
        return 2 * count if name.endswith(BLOCKS) else 0
    return count
