"""Which folder a recipe's model means, fetched and checked. Loads no torch."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models.builtin import BUILTINS, builtin_folder
from lockstep.models.folder import check_config, check_weights
from lockstep.models.hub import hub_folder

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Source(StrEnum):
    """Where a model came from."""

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
    """As the recipe has it."""
    source: Source
    revision: str | None
    """Built-in: "sha256:…" of the file that it was converted from; hub: the commit; folder: None, for nobody vouches
    for its content (the fingerprint of the loaded weights tells)."""
    trust_remote_code: bool = False


def resolve(model: Model) -> ResolvedModel:
    """Find, and if need be fetch, the model of a recipe.

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
        f"no built-in model and no folder {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
        where="model.path",
        fix=f"give a built-in name ({', '.join(BUILTINS)}), a hub id (org/name), or a folder",
    )


def _refuse_revision(model: Model, reason: str) -> None:
    if model.revision is not None:
        raise ModelError(
            f"{model.revision!r} cannot be had: {reason}", where="model.revision", fix="leave model.revision out"
        )


def _refuse_non_folder(path: Path) -> None:
    if not path.exists():
        raise ModelError("no such folder", where=str(path), fix="check model.path, or give a hub id (org/name)")
    if not path.is_dir():
        raise ModelError(
            "a file, not a folder", where=str(path), fix="give the folder with config.json and *.safetensors"
        )
