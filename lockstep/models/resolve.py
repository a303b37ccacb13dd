"""Finds, fetches and checks the folder of a recipe's model. Does not import torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.hub import Kind, plain_errors
from lockstep.models.builtin import BUILTINS, builtin_folder
from lockstep.models.folder import check_config, check_weights

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""All but the weights. Weights as pickle, ONNX, GGUF and copies in subfolders are never fetched."""
CODE_FILES = ("*.py",)
WEIGHT_FILES = ("model*.safetensors",)
SKIPPED = ("*/*",)

MODEL = Kind(
    noun="model",
    failure=ModelError,
    pages="",
    local="folder",
    setting="model.revision",
    spelling="of model.path",
    instead="a local folder as model.path",
)


class Source(StrEnum):
    """Origin of a model."""

    BUILTIN = "builtin"
    HUB = "hub"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checked model folder.

    Example: ResolvedModel(Path("/…/snapshots/7ae557"), "Qwen/Qwen2.5-0.5B-Instruct", Source.HUB, "7ae557")
    """

    path: Path
    """Absolute; holds config.json, safetensors and a tokenizer."""
    name: str
    """Name in the recipe."""
    source: Source
    revision: str | None
    """Built-in: "sha256:…" of the file that it was converted from; hub: the commit; folder: None, because its content
    has no version (the fingerprint of the loaded weights identifies it)."""
    trust_remote_code: bool = False


def resolve(model: Model) -> ResolvedModel:
    """Find the model of a recipe, and fetch it if necessary.

    A built-in name wins; then an existing folder; then `org/name` is a hub id. A folder called like a built-in model is
    written with a slash: ./smollm2-135m-instruct.

    Raises:
        ModelError: says in one line what is wrong and what to do.
    """
    name, trust = model.path, model.trust_remote_code
    match _source(name):
        case Source.BUILTIN:
            _refuse_revision(model, "a built-in model has one version")
            return ResolvedModel(builtin_folder(name), name, Source.BUILTIN, f"sha256:{BUILTINS[name].sha256}")
        case Source.FOLDER:
            _refuse_revision(model, "a local folder has none")
            path = Path(name).expanduser().absolute()
            _refuse_non_folder(path)
            check_config(path, str(path), trust)
            check_weights(path, str(path))
            return ResolvedModel(path, name, Source.FOLDER, None, trust)
        case Source.HUB:
            path = hub_folder(name, model.revision, trust)
            check_weights(path, name)
            return ResolvedModel(path, name, Source.HUB, path.name, trust)


def _source(name: str) -> Source:
    if name in BUILTINS:
        return Source.BUILTIN
    if Path(name).expanduser().exists() or name.startswith((os.sep, ".", "~")):
        return Source.FOLDER
    if HUB_ID.fullmatch(name):
        return Source.HUB
    if os.sep in name:
        return Source.FOLDER
    near = difflib.get_close_matches(name.lower(), BUILTINS, n=1, cutoff=0.5)
    raise ModelError(
        f"there is neither a built-in model nor a folder called {name!r}"
        + (f"; did you mean {near[0]}?" if near else ""),
        where="model.path",
        fix=f"give a built-in name ({', '.join(BUILTINS)}), a hub id (org/name), or a folder",
    )


def _refuse_revision(model: Model, reason: str) -> None:
    if model.revision is not None:
        raise ModelError(
            f"revision {model.revision!r} does not exist: {reason}",
            where="model.revision",
            fix="correct model.revision, or leave it out",
        )


def _refuse_non_folder(path: Path) -> None:
    if not path.exists():
        raise ModelError(
            "there is no such folder", where=str(path), fix="check model.path, or give a hub id (org/name)"
        )
    if not path.is_dir():
        raise ModelError(
            "this is a file, but a model is a folder",
            where=str(path),
            fix="give the folder with config.json and *.safetensors",
        )


def hub_folder(repo: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Fetch a hub model and return its snapshot: `.../snapshots/<commit>`.

    Small files come first, so that an unusable model costs no download of its weights. Without a network, or with
    HF_HUB_OFFLINE=1, only the cache is used.

    Raises:
        ModelError: missing, gated, offline and not cached, or not a model that can be trained.
    """
    small = (*SMALL_FILES, *CODE_FILES) if trust_remote_code else SMALL_FILES
    folder = _snapshot(repo, revision, small)
    check_config(folder, repo, trust_remote_code)
    return _snapshot(repo, folder.name, (*small, *WEIGHT_FILES))


def hub_config(repo: str, revision: str | None) -> Path | None:
    """Return a folder with the config.json of a hub model, the one file that is fetched; None if it cannot be had now."""
    try:
        folder = _snapshot(repo, revision, ("config.json",))
    except ModelError:  # resolving the model says why
        return None
    return folder if (folder / "config.json").is_file() else None


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with plain_errors(MODEL, repo, revision, f"{repo}@{revision}" if revision else repo):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*SKIPPED]))
