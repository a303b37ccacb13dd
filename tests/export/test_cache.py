"""An export that is there already is not made again; another checkpoint, option or a damaged file makes one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.export import check
from lockstep.export.cache import look
from lockstep.export.export import Exported, export
from lockstep.scoring.targets import find_target
from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, NO_EVAL, trained
from tests.saying import Printed


@pytest.fixture(scope="module")
def run(home: Path, model: Path) -> RunDirectory:
    return trained(home, model, *LORA, NO_EVAL, "steps=2", "save.keep_last=2", "name=cached")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(run: RunDirectory, step: int = 2, *, adapter: bool = True, shard: int = 10**9) -> Exported:
    return export(find_target(str(run.path), step=step), None, adapter=adapter, shard_bytes=shard, check=check.answer)


def test_checkpoint_and_options_choose_the_export(run: RunDirectory, cache: Path) -> None:
    first = made(run)
    assert (first.reused, first.path.parent) == (False, cache / "exports")
    weights = first.path / "adapter_model.safetensors"
    before = weights.stat().st_mtime_ns
    second = made(run)
    assert (second.reused, second.path, weights.stat().st_mtime_ns) == (True, first.path, before)
    assert (second.verified, second.source, second.bytes) == (first.verified, first.source, first.bytes)
    others = [made(run, 1), made(run, adapter=False), made(run, adapter=False, shard=200_000)]
    assert [one.reused for one in others] == [False] * 3
    assert len({first.path, *(one.path for one in others)}) == 4


def test_a_base_whose_tokenizer_changed_is_another(run: RunDirectory, model: Path) -> None:
    first, file = made(run), model / "chat_template.jinja"
    kept = file.read_text()
    file.write_text(kept + "{# changed #}")
    try:
        assert not made(run).reused
    finally:
        file.write_text(kept)
    assert made(run).path == first.path


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "tokenizer.json", "lockstep_export.json"])
def test_a_damaged_file_makes_it_again(file: str, run: RunDirectory) -> None:
    place = made(run).path
    whole = (place / file).read_bytes()
    (place / file).write_bytes(whole[:-9] + b"x" * 9)
    assert not made(run).reused
    assert len((place / file).read_bytes()) == len(whole)
    assert made(run).reused
    (place / file).unlink()
    assert not made(run).reused
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []


def test_the_card_gets_the_scores_of_later(run: RunDirectory, tmp_path: Path) -> None:
    copy = RunDirectory.open(shutil.copytree(run.path, tmp_path / run.name))
    place = made(copy).path
    manifest = json.loads(copy.manifest_path.read_text())
    copy.manifest_path.write_text(json.dumps(manifest | {"formula": "said later"}))
    assert made(copy).reused
    assert "said later" in (place / "README.md").read_text()
    assert made(copy).reused


def test_a_folder_of_ones_own(run: RunDirectory, tmp_path: Path, printed: Printed) -> None:
    """The same export is left alone; another, or one with files of the user, is replaced on request alone, or never."""
    out = tmp_path / "out"
    words = ["export", str(run.path), str(out), "--adapter", "--step"]
    assert "not made again" not in printed(*words, "2")
    assert "it is there already, every file whole: not made again" in printed(*words, "2")
    assert f"holds another export already: of {run.path} at step 2" in printed(*words, "1", code=2)
    assert main([*words, "1", "--again"]) == 0
    assert json.loads((out / "lockstep_export.json").read_text())["source"]["step"] == 1
    (out / "notes.txt").write_text("mine")
    assert "a file that is not of the export: notes.txt" in printed(*words, "2", "--again", code=2)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_record_without_its_source_is_none(tmp_path: Path) -> None:
    (tmp_path / "lockstep_export.json").write_text('{"files": {}, "made_of": {"weights": "other"}}')
    with pytest.raises(ConfigError, match="exists already"):
        look(tmp_path, {"weights": "these"}, again=False)
