"""A checkpoint from a stranger: its manifest is well sealed, its content is not what it should be."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.checkpoint.manifest import LARGEST_HEADER, commit, read_manifest, verify
from lockstep.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.saving import write


def seal(folder: Path, files: dict[str, object], step: object = 1, **more: object) -> None:
    """Write COMMIT.json as the format has it, whatever the files are called."""
    body = {"format": "lockstep-checkpoint-1", "step": step, "files": dict(sorted(files.items())), **more}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    (folder / "COMMIT.json").write_text(json.dumps({**body, "seal": digest}, indent=1) + "\n")


def entries(folder: Path) -> dict[str, object]:
    return {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "COMMIT.json"
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "step_000001"
    inside.mkdir()
    write(inside, 1, files=1, size=1000)
    return inside


def test_the_seal_of_these_tests_is_the_real_one(folder: Path):
    seal(folder, entries(folder))
    by_hand = (folder / "COMMIT.json").read_bytes()
    assert verify(folder) == commit(folder, 1)
    assert (folder / "COMMIT.json").read_bytes() == by_hand


def pickled(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(pickle.dumps({"a": 1}))


def pickled_as_safetensors(folder: Path) -> None:
    (folder / "optimizer.safetensors").write_bytes(pickle.dumps({"a": list(range(100))}))


def code(folder: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('code was run')")


def huge_header(folder: Path) -> None:
    with (folder / "a.safetensors").open("wb") as file:
        file.write((LARGEST_HEADER + 1).to_bytes(8, "little") + b"{" + b" " * 10)
        file.truncate(LARGEST_HEADER + 100)


def header_beyond_the_file(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b'{"__metadata__":{}}')


def tensor_beyond_the_file(folder: Path) -> None:
    header = b'{"t":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}'
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)


def overlapping_tensors(folder: Path) -> None:
    spans = {"a": [0, 8], "b": [4, 12]}
    header = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": s} for n, s in spans.items()}).encode()
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 12)


def empty(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"")


def no_ending(folder: Path) -> None:
    (folder / "weights").write_bytes(b"\x80\x04.")


BAD_FILES: dict[Callable[[Path], None], str] = {
    pickled: r"optimizer\.pt: refused, \.pt is none of",
    pickled_as_safetensors: r"optimizer\.safetensors: refused, it is not a safetensors file",
    code: r"modeling\.py: refused, \.py is none of",
    huge_header: r"a\.safetensors: refused, its header claims 33554433 bytes",
    header_beyond_the_file: r"a\.safetensors: refused, it is not a safetensors file",
    tensor_beyond_the_file: r"a\.safetensors: refused, it is not a safetensors file",
    overlapping_tensors: r"a\.safetensors: refused, it is not a safetensors file",
    empty: r"a\.safetensors: refused, it is not a safetensors file",
    no_ending: r"weights: refused, a file without an ending",
}


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_a_bad_file_is_refused_though_its_hash_is_right(folder: Path, make: Callable[[Path], None]):
    make(folder)
    seal(folder, entries(folder))
    with pytest.raises(CorruptCheckpointError, match=BAD_FILES[make]):
        verify(folder)


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_a_bad_file_is_not_even_written(folder: Path, make: Callable[[Path], None]):
    make(folder)
    with pytest.raises(CheckpointError, match="a checkpoint cannot hold"):
        commit(folder, 1)
    assert not (folder / "COMMIT.json").exists()


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/hostname.json", "a/../../outside.json", "./config.json", "a//b.json"]
)
def test_a_path_out_of_the_folder_is_refused(folder: Path, name: str):
    (folder.parent / "outside.json").write_text("{}")
    seal(folder, {**entries(folder), name: {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}})
    with pytest.raises(CorruptCheckpointError, match="is not a file inside the checkpoint"):
        verify(folder)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_a_symbolic_link_is_refused(folder: Path, kind: str):
    outside = folder.parent / "outside"
    if kind == "file":
        outside.write_text("{}")
    if kind == "folder":
        outside.mkdir()
    (folder / "a.json").symlink_to(outside)
    seal(folder, {**entries(folder), "a.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}})
    with pytest.raises(CorruptCheckpointError, match=r"a\.json: refused, it is a symbolic link"):
        verify(folder)


def test_a_link_in_place_of_the_folder_or_its_manifest_is_refused(folder: Path):
    commit(folder, 1)
    (folder.parent / "step_000002").symlink_to(folder)
    with pytest.raises(CorruptCheckpointError, match="a symbolic link stands in for it"):
        verify(folder.parent / "step_000002")
    (folder / "COMMIT.json").rename(folder.parent / "COMMIT.json")
    (folder / "COMMIT.json").symlink_to(folder.parent / "COMMIT.json")
    with pytest.raises(CorruptCheckpointError, match="a symbolic link stands in for it"):
        verify(folder)


def test_a_pipe_is_refused_without_waiting_for_it(folder: Path):
    os.mkfifo(folder / "a.json")
    seal(folder, {**entries(folder), "a.json": {"sha256": "", "bytes": 0}})
    with pytest.raises(CorruptCheckpointError, match=r"a\.json: refused, it is not a plain file"):
        verify(folder)


def test_an_added_file_is_refused(folder: Path):
    commit(folder, 1)
    (folder / "chat_template.jinja").write_text("{{ evil }}")
    with pytest.raises(CorruptCheckpointError, match=r"chat_template\.jinja: not listed"):
        verify(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": "lockstep-checkpoint-1"}', b"9" * 10_000],
    ids=["empty", "object", "list", "no text", "deep", "half", "number"],
)
def test_what_is_no_manifest_is_refused(folder: Path, content: bytes):
    (folder / "COMMIT.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"COMMIT\.json: not a manifest"):
        read_manifest(folder)


def test_a_huge_manifest_is_not_read(folder: Path):
    with (folder / "COMMIT.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="is no manifest"):
        read_manifest(folder)


def test_a_manifest_of_a_later_format_or_with_other_fields_is_refused(folder: Path):
    seal(folder, entries(folder), note="hello")
    with pytest.raises(CorruptCheckpointError, match="its fields are not"):
        read_manifest(folder)
    seal(folder, entries(folder), step="1")
    with pytest.raises(CorruptCheckpointError, match="step is not a number"):
        read_manifest(folder)
    seal(folder, {"a.json": {"sha256": "x"}})
    with pytest.raises(CorruptCheckpointError, match="is not a file's hash and size"):
        read_manifest(folder)
    commit(folder, 1)
    text = (folder / "COMMIT.json").read_text()
    (folder / "COMMIT.json").write_text(text.replace("checkpoint-1", "checkpoint-2"))
    with pytest.raises(CorruptCheckpointError, match="this version reads 'lockstep-checkpoint-1'"):
        read_manifest(folder)


def test_the_same_manifest_spelt_otherwise_is_refused(folder: Path):
    commit(folder, 1)
    data = json.loads((folder / "COMMIT.json").read_text())
    (folder / "COMMIT.json").write_text(json.dumps(data))
    with pytest.raises(CorruptCheckpointError, match="does not match its own hash"):
        read_manifest(folder)
