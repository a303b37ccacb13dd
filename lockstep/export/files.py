"""Writes the folder of an export: weights in files of limited size, and the model's config, tokenizer and chat template."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.state import write_tensors
from lockstep.errors import ConfigError, ExportError
from lockstep.models.folder import IMPLEMENTATIONS, INDEX, read_json

if TYPE_CHECKING:
    from torch import Tensor

KEPT = (".json", ".jinja", ".txt", ".model", ".tiktoken")
NOT_OURS = (
    INDEX, "adapter_config.json", "adapter_base.json", "state.json", "COMMIT.json", "manifest.json", "trainer_state.json",
    "lockstep_export.json", "lockstep_import.json",
)  # fmt: skip
"""Index of the weights, and records of other folders."""
SHARD_BYTES = 5 * 10**9
"""Size of transformers' own shards."""
TOKENIZER = ("token", "vocab", "merges", "added_tokens", "special", "chat_template", "spiece", "tekken")
"""Beginnings of the names of a tokenizer's files."""


def new_folder(out: Path) -> Path:
    """Return `out` as an absolute path. Raises ConfigError if it exists already."""
    # A link at this place is not followed.
    out = out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()) or out == Path.cwd())):
        raise ConfigError([f"{out} exists already"], fix="give a folder that does not exist yet")
    return out


@contextmanager
def in_the_making(out: Path, *, replaced: bool = False) -> Iterator[Path]:
    """Give a folder that becomes `out` at the end; after an error nothing is left, and what was to be `replaced` is as it was.

    Raises ConfigError if it cannot be made there, or another process makes it.
    """
    folder = out.with_name(f".{out.name}.partial")
    old = out.with_name(f".{out.name}.old")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError([f"{out} cannot be created: {error}"], fix="give a folder that you may write to") from error
    try:
        with suppress(OSError):  # a network's file system may have no locks of folders
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "wait until it has ended, or give another folder"
                raise ConfigError([f"{out} is being written by another process"], fix=fix) from None
        try:
            for rest in (*folder.iterdir(), old):  # of a process that was killed
                shutil.rmtree(rest) if rest.is_dir() and not rest.is_symlink() else rest.unlink(missing_ok=True)
            yield folder
            if out.exists() and replaced:
                out.rename(old)
            elif out.exists():
                out.rmdir()  # empty: new_folder looked
            folder.rename(out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if old.exists() and not out.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def copy_model_files(source: Path, folder: Path, dtype: str, *, whole: bool, own_code: bool = False) -> list[str]:
    """Copy them; returns the settings of config.json that are not the source's, as "name: old → new".

    `whole`: with config and generation config; else the tokenizer's files alone (an adapter's folder). `own_code`: code that
    comes with a model may be what has run. Python files are never copied. Raises ExportError for a model that ran such code.
    """
    for path in sorted(source.iterdir()):
        name = path.name
        if not path.is_file() or path.suffix not in KEPT or name in NOT_OURS or name == "config.json":
            continue
        if whole or name.startswith(TOKENIZER):
            shutil.copyfile(path, folder / name)
    if not whole:
        return []
    config = read_json(source / "config.json")
    changed = _change(config, dtype, own_code)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return changed


def _change(config: dict[str, Any], dtype: str, own_code: bool) -> list[str]:
    """Change what the written weights require, and nothing else; returns the changes."""
    if "auto_map" in config and own_code:
        raise ExportError(
            "the model comes with Python code of its own, which is not exported",
            where="config.json",
            fix="read that code, then copy the checkpoint's weights into a folder with the code yourself",
        )
    changed = []
    if config.pop("auto_map", None) is not None:
        changed.append("auto_map: removed, the model ran with transformers' own class")
    name = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    if config.get(name) != dtype:
        changed.append(f"{name}: {config.get(name)} → {dtype}")
        config[name] = dtype
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in IMPLEMENTATIONS:
            if part.pop(name, None) is not None:
                changed.append(f"{name}: removed, it is a setting of the machine that wrote it")
    if config.pop("quantization_config", None) is not None:
        changed.append("quantization_config: removed, the weights are plain")
    return changed


def write_sharded(folder: Path, weights: Mapping[str, Tensor], limit: int = SHARD_BYTES) -> int:
    """Write weights into files of at most `limit` bytes (a larger tensor has one of its own); returns the bytes of all tensors.

    One file is named model.safetensors; several are model-00001-of-00002.safetensors and so on, with their index.
    """
    from huggingface_hub import split_state_dict_into_shards_factory as split

    plan = split(
        dict(weights),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for file, names in plan.filename_to_tensors.items():
        write_tensors(folder / file, {name: weights[name] for name in names})
        (folder / file).chmod(0o644)  # safetensors makes files for their owner alone
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return int(plan.metadata["total_size"])


def tensor_names(folder: Path) -> set[str]:
    """Return the names in the safetensors files of a folder's model."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names
