"""The folder of an export, and what stands there beside weights: the model's own config, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, ExportError
from lockstep.models.folder import IMPLEMENTATIONS, INDEX, read_json

KEPT = (".json", ".jinja", ".txt", ".model", ".tiktoken")
NOT_OURS = (
    INDEX, "adapter_config.json", "adapter_base.json", "state.json", "COMMIT.json", "manifest.json", "trainer_state.json",
    "lockstep_export.json", "lockstep_import.json",
)  # fmt: skip
"""Weights' index and other folders' records."""
TOKENIZER = ("token", "vocab", "merges", "special", "chat_template", "spiece", "tekken")
"""Beginnings of the names of a tokenizer's files."""


def new_folder(out: Path) -> Path:
    """`out` with a name of its own. Raises ConfigError if something is there already."""
    # A link that stands at this very place is not followed.
    out = out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()) or out == Path.cwd())):
        raise ConfigError([f"{out} is there already"], fix="name a new folder")
    return out


@contextmanager
def in_the_making(out: Path) -> Iterator[Path]:
    """A folder beside `out`, which is `out` afterwards; after an error nothing is left.

    Raises ConfigError if it cannot be made there.
    """
    folder = out.with_name(f".{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError([f"{out} cannot be made: {error}"], fix="name a place that can be written") from error
    try:
        yield folder
        if out.exists():
            out.rmdir()  # empty: new_folder looked
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    """What the written weights make necessary, and nothing else."""
    if "auto_map" in config and own_code:
        raise ExportError(
            "the model comes with Python code of its own, which is not exported",
            where="config.json",
            fix="copy the checkpoint's weights beside that code by hand, once you have read it",
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
