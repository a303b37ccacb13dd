"""Models from a hub, through huggingface_hub and its cache.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ModelError
from lockstep.models.folder import check_config

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""All but the weights. Weights as pickle, ONNX, GGUF and copies in subfolders are never fetched."""
CODE_FILES = ("*.py",)
WEIGHT_FILES = ("model*.safetensors",)
SKIPPED = ("*/*",)


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
    from huggingface_hub import errors, snapshot_download

    where = f"{repo}@{revision}" if revision else repo
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*SKIPPED])
    except errors.GatedRepoError as error:
        page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{repo}"
        raise ModelError(
            "access to this model is gated", where=where, fix=f"accept its terms on {page}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"the hub has no revision {revision!r} of this model",
            where=where,
            fix="correct model.revision, or leave it out",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            "no folder of this name, and the hub has no such model that you may read",
            where=where,
            fix="check the spelling of model.path; for a private model set HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(where) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"the download failed: {_first_line(error)}", where=where, fix="run again; it continues where it stopped"
        ) from error
    return Path(folder)


def _not_cached(where: str) -> ModelError:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        reason, fix = "HF_HUB_OFFLINE is set", "unset it"
    else:
        reason, fix = "the hub cannot be reached", "check the network or HF_ENDPOINT"
    return ModelError(
        f"{reason}, and the cache {HF_HUB_CACHE} does not hold this model (or not all of it)",
        where=where,
        fix=f"{fix}, copy that cache from a machine that has it, or give a local folder as model.path",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
