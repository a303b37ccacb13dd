"""Errors of other libraries in one line."""

from __future__ import annotations

from lockstep.text import reason_of


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_is_told_in_one_line_of_limited_length() -> None:
    assert reason_of(ValueError("first\n  second\tthird")) == "ValueError: first second third"
    assert reason_of(KeyError("x" * 500), 20) == "KeyError: 'xxxxxxxxx…"
    assert reason_of(OSError()) == "OSError"


def test_an_error_without_readable_text_is_told_too() -> None:
    assert reason_of(Broken()) == "Broken: (its message cannot be read)"
    assert reason_of(ValueError("half of a pair: \ud800")) == "ValueError: half of a pair: ?"
