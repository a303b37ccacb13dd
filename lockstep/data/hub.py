"""Downloads data sets from the Hugging Face hub, through huggingface_hub and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.hub import Kind, network_errors, plain_errors

CARD = "README.md"
CARD_BYTES = 2_000_000
FIRST = (CARD, ".gitattributes")
"""Files fetched to learn the commit; every repository has the second."""

DATA_SET = Kind(
    noun="data set",
    failure=DataError,
    pages="datasets/",
    local="file or folder",
    setting="revision",
    spelling="(org/name)",
    instead="the files as a local path",
)


@dataclass(frozen=True, slots=True)
class Repo:
    """A data set at one commit."""

    id: str
    commit: str
    names: tuple[str, ...]
    """Paths of its files; without a network those in the cache."""
    card: str
    """README.md, "" if there is none."""


def open_repo(repo: str, revision: str | None, where: str) -> Repo:
    """List the files of a hub data set. Fetches only the card.

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
            except network_errors():  # the hub cannot be reached: the cache may hold the files
                names = []
    if not names:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return Repo(repo, folder.name, tuple(sorted(names)), read_card(folder))


def read_card(folder: Path) -> str:
    """Return the beginning of a folder's data card, where its front matter is; "" if it has none."""
    if not (folder / CARD).is_file():
        return ""
    with (folder / CARD).open("rb") as file:
        return file.read(CARD_BYTES).decode("utf-8", "replace")


def fetch(repo: Repo, names: Sequence[str]) -> tuple[Path, ...]:
    """Fetch files and return their paths in the order of `names`. Raises DataError if one is not available."""
    from huggingface_hub import hf_hub_download

    with _plain_errors(repo.id, repo.commit, repo.id):
        return tuple(Path(hf_hub_download(repo.id, name, repo_type="dataset", revision=repo.commit)) for name in names)


def _plain_errors(repo: str, revision: str | None, where: str) -> AbstractContextManager[None]:
    return plain_errors(DATA_SET, repo, revision, f"{where}={repo}" + (f"@{revision}" if revision else ""))
