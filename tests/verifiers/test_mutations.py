"""Replies whose verdict is known: twenty wrong ones of each kind, which its verifier does not pay and a faulty one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lockstep.config import schema
from lockstep.types import Grade, Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.exact import Numeric, Text
from lockstep.verifiers.mutations import COUNT, right_reply, wrong_replies
from lockstep.verifiers.normalise import normalise_text
from lockstep.verifiers.python import UserFunction
from lockstep.verifiers.selftest import oddities, scored_garbage, self_test

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"kind": "numeric"}, ["42", "0", "-3/4", "1", "0.5", "1e3", "50\\%", "-1", "1000000"]),
    ({"kind": "numeric", "tolerance": 0.1}, ["42", "0.5", "100"]),
    ({"kind": "text"}, ["Paris", "a", "x", "{a} and {b}", "New York"]),
    ({"kind": "choice"}, ["B", "(D)"]),
    ({"kind": "choice", "options": 2}, ["A"]),
    ({"kind": "choice", "several": True}, ["A, C"]),
    ({"kind": "set"}, ["1, 2", "x; y", "\\{1, 2, 3\\}", "(1,2), (3,4)", "7"]),
    ({"kind": "set", "repeats": "ignore"}, ["1, 2"]),
    ({"kind": "regex", "pattern": "#### (-?[0-9.,]+)", "compare": "number", "shown_as": "#### ANSWER"}, ["42", "7.5"]),
    ({"kind": "regex", "pattern": "<a>(.*?)</a>", "shown_as": "<a>ANSWER</a>"}, ["Paris"]),
    ({"kind": "json"}, ['{"a": 1, "b": [1, {"c": "x"}]}', "3", '"x"', "[]", "true"]),
    (
        {"kind": "math"},
        ["42", "0", "1", "-1/2", "x^2+1", "(0,1]", "x=2", "\\frac{\\pi}{2}", "x \\in [1, \\infty)", "\\text{even}"],
    ),
]


@pytest.mark.parametrize(
    ("settings", "references"), CASES, ids=lambda value: value.get("kind") if isinstance(value, dict) else ""
)
def test_twenty_wrong_replies_are_paid_nothing_and_the_right_one_1(settings, references):
    verifier = build_verifier(TypeAdapter(schema.Verifier).validate_python(settings))
    for reference in references:
        prompt = Prompt("t/1", (), reference)
        replies = wrong_replies(verifier, prompt)
        assert len(set(replies)) == len(replies) == COUNT, reference
        assert right_reply(verifier, prompt) not in replies
        assert self_test(verifier, prompt, mutations=True) == []


FAULTS = {
    "the reference anywhere": lambda answer, reference: reference in answer,
    "its first characters": lambda answer, reference: answer[: len(reference)] == reference,
    "without its sign": lambda answer, reference: answer.lstrip("-") == reference,
    "nothing at all": lambda answer, reference: answer == "",
    "off by one": lambda answer, reference: answer.isdigit() and abs(int(answer) - int(reference)) <= 1,
    "ten times": lambda answer, reference: answer.rstrip("0") == reference.rstrip("0"),
}


class Faulty(Numeric):
    """Pays in one more case than it should."""

    def __init__(self, name: str) -> None:
        super().__init__("none", 1e-6)
        object.__setattr__(self, "fault", FAULTS[name])

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        grade = Numeric("none", 1e-6).grade(prompt, reply)
        return Grade(1.0) if self.fault(grade.extracted or "", prompt.answer) else grade  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FAULTS)
def test_a_grader_with_a_fault_is_found_by_a_mutation(name):
    problems = self_test(Faulty(name), Prompt("t/1", (), "42"), mutations=True)
    assert any("the wrong reply" in problem for problem in problems) or name == "nothing at all"
    assert problems


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000))
def test_no_number_has_a_wrong_mutation(value):
    for verifier in (Numeric("none", 1e-6), Numeric("last_number", 1e-6)):
        assert self_test(verifier, Prompt("t/1", (), str(value)), mutations=True) == []


@given(st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="\\{}$"), min_size=1, max_size=20))
def test_no_text_has_a_wrong_mutation(text):
    assume(normalise_text(text))  # "." is empty
    problems = self_test(Text("none"), Prompt("t/1", (), text), mutations=True)
    assert [problem for problem in problems if "the wrong reply" in problem] == []


def test_oddities_of_a_grader_of_ones_own_are_told(tmp_path):
    (tmp_path / "own.py").write_text(
        "import itertools\nn = itertools.count()\n"
        "def pays_all(prompt, reply): return 1\n"
        "def counts(prompt, reply): return next(n)\n"
        "def good(prompt, reply): return float('42' in reply)\n"
    )

    def told(name: str) -> list[str]:
        verifier = build_verifier(schema.PythonVerifier(path=f"{tmp_path}/own.py:{name}", workers=1))
        assert isinstance(verifier, UserFunction)
        return oddities(verifier, Prompt("t/1", (), "42"))

    assert told("good") == []
    assert told("pays_all")[0] == "t/1: an empty reply scores 1, as the reference in its best form or more (1)"
    assert told("counts")[0] == "t/1: the reference in its best form scores 5.0, and 6.0 when it is graded again"


def test_a_grader_that_reads_the_bare_answer_alone_is_not_odd(tmp_path):
    """The README's own example: it takes the last word, and a boxed answer is no number."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    code = next(part for part in readme.split("```python\n") if part.startswith("def grade")).partition("```")[0]
    (tmp_path / "own.py").write_text(code + "\ndef generous(prompt, reply): return max(0.1, grade(prompt, reply))\n")
    for name in ("grade", "generous"):  # the second pays a little for anything, the reference in a box included
        verifier = build_verifier(schema.PythonVerifier(path=f"{tmp_path}/own.py:{name}", workers=1))
        assert oddities(verifier, Prompt("t/1", (), "3000")) == []
        assert scored_garbage(verifier, Prompt("t/1", (), "3000")) == ""
