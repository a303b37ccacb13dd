from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.data import Data
from lockstep.data.build import Names, Part, build, split_set
from lockstep.data.load import open_rows
from lockstep.data.questions import question_digest
from lockstep.data.sets import DataSet, Loaded, load_set
from lockstep.data.split import split
from lockstep.errors import DataError

PARTS = (Part("test", 10), Part("validation", 20), Part("train", None))


def a_set(path: Path, rows: list[dict[str, object]], name: str = "train", **settings: object) -> Loaded:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    side = "train" if name == "train" else "evaluation"
    data = Data.model_validate({"source": str(path), **settings})
    return load_set(DataSet(name, side, f"task.{name}", data, False))


def sums(count: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"{n} + 1?", "answer": n + 1, "level": n % 3} for n in range(start, start + count)]


def questions(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_a_split_shares_no_question_and_forgets_none(tmp_path: Path) -> None:
    rows = [*sums(100), *({**row, "prompt": f" {row['prompt']} "} for row in sums(5))]
    manifest = split_set(a_set(tmp_path / "a.jsonl", rows), PARTS, tmp_path / "out")
    made = {part.name: questions(tmp_path / "out" / f"{part.name}.jsonl") for part in PARTS}
    assert {name: len(texts) for name, texts in made.items()} == {"test": 10, "validation": 20, "train": 70}
    assert sorted(text for texts in made.values() for text in texts) == sorted(str(row["prompt"]) for row in sums(100))
    assert manifest.division is not None
    assert (manifest.division.distinct, manifest.division.repeats, manifest.division.unused) == (100, 5, 0)
    assert [(o.train, o.evaluation, o.normalised) for o in manifest.overlap] == [
        ("train", "test", 0),
        ("train", "validation", 0),
    ]


def test_a_split_depends_on_questions_and_seed_alone(tmp_path: Path) -> None:
    forward, backward = a_set(tmp_path / "a.jsonl", sums(100)), a_set(tmp_path / "b.jsonl", sums(100)[::-1])
    for name, loaded, seed in (("one", forward, 0), ("two", backward, 0), ("three", forward, 42)):
        split_set(loaded, PARTS, tmp_path / name, seed)
    one, two, three = (questions(tmp_path / name / "test.jsonl") for name in ("one", "two", "three"))
    assert one == two
    assert one != three
    for seed in (-1, 2**63, 10**30):
        split_set(forward, PARTS, tmp_path / str(seed), seed)
        assert questions(tmp_path / str(seed) / "test.jsonl") not in (one, three)
    by_digest = sorted(forward.prompts, key=lambda p: question_digest(p.messages))
    assert one == [p.messages[0]["content"] for p in by_digest[:10]]
    assert one == [p.messages[0]["content"] for p in split(forward.prompts, 10).heldout], "as a task holds rows out"
    smaller = (Part("test", 10), Part("train", 5))
    manifest = split_set(forward, smaller, tmp_path / "four")
    assert questions(tmp_path / "four" / "test.jsonl") == one, "a later part does not change an earlier one"
    assert manifest.division is not None
    assert manifest.division.unused == 85


def test_the_manifest_proves_itself_and_is_the_same_each_time(tmp_path: Path) -> None:
    filters = [{"kind": "integer_answer", "name": "small", "high": 50}]
    for name in ("one", "two"):
        loaded = a_set(tmp_path / "a.jsonl", sums(100), filters=filters)
        split_set(loaded, PARTS, tmp_path / name)
    text = (tmp_path / "one" / "manifest.json").read_text()
    assert text == (tmp_path / "two" / "manifest.json").read_text()
    manifest = json.loads(text)
    (source,) = manifest["sources"]
    content = (tmp_path / "a.jsonl").read_bytes()
    assert source["files"] == [
        {"file": str(tmp_path / "a.jsonl"), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert source["settings"]["filters"] == [{"name": "small", "kind": "integer_answer", "high": 50}]
    stage = source["reading"]["stages"][0]
    assert (stage["before"], stage["dropped"], len(stage["examples"])) == (100, 50, 5)
    for output in manifest["outputs"]:
        written = (tmp_path / "one" / output["file"]["file"]).read_bytes()
        assert output["file"]["sha256"] == hashlib.sha256(written).hexdigest()
        assert output["rows"] == len(written.splitlines())


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_is_built_reads_as_what_it_was_built_from(tmp_path: Path, format: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3?"}]
    rows = [*sums(3), {"prompt": turns, "answer": "4", "level": 1}]
    train = a_set(tmp_path / "a.jsonl", rows)
    held = a_set(tmp_path / "b.jsonl", sums(3, 50), "id_probe")
    manifest = build([train, held], tmp_path / "out", format, Names("input", "label"))  # type: ignore[arg-type]
    assert [output.file.file for output in manifest.outputs] == [f"train.{format}", f"id_probe.{format}"]
    data = Data(source=str(tmp_path / "out" / f"train.{format}"), prompt="input", answer="label", id="id")
    again = open_rows(data, where="data").prompts()
    assert [replace(p, id="", task="") for p in again] == [replace(p, id="", task="") for p in train.prompts]
    assert [p.id for p in again] == ["train/1", "train/2", "train/3", "train/4"]


def test_parquet_keeps_a_column_that_the_first_row_lacks(tmp_path: Path) -> None:
    rows = [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": "2", "tests": "assert f(2)"}]
    build([a_set(tmp_path / "a.jsonl", rows)], tmp_path / "out", "parquet")
    assert [row.get("tests") for row in pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()] == [
        None,
        "assert f(2)",
    ]


def test_a_number_that_parquet_cannot_hold_is_refused(tmp_path: Path) -> None:
    loaded = a_set(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "1", "seed": 2**70}])
    with pytest.raises(DataError, match="a column has values that Parquet cannot hold") as error:
        build([loaded], tmp_path / "out", "parquet")
    assert (error.value.where, "--format jsonl" in error.value.fix) == (str(tmp_path / "out" / "train.parquet"), True)


def test_a_build_that_fails_leaves_no_file(tmp_path: Path) -> None:
    train = a_set(tmp_path / "a.jsonl", sums(3))
    held = a_set(tmp_path / "b.jsonl", [{"prompt": "x?", "answer": "1", "seed": 2**70}], "id_probe")
    with pytest.raises(DataError, match="Parquet cannot hold"):
        build([train, held], tmp_path / "out", "parquet")
    assert not list((tmp_path / "out").iterdir())
    build([train, held], tmp_path / "out")


def test_an_evaluation_set_that_training_has_is_not_built(tmp_path: Path) -> None:
    train = a_set(tmp_path / "a.jsonl", sums(10))
    held = a_set(tmp_path / "b.jsonl", [{"prompt": "3  + 1?", "answer": 4}], "id_probe")
    with pytest.raises(DataError, match="1 of 1 held-out questions are also training questions"):
        build([train, held], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    loaded = a_set(tmp_path / "a.jsonl", sums(50))
    split_set(loaded, PARTS, tmp_path / "out")
    with pytest.raises(DataError, match="this output file exists already"):
        split_set(loaded, PARTS, tmp_path / "out")
    with pytest.raises(DataError, match="the parts ask for 60 questions, but there are only 50 different ones"):
        split_set(loaded, [Part("a", 60)], tmp_path / "other")
    with pytest.raises(DataError, match="so it must be the last"):
        split_set(loaded, PARTS[::-1], tmp_path / "other")
    with pytest.raises(DataError, match="ask for all 50 different questions, so none remains for train"):
        split_set(loaded, [Part("test", 50), Part("train", None)], tmp_path / "other")
    with pytest.raises(DataError, match="the part test would have no question"):
        split_set(loaded, [Part("test", 0), Part("train", None)], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_columns_that_json_has_no_form_for(tmp_path: Path) -> None:
    pq.write_table(
        pa.table(
            {"prompt": ["a"], "answer": [1], "score": [float("nan")], "raw": [b"\xff"], "deep": [[{"x": float("inf")}]]}
        ),
        tmp_path / "a.parquet",
    )
    loaded = load_set(DataSet("train", "train", "t", Data(source=str(tmp_path / "a.parquet")), False))
    build([loaded], tmp_path / "out")
    row = json.loads((tmp_path / "out" / "train.jsonl").read_text())
    assert row == {"id": "1", "prompt": "a", "answer": "1", "score": None, "raw": "b'\\xff'", "deep": [{"x": None}]}
    clash = a_set(tmp_path / "b.jsonl", [{"question": "q", "answer": 1, "prompt": "other"}], prompt="question")
    with pytest.raises(DataError, match="two columns would be called 'prompt'"):
        build([clash], tmp_path / "clash")
    rows = [{"prompt": "q", "answer": 1, "id": "a"}]
    with pytest.raises(DataError, match="two columns would be called 'id'") as refused:
        build([a_set(tmp_path / "c.jsonl", rows)], tmp_path / "clash")
    assert refused.value.fix.startswith("set `id` to this column")
    build([a_set(tmp_path / "c.jsonl", rows, id="id")], tmp_path / "fixed")
