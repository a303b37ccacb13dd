from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verifiers.extract import MAX_DEPTH, REGION, Answer, last_boxed, last_number, read_answer
from tests.verifiers.doc_tables import rows


@pytest.mark.parametrize(("reply", "fallback", "text", "method"), rows("extraction"))
def test_documented_cases(reply, fallback, text, method):
    answer = read_answer(reply, fallback)
    assert (answer.text, answer.method) == (text, method)


def test_the_document_has_the_cases():
    assert len(rows("extraction")) == 20


def test_nothing_is_read_without_a_fallback():
    assert read_answer("7", "none") == Answer(None, "none")
    assert read_answer("", "last_number") == Answer(None, "none")
    assert read_answer(" \n\n", "last_line") == Answer(None, "none")


def test_escaped_braces_are_not_braces():
    assert read_answer(r"\boxed{\{1, 2\}}", "none").text == r"\{1, 2\}"
    assert read_answer(r"\boxed{\{}", "none").text == r"\{"
    assert read_answer(r"\boxed{3\}", "none").text is None


def test_strays_before_and_after_a_box_do_not_matter():
    assert read_answer("}} {{ a } \\boxed{4} } {", "none").text == "4"


def test_box_needs_its_brace():
    assert read_answer(r"\boxed 4 {5}", "none").text is None
    assert read_answer(r"\boxedx{4}", "none").text is None


def test_only_the_end_of_a_reply_is_read():
    box = r"\boxed{42}"
    assert read_answer(box + "." * (REGION - len(box)), "none").text == "42"
    assert read_answer(box + "." * (REGION - len(box) + 1), "none").text is None


def test_depth_limit_is_exact():
    box = r"\boxed{42}"
    assert last_boxed("{" * (MAX_DEPTH - 1) + box) is not None
    assert last_boxed("{" * MAX_DEPTH + box) is None


def test_boxed_in_final_is_the_last_fifth():
    box = r"\boxed{42}"  # 10 characters
    assert read_answer("." * 80 + box + "." * 10, "none").boxed_in_final  # starts at 80 of 100
    assert not read_answer("." * 79 + box + "." * 11, "none").boxed_in_final  # starts at 79 of 100
    long = "." * 90_000
    assert read_answer(long + box, "none").boxed_in_final
    assert not read_answer("<think>" + "." * 10 + "</think>" + box + "." * 200, "none").boxed_in_final


def test_thinking_is_left_out():
    assert read_answer(r"\boxed{1}</think>no answer", "none").text is None
    assert read_answer(r"<think>a</think>b<think>\boxed{2}</think>\boxed{3}", "none").text == "3"
    assert read_answer(r"\boxed{1} <think>wait", "none").text == "1"
    assert read_answer("<|channel|>final <|constrain|>json<|message|>12<|end|>13", "last_number").text == "12"
    assert read_answer("<|channel|>final", "last_number").text is None


def test_last_line_drops_end_tokens():
    assert read_answer("a\nParis<|im_end|>\n</s>", "last_line").text == "Paris"


def test_a_number_cut_by_the_region_is_not_read():
    tail = " " * (REGION - 2)
    assert read_answer("123" + tail, "last_number").text is None
    assert read_answer(" 23" + tail, "last_number").text == "23"
    assert read_answer("123" + tail[:-1] + "7", "last_number").text == "7"


PATTERN = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


@given(st.text(alphabet="0123456789,.- ax", max_size=60))
def test_last_number_is_the_pattern(text):
    matches = PATTERN.findall(text)
    assert last_number(text) == (matches[-1].rstrip(",") if matches else None)


def test_last_number_at_the_edges():
    assert [last_number(text) for text in ("4-", "-4", "-", "4,", "4.", ".4", "1.2.3", "7--8")] == [
        *("4", "-4", None, "4", "4", "4", "3", "-8")
    ]


def brute_force_last_box(text: str) -> str | None:
    """The content of the last-starting box whose braces balance, by counting from every start."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "4", "a "]), max_size=25).map("".join))
def test_last_boxed_is_brute_force(text):
    box = last_boxed(text)
    assert (box.content if box else None) == brute_force_last_box(text)
