"""Checkpoints saved, opened, damaged, replaced and pruned."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import manifest
from lockstep.checkpoint.store import (
    clean,
    list_checkpoints,
    open_checkpoint,
    prune,
    save,
    set_aside,
    step_name,
)
from lockstep.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.saving import block, folders, saved, write


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# --- saving and opening ---------------------------------------------------------------------------------------------
def test_what_is_saved_is_opened(tmp_path: Path):
    meta = {
        "version": 10,
        "fingerprint": "00ff",
        "position": [3, 4.5],
        "metrics": {"eval/accuracy": 0.25},
        "none": None,
    }
    path = save(tmp_path, 10, lambda folder: write(folder, 10, files=2), meta)
    assert path == tmp_path / "checkpoints" / "step_000010"
    info = open_checkpoint(tmp_path)
    assert (info.step, info.path, info.complete, info.notes) == (10, path, True, ())
    assert info.meta == meta
    assert info.bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "COMMIT.json")
    assert (path / "part_1.safetensors").read_bytes() == block(10, 1)
    assert folders(tmp_path) == ["step_000010"]


def test_the_manifest_has_size_and_hash_of_each_file(tmp_path: Path):
    path = saved(tmp_path, 1)
    commit = json.loads((path / "COMMIT.json").read_text())
    assert set(commit["files"]) == {file.name for file in path.iterdir()} - {"COMMIT.json"}
    for name, entry in commit["files"].items():
        digest = subprocess.run(["sha256sum", path / name], capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
        assert entry == {"sha256": digest, "bytes": (path / name).stat().st_size}


def test_files_in_folders_are_part_of_a_checkpoint(tmp_path: Path):
    def writer(folder: Path) -> None:
        (folder / "adapter" / "deep").mkdir(parents=True)
        (folder / "adapter" / "deep" / "a.json").write_text("{}")

    path = save(tmp_path, 3, writer, {})
    open_checkpoint(tmp_path)
    flip(path / "adapter" / "deep" / "a.json", 3)
    with pytest.raises(CorruptCheckpointError, match=r"adapter/deep/a\.json: its SHA-256"):
        open_checkpoint(tmp_path)


def test_the_newest_is_opened_or_the_one_asked_for(tmp_path: Path):
    for step in (5, 20, 100):
        saved(tmp_path, step)
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 20, 100]
    assert open_checkpoint(tmp_path).step == 100
    assert open_checkpoint(tmp_path, 20).step == 20
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; the saved steps are 5, 20, 100"):
        open_checkpoint(tmp_path, 7)


def test_steps_beyond_six_digits_keep_their_order(tmp_path: Path):
    for step in (999_999, 1_000_000):
        saved(tmp_path, step)
    assert open_checkpoint(tmp_path).step == 1_000_000


def test_a_run_without_checkpoints_says_so(tmp_path: Path):
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / ".tmp-step_000001").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint; \.tmp-step_000001 was passed over: its save did not finish"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": {1, 2}}, {"x": (1, 2)}, {"x": {1: 2}}])
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict[str, object]):
    with pytest.raises(CheckpointError, match="meta"):
        save(tmp_path, 1, lambda folder: None, meta)  # type: ignore[arg-type]
    assert folders(tmp_path) == []


# --- damage ---------------------------------------------------------------------------------------------------------
def test_any_flipped_bit_in_any_file_is_found_and_the_file_named(tmp_path: Path):
    path = saved(tmp_path, 8)
    rng = random.Random(8)
    names = sorted(file.name for file in path.iterdir())
    assert len(names) == 6
    for _ in range(20):
        for name in names:
            bit = rng.randrange(8 * (path / name).stat().st_size)
            flip(path / name, bit)
            with pytest.raises(CorruptCheckpointError, match=f"^{re.escape(str(path))}: {re.escape(name)}: "):
                open_checkpoint(tmp_path)
            flip(path / name, bit)
    assert open_checkpoint(tmp_path).step == 8


def test_any_truncation_or_added_byte_is_found_and_the_file_named(tmp_path: Path):
    path = saved(tmp_path, 8)
    rng = random.Random(9)
    for _ in range(20):
        for file in sorted(path.iterdir()):
            content = file.read_bytes()
            file.write_bytes(content + b"\0" if rng.random() < 0.2 else content[: rng.randrange(len(content))])
            with pytest.raises(CorruptCheckpointError, match=f": {re.escape(file.name)}: "):
                open_checkpoint(tmp_path)
            file.write_bytes(content)
    assert open_checkpoint(tmp_path).step == 8


def test_a_missing_file_is_named_by_the_listing_too(tmp_path: Path):
    path = saved(tmp_path, 8)
    (path / "part_1.safetensors").unlink()
    (info,) = list_checkpoints(tmp_path)
    assert not info.complete
    assert "part_1.safetensors" in info.problem
    with pytest.raises(CorruptCheckpointError, match=r"part_1\.safetensors: missing"):
        open_checkpoint(tmp_path)


def test_a_name_that_no_disk_takes_is_a_problem_of_the_checkpoint(tmp_path: Path):
    path = saved(tmp_path, 8)
    listed = dict(manifest.read_manifest(path).files)
    long = manifest.Manifest(8, {**listed, f"{'x' * 300}.json": manifest.FileEntry("0" * 64, 2)})
    (path / "COMMIT.json").write_bytes(manifest._render(long))
    (info,) = list_checkpoints(tmp_path)
    assert not info.complete
    assert info.problem == "it cannot be read: File name too long"
    with pytest.raises(CorruptCheckpointError, match=r"x\.json: missing"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_without_commit_is_not_one(tmp_path: Path):
    (saved(tmp_path, 8) / "COMMIT.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"COMMIT\.json: missing"):
        open_checkpoint(tmp_path)


def test_a_renamed_checkpoint_is_found(tmp_path: Path):
    saved(tmp_path, 8).rename(tmp_path / "checkpoints" / "step_000009")
    with pytest.raises(CorruptCheckpointError, match="the folder was renamed: it holds the checkpoint of step 8"):
        open_checkpoint(tmp_path)
    assert not list_checkpoints(tmp_path)[0].complete


def test_the_one_before_is_used_only_if_allowed_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for step in (4, 6, 8):
        saved(tmp_path, step)
    for step in (6, 8):
        flip(tmp_path / "checkpoints" / step_name(step) / "part_0.safetensors", 5000)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "step_000008: part_0.safetensors" in str(caught.value)
    assert "step 4, which is intact, with --allow-fallback" in caught.value.fix
    info = open_checkpoint(tmp_path, allow_fallback=True)
    assert info.step == 4
    assert info.notes == (
        "step 8 is damaged: part_0.safetensors: its SHA-256 is not the one that was written",
        "step 6 is damaged: part_0.safetensors: its SHA-256 is not the one that was written",
    )
    assert "step 8 is damaged" in caplog.text
    assert "using step 4" in caplog.text
    assert open_checkpoint(tmp_path, 6, allow_fallback=True).step == 4


def test_without_an_intact_one_nothing_is_used(tmp_path: Path):
    for step in (4, 6):
        flip(saved(tmp_path, step) / "config.json", 9)
    with pytest.raises(CorruptCheckpointError, match="no earlier checkpoint is intact"):
        open_checkpoint(tmp_path, allow_fallback=True)


# --- saving again ---------------------------------------------------------------------------------------------------
def test_an_intact_checkpoint_is_not_overwritten_unasked(tmp_path: Path):
    path = saved(tmp_path, 5)
    before = (path / "COMMIT.json").read_bytes()
    with pytest.raises(CheckpointError, match="step 5 is already saved"):
        saved(tmp_path, 5, files=1)
    assert (path / "COMMIT.json").read_bytes() == before
    saved(tmp_path, 5, files=1, overwrite=True)
    assert len(list(path.iterdir())) == 4
    assert folders(tmp_path) == ["step_000005"]
    assert open_checkpoint(tmp_path).step == 5


def test_a_damaged_checkpoint_is_replaced(tmp_path: Path):
    path = saved(tmp_path, 5)
    flip(path / "part_2.safetensors", 9999)
    saved(tmp_path, 5)
    assert open_checkpoint(tmp_path).step == 5


def test_two_saves_of_the_same_content_are_the_same_bytes(tmp_path: Path):
    first = {file.name: file.read_bytes() for file in saved(tmp_path / "a", 5).iterdir()}
    second = {file.name: file.read_bytes() for file in saved(tmp_path / "b", 5).iterdir()}
    assert first == second


def test_a_replacement_killed_half_way_loses_nothing(tmp_path: Path):
    """Between the two renames of a replacement: the old one is aside, the new one not yet in place."""
    path = saved(tmp_path, 5)
    path.rename(path.with_name(".old-step_000005"))
    (path.parent / ".tmp-step_000005").mkdir()
    assert open_checkpoint(tmp_path).path.name == ".old-step_000005"
    assert [info.complete for info in list_checkpoints(tmp_path)] == [False, True]
    assert clean(tmp_path) == (".old-step_000005: put back as step_000005", ".tmp-step_000005: removed")
    assert open_checkpoint(tmp_path).path == path


def test_a_replacement_killed_at_its_end_keeps_the_new_one(tmp_path: Path):
    path = saved(tmp_path, 5)
    shutil.copytree(path, path.with_name(".old-step_000005"))
    infos = list_checkpoints(tmp_path)
    assert [(info.path.name, info.complete) for info in infos] == [(".old-step_000005", False), ("step_000005", True)]
    assert open_checkpoint(tmp_path).path == path
    clean(tmp_path)
    assert folders(tmp_path) == ["step_000005"]


# --- pruning --------------------------------------------------------------------------------------------------------
def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    for step in range(1, 7):
        saved(tmp_path, step)
    assert prune(tmp_path, keep_last=2, keep_best=3) == [1, 2, 4]
    assert folders(tmp_path) == ["step_000003", "step_000005", "step_000006"]
    assert prune(tmp_path, keep_last=2, keep_best=6) == [3]
    assert prune(tmp_path, keep_last=2) == []
    assert prune(tmp_path, keep_last=1) == [5]
    assert prune(tmp_path, keep_last=5) == []


def test_those_after_a_step_are_set_aside_and_do_not_count(tmp_path: Path):
    for step in (1, 4, 8):
        saved(tmp_path, step)
    assert set_aside(tmp_path, 8) == []
    assert set_aside(tmp_path, 1) == ["damaged_step_000004", "damaged_step_000008"]
    saved(tmp_path, 4)
    assert prune(tmp_path, keep_last=1, keep_best=1) == []
    assert set_aside(tmp_path, 3) == ["damaged_step_000004_again"]
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_incomplete_ones_do_not_count_as_kept(tmp_path: Path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    (tmp_path / "checkpoints" / "step_000003" / "config.json").unlink()
    assert prune(tmp_path, keep_last=1) == [1]
    assert folders(tmp_path) == ["step_000002", "step_000003"]


def test_pruning_never_deletes_everything(tmp_path: Path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        prune(tmp_path, keep_last=0)
    with pytest.raises(CheckpointError, match="step 9, does not exist"):
        prune(tmp_path, keep_last=1, keep_best=9)
    assert folders(tmp_path) == ["step_000001"]


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"counters": [1]}, "counters: "),
        ({"counters": {"version": "x"}}, "counters.version: "),
        ({"fingerprint": 7}, "fingerprint: "),
        ({"best": ["much", "x"]}, "best.1: "),
        ({"rows": {"bytes": None}}, "rows.bytes"),
    ],
)
def test_a_state_of_other_types_is_corrupt_and_says_which(tmp_path: Path, meta: dict[str, Any], reason: str) -> None:
    """Sealed by whoever made it, but not by Lockstep."""
    save(tmp_path, 1, lambda folder: write(folder, 1), meta)
    with pytest.raises(CorruptCheckpointError, match=f"state.json: {reason}"):
        open_checkpoint(tmp_path)
    assert not list_checkpoints(tmp_path)[0].complete


def test_an_entry_that_a_state_lacks_is_corruption_and_no_key_error(tmp_path: Path) -> None:
    save(tmp_path, 1, lambda folder: write(folder, 1), {"counters": {"version": 1}})
    counters: Any = open_checkpoint(tmp_path).meta["counters"]
    assert counters["version"] == 1
    for lacking in (lambda: counters["skipped"], lambda: open_checkpoint(tmp_path).meta["fingerprint"]):
        with pytest.raises(CorruptCheckpointError, match=r"state\.json has no entry '(skipped|fingerprint)'"):
            lacking()


def test_a_state_that_was_read_can_be_part_of_the_next_one(tmp_path: Path) -> None:
    """`asdict` copies each mapping by its own type: a run that resumes does so at its next save."""

    @dataclass
    class State:
        shares: dict[str, float]

    save(tmp_path, 1, lambda folder: write(folder, 1), {"carried": {"shares": {"sums": 0.25}}})
    read: Any = open_checkpoint(tmp_path).meta["carried"]
    save(tmp_path, 2, lambda folder: write(folder, 2), {"carried": asdict(State(read["shares"]))})
    assert open_checkpoint(tmp_path).meta["carried"] == {"shares": {"sums": 0.25}}
