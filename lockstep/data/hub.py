"""Data sets from a hub, through huggingface_hub and its cache.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError

CARD = "README.md"
FIRST = (CARD, ".gitattributes")
"""Fetched to learn the commit; every repository has the second."""


@dataclass(frozen=True, slots=True)
class Repo:
    """A data set at one commit."""

    id: str
    commit: str
    names: tuple[str, ...]
    """Its files; without a network those in the cache."""
    card: str
    """README.md, "" if there is none."""


def open_repo(repo: str, revision: str | None, where: str) -> Repo:
    """Which files a hub data set has. Fetches the card alone.

    Raises DataError: missing, gated, or offline and not cached.
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _plain_errors(repo, revision, where):
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=[*FIRST]))
        names: list[str] = []
        if not HF_HUB_OFFLINE:
            try:
                listed = HfApi().dataset_info(repo, revision=folder.name).siblings
                names = [file.rfilename for file in listed or ()]
            except errors.HfHubHTTPError:
                raise
            except _network_errors():  # the hub is away: the cache may hold what is wanted
                names = []
    if not names:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return Repo(repo, folder.name, tuple(sorted(names)), text)


def fetch(repo: Repo, names: Sequence[str]) -> tuple[Path, ...]:
    """The files on this machine, in the order of `names`. Raises DataError if one cannot be had."""
    from huggingface_hub import hf_hub_download

    with _plain_errors(repo.id, repo.commit, repo.id):
        return tuple(Path(hf_hub_download(repo.id, name, repo_type="dataset", revision=repo.commit)) for name in names)


@contextmanager
def _plain_errors(repo: str, revision: str | None, where: str) -> Iterator[None]:
    """huggingface_hub's errors as DataError."""
    from huggingface_hub import errors

    label = f"{where} = {repo}" + (f"@{revision}" if revision else "")
    page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/datasets/{repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            "access to this data set is gated", where=label, fix=f"accept its terms on {page}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(
            f"the hub has no revision {revision!r} of this data set",
            where=label,
            fix="correct revision, or leave it out",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            "no file or folder of this name, and the hub has no such data set that you may read",
            where=label,
            fix="check the spelling (org/name); for a private data set set HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(label) from error
    except _network_errors() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the download failed: {reason}", where=label, fix="run again; it continues where it stopped"
        ) from error


def _network_errors() -> tuple[type[Exception], ...]:
    """What a request may fail with: errors of the hub, of the disk, and of the HTTP client, which is httpx or httpx2."""
    from huggingface_hub import errors

    client = next(kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return (errors.HfHubHTTPError, client, OSError)


def _not_cached(label: str) -> DataError:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        reason, fix = "HF_HUB_OFFLINE is set", "unset it"
    else:
        reason, fix = "the hub cannot be reached", "check the network or HF_ENDPOINT"
    return DataError(
        f"{reason}, and the cache {HF_HUB_CACHE} does not hold this data set (or not all of it)",
        where=label,
        fix=f"{fix}, copy that cache from a machine that has it, or give the files as a local path",
    )
