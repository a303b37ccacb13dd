"""Models from a hub, through huggingface_hub and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ModelError
from lockstep.hub import Kind, plain_errors
from lockstep.models.folder import check_config

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


def hub_folder(repo: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The snapshot of a hub model: `.../snapshots/<commit>`.

    Small files come first, so that a model that will not do costs no download of its weights. Without a network, or with
    HF_HUB_OFFLINE=1, the cache alone serves.

    Raises:
        ModelError: missing, gated, offline and not cached, or not a model that can be trained.
    """
    small = (*SMALL_FILES, *CODE_FILES) if trust_remote_code else SMALL_FILES
    folder = _snapshot(repo, revision, small)
    check_config(folder, repo, trust_remote_code)
    return _snapshot(repo, folder.name, (*small, *WEIGHT_FILES))


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with plain_errors(MODEL, repo, revision, f"{repo}@{revision}" if revision else repo):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*SKIPPED]))
