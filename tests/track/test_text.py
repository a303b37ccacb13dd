from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from lockstep.track.text import cell_width, one_line, plain_table, reading_line, visible
from tests.track.runs import HOSTILE


def test_what_a_terminal_would_act_on_is_shown_instead() -> None:
    assert visible("\x1b[2J\x07\x00\r\x7f\x9b") == "\\x1b[2J\\x07\\x00\\r\\x7f\\x9b"
    assert visible("a\u202eb\u2066\ud800\u200b") == "a\\u202eb\\u2066\\ud800\\u200b"
    assert visible("two\nlines\tand é, 数, 👍, א, \\x1b") == "two\nlines\tand é, 数, 👍, א, \\x1b"


@given(st.text(st.characters()))
def test_no_text_leaves_anything_but_printable_characters(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(c) not in {"Cc", "Cf", "Cs"} for c in shown if c not in "\n\t")
    shown.encode("utf-8")
    assert "\n" not in one_line(text)


def test_one_line_is_cut_with_a_mark() -> None:
    assert one_line("a\nb\tc") == "a⏎b c"
    assert one_line("abcdef", 4) == "abc…"
    assert one_line("abcd", 4) == "abcd"


def test_a_table_aligns_numbers_right_and_wide_characters_by_their_width() -> None:
    lines = plain_table(
        "Scores", ("task", "accuracy", "p"), [("数学", "31.5 %", "0.01"), ("sums", "8.0 %", "–")]
    ).split("\n")
    assert lines == [
        "Scores",
        "task  accuracy     p",
        "────  ────────  ────",
        "数学    31.5 %  0.01",
        "sums     8.0 %     –",
    ]
    assert cell_width("é") == 1


def test_cells_cannot_break_a_table() -> None:
    assert "\x1b" not in plain_table("", ("a", "b"), [(HOSTILE, "x\ny")])
    assert plain_table("", ("a",), []).split("\n") == ["a", "─"]


def test_how_a_reply_was_read_is_said_in_words() -> None:
    assert reading_line("7", "boxed", "7") == "extracted '7' by boxed, answer '7'"
    assert reading_line(None, "none", "7") == "no answer was found in the reply, answer '7'"
    assert reading_line(None, "", "7") == "graded as a whole, answer '7'"
    assert reading_line(None, "environment", "") == "graded by the environment"
