"""An exported folder as one GGUF file, and what reading that file gives back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from lockstep.errors import ExportError
from lockstep.export.check import Request
from lockstep.export.verify import Expected
from lockstep.models.convert import convert_gguf
from lockstep.models.folder import read_json
from lockstep.models.gguf_writer import folder_tensors, write_gguf
from lockstep.sync.fingerprint import fingerprint

FILE = "model.gguf"
BOUNDARIES = ("bos_token", "eos_token", "pad_token")


def into_gguf(folder: Path, back: Path, expected: Expected, request: Request) -> tuple[Expected, Request]:
    """Replace the model in `folder` by FILE; the empty `back` becomes the plain model that our reader makes of it, in fp32.

    Returns what `back` must be, and what is to be looked at. Raises ModelError for a model or tokenizer that the format cannot
    say, ExportError if a special token did not come back.
    """
    wide = fingerprint((name, tensor.float()) for name, tensor in folder_tensors(folder)).combined
    write_gguf(folder, folder / FILE)
    convert_gguf(folder / FILE, back)
    _require_boundaries(folder, back)
    for path in folder.iterdir():
        if path.name != FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return replace(expected, dtype="float32", fingerprint=wide), replace(request, folder=str(back))


def _require_boundaries(folder: Path, back: Path) -> None:
    before, after = (_boundaries(place) for place in (folder, back))
    if wrong := [f"{name}: {after[name]} instead of {before[name]}" for name in before if before[name] != after[name]]:
        raise ExportError(f"GGUF lost special tokens: {'; '.join(wrong)}", where=str(folder), fix="export to hf")


def _boundaries(folder: Path) -> dict[str, str | None]:
    said = read_json(folder / "tokenizer_config.json")
    found = {}
    for name in BOUNDARIES:
        token = said.get(name)
        found[name] = token.get("content") if isinstance(token, dict) else token
    return found
