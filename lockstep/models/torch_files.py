"""Reads the shards of other trainers, which are files of torch.save. Nothing else in Lockstep reads or writes such files.

A file of torch.save is a pickle, which could name any function to call. `torch.load(weights_only=True)` has its own
interpreter, which builds only tensors, containers, numbers and objects of listed classes: those of torch's own list, and the
classes of sharded tensors below. Anything else is refused by name, before it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a tensor."""

    local: Tensor
    shape: tuple[int, ...] | None
    """Shape of the whole tensor; None where the file does not say."""
    dim: int | None
    """Dimension along which it was cut; None if every rank has all of it."""


def load_torch_file(path: Path) -> dict[str, Any]:
    """Load a mapping of tensors, on the CPU. Raises CheckpointError for anything that is not plain data."""
    try:
        with torch.serialization.safe_globals(_allowed()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        raise _refused(path, error) from error
    except Exception as error:  # pickle.UnpicklingError, which cannot be named without importing pickle
        if type(error).__name__ != "UnpicklingError":
            raise
        raise _refused(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(
            f"the file holds a {type(content).__name__}, not tensors by name",
            where=str(path),
            fix="give a file that holds a state dict",
        )
    return content


def _allowed() -> list[Any]:
    """Return the classes in FSDP's sharded state dicts. Their constructors set fields; none opens, imports or runs anything."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return [DTensor, DeviceMesh, DTensorSpec, TensorMeta, Shard, Replicate, Partial]


def joined(files: Sequence[Path]) -> dict[str, Tensor]:
    """Join the tensors of a state dict that was saved by rank. Raises CheckpointError for ranks that do not fit together."""
    ranks = [{name: _piece(name, value, path) for name, value in load_torch_file(path).items()} for path in files]
    names = ranks[0].keys()
    for path, rank in zip(files, ranks, strict=True):
        if odd := sorted(rank.keys() ^ names):
            raise CheckpointError(
                f"only one of the files {path.name} and {files[0].name} has {odd[0]}",
                where=str(path.parent),
                fix="copy the whole folder again",
            )
    return {name: _join(name, [rank[name] for rank in ranks], files[0].parent) for name in names}


def _piece(name: str, value: Any, path: Path) -> Piece:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        # A mesh of (ddp, fsdp) replicates along its first axis; verl saves the ranks of one replica under the lowest numbers.
        cuts = [p for p in value.placements if not p.is_replicate()]
        if len(cuts) > 1 or any(not p.is_shard() for p in cuts):
            raise CheckpointError(
                f"{name} is split in an unsupported way: {value.placements}",
                where=str(path),
                fix="save the checkpoint with FSDP alone",
            )
        dim = getattr(cuts[0], "dim", None) if cuts else None
        return Piece(value._local_tensor, tuple(value.shape), dim)
    if isinstance(value, Tensor):
        return Piece(value, None, None)
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, not a tensor", where=str(path), fix="give a file that holds a state dict"
    )


def _join(name: str, pieces: Sequence[Piece], where: Path) -> Tensor:
    first = pieces[0]
    if any((p.shape, p.dim) != (first.shape, first.dim) for p in pieces):
        raise CheckpointError(
            f"the files of the ranks disagree on the shape or split of {name}",
            where=str(where),
            fix="copy the whole folder again",
        )
    if first.dim is None:
        if any(not torch.equal(p.local, first.local) for p in pieces[1:]):
            raise CheckpointError(
                f"the files of the ranks hold different {name}, without saying how it was split", where=str(where)
            )
        return first.local.clone()
    assert first.shape is not None
    whole, size = [], 0
    for piece in pieces:  # of several replicas the first that is complete
        if size < first.shape[first.dim]:
            whole.append(piece.local)
            size += piece.local.shape[first.dim] if piece.local.dim() > first.dim else 0
    tensor = torch.cat([part for part in whole if part.numel() or part.dim() == len(first.shape)], first.dim)
    if tuple(tensor.shape) != first.shape:
        raise CheckpointError(
            f"the parts of {name} make the shape {tuple(tensor.shape)}, not {first.shape}",
            where=str(where),
            fix="copy the whole folder again",
        )
    return tensor


def module_states(path: Path) -> Mapping[str, Tensor]:
    """Return the whole module of DeepSpeed's mp_rank_00_model_states.pt (ZeRO 0 to 2). Raises CheckpointError without one."""
    content = load_torch_file(path)
    module: Any = content.get("module")
    is_whole = isinstance(module, dict) and module
    if not is_whole or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in module.items()):
        raise CheckpointError(
            "the file holds only part of the model",
            where=str(path),
            fix="if the run used ZeRO 3, run zero_to_fp32.py from the same folder, then import its result",
        )
    weights: dict[str, Tensor] = module
    return weights


def _refused(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    named = reason.partition("GLOBAL ")[2].split(" ")[0]
    what = f"it refers to {named}, which is not plain data" if named else reason[:200]
    return CheckpointError(
        f"the file cannot be read as tensors: {what}",
        where=str(path),
        fix="if you trust it, convert it with the program that wrote it (verl: python -m verl.model_merger merge)",
    )
