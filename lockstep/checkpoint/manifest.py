"""COMMIT.json: the name, size and SHA-256 of every file of a checkpoint. It is written last, and holds a hash of itself (`seal`).

No content of a checkpoint is used before its file was hashed, and no kind of file that can run code is read: tensors are
safetensors, the rest is JSON or plain text.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from lockstep.errors import CheckpointError, CorruptCheckpointError
from lockstep.models.cache import sha256_of, sync_to_disk

COMMIT = "COMMIT.json"
FORMAT = "lockstep-checkpoint-1"
SUFFIXES = frozenset({".safetensors", ".json", ".jsonl", ".jinja", ".txt", ".model", ".md"})
"""Allowed endings: tensors, JSON, chat templates, vocabularies. `.model` is sentencepiece's, which is a protobuf."""
LARGEST_HEADER = 32 << 20
LARGEST_COMMIT = 16 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Hash and size of a file. Example: FileEntry("9f86d0…", 538090408)"""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of COMMIT.json."""

    step: int
    files: Mapping[str, FileEntry]
    """Files by path inside the checkpoint, with / between folders."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def commit(folder: Path, step: int) -> Manifest:
    """Flush every file of `folder` to disk, hash it, and write COMMIT.json last.

    Raises CheckpointError for a file that a checkpoint must not hold, OSError if the disk refuses.
    """
    files: dict[str, FileEntry] = {}
    for name, path in _scan(folder):
        if reason := _refused(path) or _bad_tensors(path):
            raise CheckpointError(
                f"a checkpoint cannot hold {name}: {reason}",
                where=str(folder),
                fix="remove the file, or do not write it into a checkpoint",
            )
        sync_to_disk(path)
        files[name] = FileEntry(sha256_of(path), path.stat().st_size)
    manifest = Manifest(step, files)
    (folder / COMMIT).write_bytes(_render(manifest))
    sync_to_disk(folder / COMMIT)
    for inner, _, _ in os.walk(folder):
        sync_to_disk(Path(inner))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read COMMIT.json and check its seal, without the other files. Raises CorruptCheckpointError."""
    path = folder / COMMIT
    if folder.is_symlink() or path.is_symlink():
        raise _corrupt(folder, COMMIT, "a symbolic link stands in for it")
    if not path.is_file():
        raise _corrupt(folder, COMMIT, "missing, so the save did not finish or the file was removed")
    if path.stat().st_size > LARGEST_COMMIT:
        raise _corrupt(folder, COMMIT, f"{path.stat().st_size} bytes is no manifest")
    content = path.read_bytes()
    try:
        manifest = _parse(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise _corrupt(folder, COMMIT, f"not a manifest ({error})") from error
    if _render(manifest) != content:
        raise _corrupt(folder, COMMIT, "its content does not match its own hash (seal)")
    return manifest


def verify(folder: Path) -> Manifest:
    """Check that the folder holds exactly the files that were written, byte for byte, and none of a refused kind.

    Raises CorruptCheckpointError naming the first file that is wrong.
    """
    manifest = read_manifest(folder)
    present = dict(_scan(folder))
    for name, path in present.items():
        if reason := _refused(path):
            raise _corrupt(folder, name, f"refused, {reason}")
        if name not in manifest.files:
            raise _corrupt(folder, name, f"not listed in {COMMIT}")
    for name, entry in manifest.files.items():
        if name not in present:
            raise _corrupt(folder, name, "missing")
        size = present[name].stat().st_size
        if size != entry.bytes:
            raise _corrupt(folder, name, f"{size} bytes instead of {entry.bytes}")
        if sha256_of(present[name]) != entry.sha256:
            raise _corrupt(folder, name, "its SHA-256 is not the one that was written")
        if reason := _bad_tensors(present[name]):
            raise _corrupt(folder, name, f"refused, {reason}")
    return manifest


def _scan(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield everything below `folder` that is not a folder, except COMMIT.json, in order of name; links are not followed."""
    found = []
    for inner, folders, names in os.walk(folder, followlinks=False):
        links = [name for name in folders if (Path(inner) / name).is_symlink()]
        found += [Path(inner) / name for name in (*names, *links)]
    for path in sorted(found):
        name = path.relative_to(folder).as_posix()
        if name != COMMIT:
            yield name, path


def _refused(path: Path) -> str:
    """Return why a file of this kind may not be in a checkpoint, without opening it; "" if it may."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(mode):
        return "it is not a plain file"
    if path.suffix not in SUFFIXES:
        return f"{path.suffix or 'a file without an ending'} is none of {', '.join(sorted(SUFFIXES))}"
    return ""


def _bad_tensors(path: Path) -> str:
    """Return why a file with the name of a safetensors file is not one; "" for other names. The header's length is checked
    before anything allocates it; the library checks the rest.
    """
    if path.suffix != ".safetensors":
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or header > size - 8:
        return "it is not a safetensors file"
    if header > LARGEST_HEADER:
        return f"its header claims {header} bytes, more than {LARGEST_HEADER}"
    try:
        with safe_open(path, framework="numpy"):
            return ""
    except SafetensorError as error:
        return f"it is not a safetensors file ({error})"


def _parse(data: object) -> Manifest:
    """Parse a manifest. Raises ValueError unless `data` has exactly its fields."""
    if not isinstance(data, dict) or data.keys() != {"format", "step", "files", "seal"}:
        raise ValueError("its fields are not format, step, files and seal")
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, this version reads {FORMAT!r}")
    if type(data["step"]) is not int or data["step"] < 0 or not isinstance(data["files"], dict):
        raise ValueError("step is not a number or files not an object")
    return Manifest(data["step"], {_inside(name): _entry(entry) for name, entry in data["files"].items()})


def _inside(name: str) -> str:
    """Return the path. Raises ValueError if it leaves the checkpoint's folder or could be spelt otherwise."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name in (".", COMMIT) or "\0" in name:
        raise ValueError(f"{name!r} is not a file inside the checkpoint")
    return name


def _entry(data: object) -> FileEntry:
    match data:
        case {"sha256": str(digest), "bytes": int(size), **rest} if not rest:
            return FileEntry(digest, size)
        case _:
            raise ValueError(f"{data!r} is not a file's hash and size")


def _render(manifest: Manifest) -> bytes:
    """Return the one spelling of a manifest, sealed by the hash of everything before the seal."""
    files = {name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in sorted(manifest.files.items())}
    body: dict[str, object] = {"format": FORMAT, "step": manifest.step, "files": files}
    seal = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=1) + "\n").encode()


def _corrupt(folder: Path, name: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name}: {reason}", where=str(folder), fix="use another checkpoint, or copy this one again"
    )
