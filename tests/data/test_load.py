from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.data import Data
from lockstep.data.load import Conversation, Rows, open_rows
from lockstep.errors import DataError


def jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(start, start + count)]


def opened(source: Path | str, **settings: object) -> Rows:
    return open_rows(Data.model_validate({"source": str(source), **settings}), where="task.data")


def refusal(rows: Rows) -> str:
    with pytest.raises(DataError) as error:
        rows.prompts()
    return str(error.value)


def test_the_same_rows_in_four_formats(tmp_path: Path) -> None:
    rows = [{"prompt": f'{n}, "quoted"\nsecond line é', "answer": str(n)} for n in range(5)]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "A.PARQUET")
    lines = ["prompt,answer", *(f'"{n}, ""quoted""\nsecond line é",{n}' for n in range(5))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    made = {name: opened(tmp_path / name) for name in ("a.jsonl", "a.json", "a.parquet", "A.PARQUET", "a.csv")}
    assert {tuple((p.messages[0]["content"], p.answer) for p in rows.prompts()) for rows in made.values()} == {
        tuple((row["prompt"], row["answer"]) for row in rows)
    }
    hashes = {name: rows.content_hash for name, rows in made.items()}
    parts = (f'[{n + 1},{{"answer":"{n}","prompt":"{n}, \\"quoted\\"\\nsecond line é"}}]' for n in range(5))
    expected = hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
    assert hashes["a.jsonl"] == hashes["a.json"] == hashes["a.parquet"] == expected
    assert hashes["a.csv"] != hashes["a.jsonl"], "its rows are numbered by line, and ids are made of that"
    assert [row.number for row in made["a.csv"]] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("a.jsonl", '{"prompt": "1", "answer": 2}\n'.encode("utf-16"), "UTF-8 with one JSON object a line"),
        ("a.json", b'{\n "prompt": "1",\n "answer": 2\n}\n', "UTF-8 with one JSON object a line"),
        ("a.csv", b'prompt,answer\n"1,2\n3,4\n', "every quotation closed"),
        ("b.jsonl", b'{"q": 1}\n{"q"\n', "set the columns of the question and the answer: task.data.prompt=COLUMN"),
    ],
)
def test_the_fix_is_about_columns_only_if_a_row_has_any(tmp_path: Path, name: str, content: bytes, fix: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert fix in refusal(opened(tmp_path / name))


def test_rows_of_a_generator_that_are_no_mappings_are_not_answered_with_columns(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def rows():\n    yield from (['p', 1], ['q', 2])\n")
    assert "to fix: let the generator yield a dict of column to value" in refusal(opened(f"{tmp_path}/own.py:rows"))


def test_csv_rows_that_are_bad_are_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'prompt,answer\n"one\ntwo",1\nthree\n\nfour,4,4\n\xff,5\n"six"x,6\nseven,7\n')
    assert refusal(opened(file)).splitlines()[1:5] == [
        "  a.csv:4: it has 1 fields, the header 2",
        "  a.csv:6: it has 3 fields, the header 2",
        "  a.csv:7: not UTF-8",
        "  a.csv:8: malformed CSV: ',' expected after '\"'",
    ]
    kept = opened(file, on_bad_row="drop")
    assert [p.id for p in kept.prompts()] == ["a/2", "a/9"]
    assert (kept.reading.read, kept.reading.bad) == (6, 4)
    file.write_text('prompt,answer\nfine,1\n"never closed,2\n')
    assert "a.csv:3: malformed CSV: unexpected end of data" in refusal(opened(file))
    file.write_text("a,a\n1,2\n")
    assert "two columns are called 'a'" in refusal(opened(file))


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "set" / "part-1.jsonl", sums(3))
    jsonl(tmp_path / "set" / "part-2.jsonl", sums(3, 10))
    (tmp_path / "set" / "part-2.jsonl").open("a").write("{\n")
    (tmp_path / "set" / "notes.txt").write_text("not data")
    jsonl(tmp_path / "set" / ".cache" / "x.jsonl", sums(1))
    assert "set/part-2.jsonl" not in refusal(opened(tmp_path / "set"))
    assert "part-2.jsonl:4: malformed JSON" in refusal(opened(tmp_path / "set"))
    prompts = opened(tmp_path / "set", on_bad_row="drop").prompts()
    assert [p.id for p in prompts] == [f"set/{n}" for n in range(1, 7)]


def test_a_generator(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import random\n"
        "def numbers(top, step=1):\n    for n in range(0, top, step):\n        yield {'prompt': f'{n}?', 'answer': n}\n"
        "def impure():\n    yield {'prompt': f'{random.random()}?', 'answer': 1}\n"
        "def broken():\n    yield {'prompt': 'a', 'answer': 1}\n    raise KeyError('x')\n"
        "def strange():\n    yield 3\n"
        "three = 3\n"
        "def exits():\n    yield {'prompt': 'a', 'answer': 1}\n    raise SystemExit(0)\n"
    )
    rows = opened(f"{tmp_path}/own.py:numbers", settings={"top": 10, "step": 5})
    assert [(p.id, p.answer) for p in rows.prompts()] == [("own/1", "0"), ("own/2", "5")]
    assert [row.number for row in rows] == [1, 2], "it can be read again"
    impure = opened(f"{tmp_path}/own.py:impure")
    impure.prompts()
    assert "the generator gave different rows when it was read a second time" in refusal(impure)
    assert "the generator failed after row 1: KeyError" in refusal(opened(f"{tmp_path}/own.py:broken"))
    assert "the generator failed after row 1: SystemExit" in refusal(opened(f"{tmp_path}/own.py:exits"))
    assert "own.py:1: a mapping of columns is expected, this is a number" in refusal(
        opened(f"{tmp_path}/own.py:strange")
    )
    assert "the path names an object of type int, not a function" in refusal(opened(f"{tmp_path}/own.py:three"))
    assert "did you mean numbers?" in refusal(opened(f"{tmp_path}/own.py:number"))
    assert "missing 1 required positional argument: 'top'" in refusal(opened(f"{tmp_path}/own.py:numbers"))


def test_bad_rows_are_dropped_and_counted_if_that_is_asked_for(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [*sums(3), {"prompt": ""}, {"prompt": "x", "answer": None}, *sums(2, 5)])
    assert "2 of 7 rows are bad" in refusal(opened(file))
    rows = opened(file, on_bad_row="drop")
    assert len(rows.prompts()) == 5
    assert (rows.reading.read, rows.reading.bad, rows.reading.kept) == (7, 2, 5)
    assert rows.reading.problems == ("a.jsonl:4: 'prompt' is empty", "a.jsonl:5: 'answer' is null")
    assert "2 of 2 rows are bad" in refusal(opened(jsonl(tmp_path / "b.jsonl", [{}, {}]), on_bad_row="drop"))


def test_a_misnamed_column_ends_the_reading_early(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", sums(5000))
    message = refusal(opened(file, prompt="promt", on_bad_row="drop"))
    assert "1000 of the first 1000 rows are bad" in message
    assert "there is no column 'promt'; did you mean 'prompt'?" in message


def test_max_rows_counts_what_the_filters_leave(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", sums(100))
    rows = opened(file, max_rows=3, filters=[{"kind": "integer_answer", "low": 50}])
    assert [p.answer for p in rows.prompts()] == ["50", "51", "52"]
    assert not rows.reading.whole
    assert opened(file, max_rows=100).reading.kept == 100


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = jsonl(tmp_path / "a.jsonl", [{"chat": turns, "prompt": "q", "response": "r"}])
    assert list(opened(file, messages="chat").conversations()) == [Conversation("a/1", tuple(turns))]
    (made,) = opened(file, answer="response").conversations()
    assert [turn["content"] for turn in made.messages] == ["q", "r"]
    (prompt,) = opened(file, messages="chat").prompts()
    assert (prompt.messages, prompt.answer) == (tuple(turns[:1]), "b")
    jsonl(file, [{"chat": turns[:1]}])
    with pytest.raises(DataError, match=r"a.jsonl:1: 'chat' must end with an assistant message"):
        list(opened(file, messages="chat").conversations())


def test_columns_inside_columns_and_kept_ones(tmp_path: Path) -> None:
    row = {"prompt": "q", "grade": {"answer": "4", "by": "me"}, "level": 2, "long": "x" * 100}
    file = jsonl(tmp_path / "a.jsonl", [row])
    (prompt,) = opened(file, answer="grade.answer", keep=["level", "grade.by"]).prompts()
    assert (prompt.answer, prompt.data) == ("4", {"level": 2, "grade.by": "me"})
    assert "there is no value 'answr'; did you mean 'answer'?" in refusal(opened(file, answer="grade.answr"))
    assert "'level.x': 'x' is looked for in a number" in refusal(opened(file, answer="level.x"))


def test_reading_again_gives_the_same(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", sums(50))
    rows = opened(file, filters=[{"kind": "distinct"}])
    assert rows.prompts() == rows.prompts(), "a filter remembers nothing of the last reading"
    before = rows.content_hash
    jsonl(file, sums(49))
    assert opened(file).content_hash != before


def test_a_row_whose_values_are_no_json_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def rows():\n"
        "    yield {'prompt': 'a', 'answer': 1, 'more': {1: 'one', 'b': 'two'}}\n"
        "    own = []\n"
        "    own.append(own)\n"
        "    yield {'prompt': 'b', 'answer': 1, 'more': own}\n"
    )
    said = refusal(opened(f"{tmp_path}/own.py:rows"))
    assert "2 of 2 rows are bad" in said
    assert "own.py:1: its values cannot be written as JSON: " in said
    assert "own.py:2: its values cannot be written as JSON: Circular reference detected" in said


def test_a_row_with_json_in_it_that_is_nested_too_deep_is_a_bad_row(tmp_path: Path) -> None:
    deep = "[" * 50_000 + "]" * 50_000
    calls = [{"function": {"name": "f", "arguments": deep}}]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": calls}]
    rows: list[dict[str, object]] = [{"prompt": "1 + 1?", "answer": 2, "tools": deep}, {"prompt": turns, "answer": 2}]
    said = refusal(opened(jsonl(tmp_path / "a.jsonl", rows)))
    assert "2 of 2 rows are bad" in said
    assert "a.jsonl:1: its values are nested too deep" in said
