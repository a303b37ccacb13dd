"""Replies that are made to break a grader: each returns the right verdict within 50 ms (median of 5)."""

from __future__ import annotations

import time
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.types import Prompt
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.exact import Numeric, Text

PROMPT = Prompt("t/1", ({"role": "user", "content": "?"},), "42")
N = 10**5
# name: (reply, reward by numeric with last_number)
HOSTILE = {
    "open braces": ("{" * N, 0),
    "nested braces around": ("{" * N + "42" + "}" * N, 0),
    "nested braces in a box": ("\\boxed{" + "{" * N + "42" + "}" * N + "}", 0),
    "boxes around": ("\\boxed{" * N + "42" + "}" * N, 0),
    "boxes, one closed": ("\\boxed{" * N + "41}", 0),
    "million digits": ("4" * 10**6, 0),
    "million digits in a box": ("\\boxed{" + "4" * 10**6 + "}", 0),
    "4000 digits in a box": ("\\boxed{" + "4" * 4000 + "}", 0),
    "leading zeros": ("\\boxed{" + "0" * 4000 + "42}", 0),
    "huge exponent": ("\\boxed{1e999999999}", 0),
    "huge negative exponent": ("\\boxed{42e-999999999}", 0),
    "largest exponent": ("\\boxed{42e10000}", 0),
    "huge power": ("\\boxed{9 \\times 10^{9999999999}}", 0),
    "tower": ("\\boxed{9^9^9^9}", 0),
    "commas": ("," * N, 0),
    "digits and commas": ("\\boxed{" + "4," * 2000 + "}", 0),
    "million backslashes": ("\\" * 10**6, 0),
    "backslashes in a box": ("\\boxed{" + "\\" * 4000 + "}", 0),
    "boxes without braces": ("\\boxed " * N, 0),
    "box and spaces": ("\\boxed" + " " * 10**6 + "{41}", 0),
    "lone surrogates": ("\ud800" * N + "\\boxed{42}", 1),
    "lone surrogate in the box": ("\\boxed{42\udfff}", 0),
    "NUL bytes": ("\0" * N + "\\boxed{42}", 1),
    "NUL in the box": ("\\boxed{4\x002}", 0),
    "other scripts' digits": ("\\boxed{٤٢}", 0),
    "mixed scripts' digits": ("\\boxed{4２}", 0),
    "right-to-left override": ("\\boxed{\u202e24}", 0),
    "right-to-left mark": ("\\boxed{\u200f42}", 0),
    "combining marks": ("\\boxed{42" + "\u0301" * 4000 + "}", 0),
    "dollars": ("\\boxed{" + "$" * 4000 + "}", 0),
    "text commands": ("\\boxed{" + "\\text{" * 600 + "}" * 601, 0),
    "nested fractions": ("\\boxed{" + "\\frac{" * 60 + "}" * 61, 0),
    "slashes": ("\\boxed{" + "/" * 4000 + "}", 0),
    "percents": ("\\boxed{42" + "%" * 4000 + "}", 0),
    "minus signs": ("-" * 10**6 + "41", 0),
    "points": ("4." * 10**5, 0),
    "think tags": ("<think>" * N + "42", 0),
    "end of thinking": ("</think>" * N + "\\boxed{42}", 1),
    "channels": ("<|channel|>final<|message|>" * N + "\\boxed{42}", 1),
    "channels without message": ("<|channel|>final" * N + "\\boxed{42}", 0),
    "end tokens": ("\\boxed{42}" + "</s>" * 1000, 1),
    "million newlines": ("\\boxed{42}" + "\n" * 10**6, 0),
    "a megabyte of prose": ("The sum is 41. " * 70_000 + "\\boxed{42}", 1),
}


@pytest.mark.parametrize("verifier", [Numeric("last_number", 1e-6), Text("last_line")], ids=["numeric", "text"])
@pytest.mark.parametrize("name", HOSTILE)
def test_verdict_and_time(name, verifier):
    reply, reward = HOSTILE[name]
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        grade = verifier.grade(PROMPT, reply)
        seconds.append(time.thread_time() - start)
    assert grade.reward == reward
    assert median(seconds) < 0.05


def test_hostile_references_are_refused_not_raised():
    for answer in ("4" * 10**6, "1e999999999", "\ud800", "\0", "{" * N):
        grade = Numeric("none", 1e-6).grade(Prompt("t/1", PROMPT.messages, answer), "\\boxed{42}")
        assert grade.reward is None
        assert grade.error is not None
        grade.error.encode("utf-8")


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)
PIECES = (*"{}$\\4,.-/%e^ \n\ud800٤", "\\boxed{", "\\frac{", "\\text{", "\\times 10^")
TAGS = ("<think>", "</think>", "<|channel|>final", "<|message|>")
LATEX = st.lists(st.sampled_from([*PIECES, *TAGS]), max_size=60).map("".join)


@given(
    ANY_TEXT | LATEX,
    st.sampled_from([Numeric("none", 1e-6), Numeric("last_number", 0.0), Text("none"), Text("last_line")]),
)
def test_any_text_is_scored(reply: str, verifier: Verifier):
    grade = verifier.grade(PROMPT, reply)
    assert grade.reward in (0.0, 1.0)
    assert set(grade.metrics) == {"correct", "has_answer", "boxed", "boxed_in_final"}
    assert grade.metrics["has_answer"] == float(bool(grade.extracted))
    (grade.extracted or "").encode("utf-8")  # can be stored


@given(ANY_TEXT | LATEX)
def test_any_reference_is_scored_or_refused(answer: str):
    for verifier in (Numeric("none", 1e-6), Text("none")):
        grade = verifier.grade(Prompt("t/1", PROMPT.messages, answer), "\\boxed{42}")
        assert (grade.reward is None) == (grade.error is not None)


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{4}", "4,", "\\", "<think>", "</think>", "<|channel|>final<|message|>", "a ", "-"]
)
def test_time_grows_at_most_linearly(unit):
    verifier = Numeric("last_number", 1e-6)

    def seconds(copies: int) -> float:
        reply, best = unit * copies, 1.0
        for _ in range(5):
            start = time.thread_time()
            verifier.grade(PROMPT, reply)
            best = min(best, time.thread_time() - start)
        return best

    # 16 times the text: 16 times the time or less. Quadratic time would be 256 times as long.
    assert seconds(320_000) < 64 * max(seconds(20_000), 1e-4)
