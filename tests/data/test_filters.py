from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep.config.data import FILTERS, Data
from lockstep.config.section import meanings
from lockstep.data.filters import as_integer
from lockstep.data.load import Rows, open_rows
from lockstep.errors import DataError, LockstepError


def opened(folder: Path, rows: list[dict[str, object]], *filters: dict[str, object], **settings: object) -> Rows:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_rows(Data.model_validate({"source": str(path), "filters": filters, **settings}), where="task.data")


def kept(folder: Path, rows: list[dict[str, object]], *filters: dict[str, object], **settings: object) -> list[int]:
    return [row.number for row in opened(folder, rows, *filters, **settings)]


def with_column(name: str, *values: object) -> list[dict[str, object]]:
    return [{"prompt": f"question {n}", "answer": n, name: value} for n, value in enumerate(values)]


def answers(*values: object) -> list[dict[str, object]]:
    return [{"prompt": f"question {n}", "answer": value} for n, value in enumerate(values)]


def test_among_compares_value_and_type(tmp_path: Path) -> None:
    rows = with_column("ok", "Yes", "yes", True, 1, None, ["Yes"])
    assert kept(tmp_path, rows, {"kind": "among", "columns": ["ok"], "values": ["Yes", True]}) == [1, 3]
    assert kept(tmp_path, rows, {"kind": "not_among", "columns": ["ok"], "values": ["Yes", True]}) == [2, 4, 5, 6]
    two = [{**row, "also": "Yes"} for row in rows]
    assert kept(tmp_path, two, {"kind": "among", "columns": ["ok", "also"], "values": ["Yes"]}) == [1]
    with pytest.raises(DataError, match="there is no column 'okay'; did you mean 'ok'"):
        kept(tmp_path, rows, {"kind": "among", "columns": ["okay"], "values": ["Yes"]})


def test_mentions(tmp_path: Path) -> None:
    rows = with_column("source", "AMC 12", "olympiads", None, "Straße")
    assert kept(tmp_path, rows, {"kind": "mentions", "column": "source", "texts": ["amc", "STRASSE"]}) == [1, 4]
    assert kept(tmp_path, rows, {"kind": "not_mentions", "column": "source", "texts": ["amc"]}) == [2, 3, 4]
    with pytest.raises(DataError, match="'answer' must be text, this is a number"):
        kept(tmp_path, rows, {"kind": "mentions", "column": "answer", "texts": ["amc"]})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("-3", -3), ("+4", 4), ("\u22125", -5), ("1,234", 1234), ("$1{,}234$", 1234), (" 7. ", 7), ("007", 7),
        ("\\text{12}", 12), ("0", 0), ("-0", 0),
        ("12.0", None), ("24/2", None), ("12 cm", None), ("1,23", None), ("", None), ("-", None), ("٣", None), ("1e3", None),
        ("x=3", None), ("3, 4", None), ("--3", None), ("5%", None), ("proof", None), ("9" * 1001, None),
    ],
)  # fmt: skip
def test_whole_numbers(text: str, number: int | None) -> None:
    assert as_integer(text) == number


def test_integer_answers_between_bounds(tmp_path: Path) -> None:
    rows = answers("1", 2, 3.5, "x", None, "-4", 500, True)
    assert kept(tmp_path, rows, {"kind": "integer_answer"}) == [1, 2, 6, 7]
    assert kept(tmp_path, rows, {"kind": "integer_answer", "low": 0, "high": 100}) == [1, 2]


def test_gradable(tmp_path: Path) -> None:
    rows = answers("1/2", "Paris", None, "3")
    assert kept(tmp_path, rows, {"kind": "gradable"}) == [1, 4]
    assert kept(tmp_path, rows, {"kind": "gradable", "verifier": {"kind": "text"}}) == [1, 2, 4]


@pytest.mark.parametrize("kind", ["length", "integer_answer"])
def test_bounds_that_leave_no_row_are_refused(kind: str) -> None:
    Data.model_validate({"source": "rows.jsonl", "filters": [{"kind": kind, "low": 5, "high": 5}]})
    with pytest.raises(ValidationError, match="low=6 is above high=5: no row would be left"):
        Data.model_validate({"source": "rows.jsonl", "filters": [{"kind": kind, "low": 6, "high": 5}]})


def test_lengths(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "x" * n, "answer": n} for n in (1, 5, 9)]
    assert kept(tmp_path, rows, {"kind": "length", "low": 2}) == [2, 3]
    assert kept(tmp_path, rows, {"kind": "length", "high": 5}) == [1, 2]
    digits: list[dict[str, object]] = [{"prompt": "7" * n, "answer": n} for n in (1, 5, 9)]
    found = opened(tmp_path, digits, {"kind": "tokens", "high": 5, "model": str(tiny_model_dir)})
    assert [row.number for row in found] == [1, 2], "the tiny tokenizer makes each digit a token"
    assert found.reading.stages[0].examples[0].looked_at == "9 tokens"


def test_distinct(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": text, "answer": 1} for text in ("a b", "A  b", "a b", "c")]
    assert kept(tmp_path, rows, {"kind": "distinct"}) == [1, 4]
    assert kept(tmp_path, rows, {"kind": "distinct", "match": "exact"}) == [1, 2, 4]


def test_a_bad_row_does_not_make_its_good_copy_a_repeat(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "2 + 2", "answer": value} for value in (None, 4, 4)]
    found = opened(tmp_path, rows, {"kind": "distinct"}, on_bad_row="drop")
    assert [prompt.id for prompt in found.prompts()] == ["a/2"]
    assert (found.reading.bad, found.reading.stages[0].dropped) == (1, 1)


def test_not_in_other_data(tmp_path: Path) -> None:
    words = " ".join(f"w{n}" for n in range(20))
    (tmp_path / "held.jsonl").write_text(json.dumps({"problem": words, "answer": 1}) + "\n")
    other = {"kind": "not_in", "sources": [str(tmp_path / "held.jsonl")], "preset": "numinamath-1.5"}
    close = "Now: " + words.replace(" ", ", ", 4) + "?"
    near = " ".join(f"w{n}" for n in range(12))
    rows: list[dict[str, object]] = [
        {"prompt": p, "answer": 1} for p in (words, words.upper() + " ", close, near, "new")
    ]
    assert kept(tmp_path, rows, {**other, "match": "exact"}) == [2, 3, 4, 5]
    assert kept(tmp_path, rows, other) == [3, 4, 5]
    assert kept(tmp_path, rows, {**other, "match": "ngram"}) == [4, 5], "twelve words in a row are not thirteen"
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": words}) + "\n")  # a question without an answer
    bare = {"kind": "not_in", "sources": [str(tmp_path / "held.jsonl")]}
    assert kept(tmp_path, rows, bare) == [3, 4, 5]
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": words}) + "\n")
    with pytest.raises(DataError, match="there is no column 'prompt'") as caught:
        kept(tmp_path, rows, bare)
    assert caught.value.fix.endswith("rename the column of their questions to prompt, or set the filter's preset")
    for wrong, why in (
        ("", "at least 1 character"),
        ("own.py", "write own.py:NAME"),
        ("https://a.b/c", "only hub ids"),
    ):
        with pytest.raises(ValidationError, match=why):
            Data.model_validate({"source": "a.jsonl", "filters": [{"kind": "not_in", "sources": [wrong]}]})


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def even(row):\n    return row['answer'] % 2 == 0\n"
        "def wrong(row):\n    return 'yes'\n"
        "def fails(row):\n    return row['x']\n"
        "def exits(row):\n    raise SystemExit(0)\n"
    )
    rows = answers(0, 1, 2)
    assert kept(tmp_path, rows, {"kind": "python", "path": f"{tmp_path}/own.py:even"}) == [1, 3]
    with pytest.raises(DataError, match="the filter function returned 'yes' for row 1"):
        kept(tmp_path, rows, {"kind": "python", "path": f"{tmp_path}/own.py:wrong"})
    with pytest.raises(DataError, match=r"the filter function failed at row 1: KeyError: 'x' \(.*own.py:6\)"):
        kept(tmp_path, rows, {"kind": "python", "path": f"{tmp_path}/own.py:fails"})
    with pytest.raises(DataError, match="the filter function failed at row 1: SystemExit"):
        kept(tmp_path, rows, {"kind": "python", "path": f"{tmp_path}/own.py:exits"})
    with pytest.raises(LockstepError, match="did you mean even"):
        kept(tmp_path, rows, {"kind": "python", "path": f"{tmp_path}/own.py:evn"})


def test_each_stage_counts_what_reached_it_and_shows_five(tmp_path: Path) -> None:
    rows = answers(*range(1000), *["x"] * 3)
    low = {"kind": "integer_answer", "name": "small", "high": 99}
    even = {"kind": "length", "name": "short", "high": len("question 9")}
    found = opened(tmp_path, rows, low, even)
    assert len(list(found)) == 10
    small, short = found.reading.stages
    assert (small.name, small.kind, small.before, small.dropped, small.after) == (
        "small",
        "integer_answer",
        1003,
        903,
        100,
    )
    assert (short.before, short.dropped, short.after) == (100, 90, 10)
    numbers = [example.number for example in small.examples]
    assert len(numbers) == 5
    assert numbers == sorted(numbers)
    assert all(number > 100 for number in numbers)
    assert numbers[-1] - numbers[0] > 100, "spread over the file, not its first five"
    assert small.examples[0].place == f"a.jsonl:{numbers[0]}"
    assert small.examples[0].looked_at == f"answer = {numbers[0] - 1}"
    assert small.examples[0].question == f"question {numbers[0] - 1}"
    assert opened(tmp_path, rows, low, even).reading.stages == (small, short), "the same five each time"


def test_filters_that_leave_nothing_say_which(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row passes the filters: of 3 rows, the filter none drops the most, 3"):
        kept(tmp_path, answers(1, 2, 3), {"kind": "integer_answer", "name": "none", "low": 9})


def test_every_filter_has_a_help_text() -> None:
    for section in FILTERS:
        assert section.__doc__
        assert all(name in meanings(section) or name in ("kind", "verifier") for name in section.model_fields)
