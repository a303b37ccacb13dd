"""Folders that are broken, or made to break a program: `lockstep import` refuses each with a typed error, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import CheckpointError, ConfigError, ExportError, LockstepError, ModelError
from lockstep.export.check import Request
from lockstep.export.files import in_the_making, new_folder
from lockstep.export.import_checkpoint import import_checkpoint
from lockstep.export.verify import in_fresh_process
from lockstep.models.foreign import find_foreign
from tests.tiny import write_tiny_model

WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
Change = Callable[[Path], object]
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
ONE = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_tiny_model(folder)
    return folder


def weights(change: Callable[[str, Tensor], Tensor]) -> Change:
    return lambda p: save_file({n: change(n, t) for n, t in load_file(p / WEIGHTS).items()}, p / WEIGHTS)


def config(**more: Any) -> Change:
    def change(place: Path) -> None:
        path = place / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return change


def index(text: str) -> Change:
    def change(place: Path) -> None:
        (place / WEIGHTS).unlink()
        (place / INDEX).write_text(text)

    return change


def adapter(tensors: dict[str, Tensor], said: dict[str, Any]) -> Change:
    def change(place: Path) -> None:
        save_file(tensors, place / ADAPTER)
        (place / "adapter_config.json").write_text(json.dumps(said))

    return change


def shard(content: Any, world: int = 1) -> Change:
    def change(place: Path) -> None:
        (place / "huggingface").mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.move(place / name, place / "huggingface" / name)
        own = load_file(place / WEIGHTS)
        (place / WEIGHTS).unlink()
        torch.save(content(own) if callable(content) else content, place / f"model_world_size_{world}_rank_0.pt")

    return change


def states(module: Any) -> Change:
    def change(place: Path) -> None:
        (place / WEIGHTS).unlink()
        torch.save({"module": module}, place / "mp_rank_00_model_states.pt")

    return change


CASES: dict[str, tuple[Change, type[LockstepError], str]] = {
    "a cut file": (
        lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:5000]), CheckpointError, "cannot be read",
    ),
    "an empty file": (lambda p: (p / WEIGHTS).write_bytes(b""), CheckpointError, "cannot be read"),
    "rubbish": (lambda p: (p / WEIGHTS).write_bytes(b"\xff" * 1000), CheckpointError, "cannot be read"),
    "no tensor": (lambda p: save_file({}, p / WEIGHTS), CheckpointError, "20 tensors are missing"),
    "a missing shard": (
        index('{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        CheckpointError,
        "model-00001-of-00002.safetensors is missing",
    ),
    "an index of numbers": (index('{"weight_map": {"a": 5}}'), ModelError, "no valid weight_map"),
    "a broken index": (index("["), ModelError, "is not valid JSON"),
    "no model type": (lambda p: (p / "config.json").write_text("{}"), ModelError, "describes no model"),
    "an unknown type": (config(model_type="nonsense"), ModelError, "describes no model"),
    "another kind of model": (config(model_type="t5"), ModelError, "describes no model"),
    "a size in words": (config(hidden_size="64"), ModelError, "describes no model"),
    "a size below zero": (config(hidden_size=-64), ModelError, "describes no model"),
    "no heads": (config(num_attention_heads=0), ModelError, "describes no model"),
    "a vocabulary beyond memory": (config(vocab_size=10**18), ModelError, "describes no model"),
    "an unknown activation": (config(hidden_act="evil"), ModelError, "describes no model"),
    "an unknown rotation": (config(rope_parameters={"rope_type": "evil"}), ModelError, "describes no model"),
    "no tokenizer": (
        lambda p: [path.unlink() for path in p.glob("token*")], ModelError, "no tokenizer",
    ),
    "whole numbers": (weights(lambda _, t: t.int()), CheckpointError, "is int32: only plain weights"),
    "one of eight bits": (
        weights(lambda n, t: t.to(torch.float8_e4m3fn) if "q_proj" in n else t), CheckpointError, "is float8_e4m3fn",
    ),
    "not a number": (weights(lambda _, t: t * float("nan")), CheckpointError, "not finite"),
    "infinite in one place": (
        weights(lambda n, t: t.index_fill(0, torch.tensor([0]), torch.inf) if n == "model.norm.weight" else t),
        CheckpointError,
        "model.norm.weight has values that are not finite",
    ),
    "an empty adapter": (adapter({}, LORA), CheckpointError, "holds no tensor"),
    "an adapter of nothing": (adapter(ONE, {}), ModelError, "does not describe an adapter of PEFT"),
    "an unknown adapter": (adapter(ONE, LORA | {"peft_type": "EVIL"}), ModelError, "does not describe an adapter of PEFT"),
    "an adapter of whole numbers": (
        adapter({n: t.int() for n, t in ONE.items()}, LORA), CheckpointError, "is int32",
    ),
    "a shard without names": (shard({1: torch.zeros(2)}), CheckpointError, "not tensors by name"),
    "a world of no rank": (shard({"a": torch.zeros(1)}, world=0), CheckpointError, "a file says world size 0"),
    "a sparse shard": (
        shard(lambda own: {n: t.to_sparse() if t.ndim == 2 else t for n, t in own.items()}),
        CheckpointError,
        "is sparse",
    ),
    "states without names": (states({1: torch.zeros(1)}), CheckpointError, "holds only part of the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_broken_folder_is_refused(name: str, good: Path, tmp_path: Path) -> None:
    change, kind, text = CASES[name]
    place = tmp_path / "checkpoint-7"
    shutil.copytree(good, place)
    change(place)
    with pytest.raises(kind, match=text):
        import_checkpoint(find_foreign(place), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


def test_where_nothing_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (tmp_path / "file", tmp_path / "link", tmp_path, Path(), Path(".."), Path(os.sep)):
        with pytest.raises(ConfigError, match="exists already"):
            new_folder(name)
    assert new_folder(Path("new")) == tmp_path / "empty" / "new"
    for name in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        with pytest.raises(ConfigError, match="cannot be created"), in_the_making(name):
            pass
    (tmp_path / ".out.partial").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be created"), in_the_making(tmp_path / "out"):
        pass
    assert (tmp_path / ".out.partial").read_text() == "mine"


def test_a_folder_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    with in_the_making(tmp_path / "out") as folder:
        (folder / "whole").write_text("first")
        with (
            pytest.raises(ConfigError, match="out is being written by another process"),
            in_the_making(tmp_path / "out"),
        ):
            pass
    assert (tmp_path / "out" / "whole").read_text() == "first"
    (tmp_path / ".next.partial" / "deep").mkdir(parents=True)
    (tmp_path / ".next.partial" / "rest").write_text("of a process that was killed")
    with in_the_making(tmp_path / "next"):
        pass
    assert not list((tmp_path / "next").iterdir())


def half(folder: Path) -> None:
    (folder / "half").write_text("")
    raise ZeroDivisionError


def test_an_empty_folder_is_taken_and_a_failure_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError), in_the_making(tmp_path / "out") as folder:
        half(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with in_the_making(tmp_path / "out") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_a_reader_that_never_ends_is_ended(good: Path) -> None:
    with pytest.raises(ExportError, match=r"has not read the exported folder in 0\.2 seconds") as caught:
        in_fresh_process(Request(str(good), "", "float32", "cpu", ((1, 2),), "a", ""), seconds=0.2)
    assert caught.value.where == str(good)


def test_a_users_file_with_the_name_of_a_module_is_not_imported(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert in_fresh_process(Request(str(good), "", "float32", "cpu", ((1, 2),), "a", "")).parameters > 0
