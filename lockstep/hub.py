"""Turns errors of huggingface_hub into errors of Lockstep, with the same messages for models and data sets.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have the meaning that they have in huggingface_hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.errors import LockstepError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of repository on the hub (model or data set), and its words in error messages."""

    noun: str
    """Example: "data set"."""
    failure: type[LockstepError]
    pages: str
    """Beginning of its pages, after the endpoint. Example: "datasets/"."""
    local: str
    """Local form of one. Example: "file or folder"."""
    setting: str
    """The setting with the revision."""
    spelling: str
    """End of the advice "check the spelling …"."""
    instead: str
    """End of the advice "or give …" where there is no hub."""


@contextmanager
def plain_errors(kind: Kind, repo: str, revision: str | None, where: str) -> Iterator[None]:
    """Turn huggingface_hub's errors into `kind.failure`: missing, gated, offline and not cached, or a download that broke off."""
    from huggingface_hub import errors

    noun, failure = kind.noun, kind.failure
    page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{kind.pages}{repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise failure(
            f"access to this {noun} is gated", where=where, fix=f"accept the terms on {page}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise failure(
            f"the hub has no revision {revision!r} of this {noun}",
            where=where,
            fix=f"correct {kind.setting}, or leave it out",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise failure(
            f"there is no {kind.local} of this name, and the hub has no such {noun} that you may read",
            where=where,
            fix=f"check the spelling {kind.spelling}; for a private {noun} set HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(kind, where) from error
    except network_errors() as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise failure(
            f"the download failed: {reason}",
            where=where,
            fix="run the command again: the download continues where it stopped",
        ) from error


def network_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a failed request: those of the hub, of the disk, and of the HTTP client, which is httpx or httpx2."""
    from huggingface_hub import errors

    client = next(kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return (errors.HfHubHTTPError, client, OSError)


def _not_cached(kind: Kind, where: str) -> LockstepError:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        reason, fix = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    else:
        reason, fix = "the hub cannot be reached", "check the network or HF_ENDPOINT"
    return kind.failure(
        f"{reason}, and the cache {HF_HUB_CACHE} does not hold this {kind.noun} (or not all of it)",
        where=where,
        fix=f"{fix}, copy that cache from a machine that has it, or give {kind.instead}",
    )
