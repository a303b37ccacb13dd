from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import RunDirectoryError
from lockstep.track.jsonl import JsonlFile, dumps, number, read_jsonl


@dataclass(frozen=True)
class Pair:
    left: float
    right: tuple[int, ...]


def test_non_finite_numbers_are_written_as_strings_that_strict_json_accepts() -> None:
    text = dumps({"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": Pair(math.nan, (1, 2))})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": "nan", "b": ["inf", "-inf", 1.5], "c": {"left": "nan", "right": [1, 2]},
    }  # fmt: skip
    assert [number(value) for value in json.loads(text)["b"]] == [math.inf, -math.inf, 1.5]
    assert math.isnan(number("nan"))


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        dumps({"a": object()})
    with pytest.raises(TypeError, match="not a number"):
        number("seven")
    with pytest.raises(TypeError, match="beyond those of 64 bits"):
        number(10**400)


@given(st.floats())
def test_every_float_survives(value: float) -> None:
    back = number(json.loads(dumps([value]))[0])
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_lines_with_hostile_text_stay_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    texts = ["a\nb", "\u2028", "\x00", "\ud800", "\r"]
    with JsonlFile(path) as file:
        for text in texts:
            file.append({"text": text})
    assert len(path.read_bytes().splitlines()) == len(texts)
    assert [row["text"] for row in read_jsonl(path)] == texts


def test_a_file_cut_at_any_byte_of_its_last_line_is_read_and_continued(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with JsonlFile(whole) as file:
        for step in range(3):
            file.append({"step": step, "note": 'braces } " and \\ in a string', "values": [1.5, math.nan]})
    data = whole.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    for cut in range(start, len(data) + 1):
        path = tmp_path / f"cut{cut}.jsonl"
        path.write_bytes(data[:cut])
        kept = 3 if cut >= len(data) - 1 else 2  # only the newline may be missing from a line that is kept
        assert [row["step"] for row in read_jsonl(path)] == list(range(kept)), cut
        with JsonlFile(path) as file:
            assert file.torn == (cut - start if kept == 2 else 0), cut
            file.append({"step": 9})
        assert [row["step"] for row in read_jsonl(path)] == [*range(kept), 9], cut
        aside = path.with_name(path.name + ".torn")
        assert (aside.read_bytes() == data[start:cut] + b"\n") if file.torn else not aside.exists()


def test_a_broken_line_in_the_middle_is_named_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"x\.jsonl:2"):
        read_jsonl(path)
    path.write_text('{"a": 1}\n[2]\n{"a": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"x\.jsonl:2"):
        read_jsonl(path)


def test_zeros_left_by_a_power_cut_are_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"\0" * 100)
    with JsonlFile(path) as file:
        assert file.torn == 100
        file.append({"a": 2})
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []
