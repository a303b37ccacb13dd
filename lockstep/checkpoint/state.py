"""The tensors of a checkpoint, in safetensors files that other programs read too.

Full training gives a folder that transformers loads (model.safetensors, config, tokenizer), an adapter one that PEFT and
vLLM load (adapter_model.safetensors, adapter_config.json). Only Lockstep reads optimizer.safetensors and state.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from lockstep.checkpoint.manifest import COMMIT, SUFFIXES
from lockstep.checkpoint.store import STATE, CheckpointInfo, save
from lockstep.config.schema import Json
from lockstep.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WeightsFile: TypeAlias = Literal["model.safetensors", "adapter_model.safetensors"]
WEIGHTS_FILES: tuple[WeightsFile, ...] = ("model.safetensors", "adapter_model.safetensors")
OPTIMIZER = "optimizer.safetensors"
HEADERS = 1 << 20
"""Bytes reserved for headers and small files in the estimate of a checkpoint's size."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything that a run resumes from. The learner defines the tensor names."""

    step: int
    weights: Mapping[str, Tensor]
    """Weights in the layout of their file: Hugging Face's, or PEFT's for an adapter."""
    optimizer: Mapping[str, Tensor]
    meta: Mapping[str, Json] = field(default_factory=dict)
    """Versions, data position, recipe hash, weights fingerprint: numbers and texts."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for group in (self.weights, self.optimizer) for tensor in group.values())


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files beside the weights, so that other programs can load the folder.

    Example: ModelFiles("adapter_model.safetensors", texts={"adapter_config.json": "{…}"})
    """

    weights: WeightsFile = "model.safetensors"
    texts: Mapping[str, str] = field(default_factory=dict)
    """File name → content, for instance config.json."""
    copy_from: Path | None = None
    """Model folder whose config, tokenizer and chat template are copied; its weights and code are not."""


def save_state(run_dir: Path, state: CheckpointState, files: ModelFiles, *, overwrite: bool = False) -> Path:
    """Save `state` as a checkpoint of the run; see store.save. Raises CheckpointError."""
    return save(
        run_dir,
        state.step,
        partial(write_files, state=state, files=files),
        state.meta,
        bytes_needed=state.bytes + HEADERS,
        overwrite=overwrite,
    )


def read_state(info: CheckpointInfo) -> CheckpointState:
    """Return the tensors, on the CPU, of a checkpoint that open_checkpoint verified. Raises CorruptCheckpointError."""
    present = [name for name in WEIGHTS_FILES if (info.path / name).is_file()]
    if len(present) != 1:
        raise CorruptCheckpointError(
            f"expected one file of weights ({' or '.join(WEIGHTS_FILES)}), found {len(present)}",
            where=str(info.path),
            fix="restore this checkpoint from a copy, or choose another",
        )
    return CheckpointState(
        info.step, read_tensors(info.path / present[0]), read_tensors(info.path / OPTIMIZER), info.meta
    )


def write_files(folder: Path, state: CheckpointState, files: ModelFiles) -> None:
    """Write weights, optimizer state and the files beside them into `folder`. Raises CheckpointError, OSError."""
    if files.copy_from is not None:
        _copy_beside(files.copy_from, folder)
    for name, content in files.texts.items():
        (folder / name).write_text(content, encoding="utf-8")
    write_tensors(folder / files.weights, state.weights)
    write_tensors(folder / OPTIMIZER, state.optimizer)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; the same tensors give the same bytes. Raises CheckpointError for aliases or a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        # Transformers asks for the format; more keys would be shuffled.
        save_file(dense, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"cannot be written: {error}", where=str(path), fix="free space, then resume") from error
    except RuntimeError as error:  # safetensors raises this for aliases; it names them
        reason = " ".join(str(error).split())
        raise CheckpointError(reason, where=str(path), fix="save tied weights once, under one name") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, on the CPU. Raises CorruptCheckpointError for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{path.name}: cannot be read ({error})", where=str(path.parent)) from error


def take_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors as `read_tensors`, and delete the file: a tensor in memory keeps what it needs of it."""
    tensors = read_tensors(path)
    path.unlink()
    return tensors


def files_beside(source: Path) -> list[Path]:
    """Return configuration, tokenizer and templates of a model folder, which a checkpoint of full weights copies: no weights, no
    code, no subfolders.
    """
    # The folder may be a checkpoint itself; a run is known by its manifest.json.
    ours = (COMMIT, STATE, "manifest.json")
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file() and path.suffix in SUFFIXES - {".safetensors"} and path.name not in ours
        if not path.name.endswith(".index.json")
    ]


def _copy_beside(source: Path, folder: Path) -> None:
    copied = files_beside(source)
    if "config.json" not in {path.name for path in copied}:
        raise CheckpointError(
            "the folder has no config.json", where=str(source), fix="give the folder of the model's files"
        )
    for path in copied:
        if path.name == "config.json":
            (folder / path.name).write_text(_plain_config(path), encoding="utf-8")
        else:
            shutil.copyfile(path, folder / path.name)


def _plain_config(path: Path) -> str:
    """Return a model's config.json without mention of quantised weights: the weights saved beside it are not quantised."""
    text = path.read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the file is not JSON: {error}", where=str(path), fix="correct the file, or fetch the model again"
        ) from error
    if "quantization_config" not in config:
        return text
    del config["quantization_config"]
    return json.dumps(config, indent=2) + "\n"
