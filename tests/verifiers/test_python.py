from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.build import build_verifier

PROMPT = Prompt("t/1", ({"role": "user", "content": "4 + 3"},), "7", data={"unit": "cm"})


def verifier_of(tmp_path: Path, code: str, name: str = "grade") -> Verifier:
    file = tmp_path / "grader.py"
    file.write_text(code, encoding="utf-8")
    return build_verifier(schema.PythonVerifier(path=f"{file}:{name}"))


def grade_of(tmp_path: Path, body: str) -> Grade:
    return verifier_of(tmp_path, f"import math\ndef grade(prompt, reply):\n    {body}\n").grade(PROMPT, "it is 7 cm")


@pytest.mark.parametrize(
    ("body", "reward", "correct"),
    [
        ("return prompt.answer in reply", 1.0, 1.0),
        ("return False", 0.0, 0.0),
        ("return 0.25", 0.25, 0.0),
        ("return 2", 2.0, 1.0),
        ("return -1", -1.0, 0.0),
        ("return float(reply.endswith(prompt.data['unit']))", 1.0, 1.0),
        ("import numpy as np; return np.float32(0.5)", 0.5, 0.0),
        ("import numpy as np; return np.bool_(True)", 1.0, 1.0),
        ("from decimal import Decimal; return Decimal('0.5')", 0.5, 0.0),
    ],
)
def test_numbers_become_rewards(tmp_path, body, reward, correct):
    grade = grade_of(tmp_path, body)
    assert (grade.reward, grade.metrics, grade.error) == (reward, {"correct": correct}, None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 'yes'", "the grader returned str, not a number, bool or Grade"),
        ("return None", "the grader returned NoneType, not a number, bool or Grade"),
        ("return [1.0]", "the grader returned list, not a number, bool or Grade"),
        ("return math.nan", "the grader returned nan, not a finite number"),
        ("return -math.inf", "the grader returned -inf, not a finite number"),
        ("return 1e308", "the grader returned 1e+308, beyond 1e+300"),
        ("return 10 ** 400", "OverflowError: int too large to convert to float"),
        ("raise ValueError('odd\\nreply')", "ValueError: odd reply ({file}:3)"),
        ("return helper(prompt)", "NameError: name 'helper' is not defined ({file}:3)"),
        ("return math.sqrt(-1)", "ValueError: "),
        ("raise SystemExit(3)", "SystemExit: 3 ({file}:3)"),
        ("return grade(prompt, reply)", "RecursionError: "),
    ],
)
def test_mistakes_are_unscored_and_never_0(tmp_path, body, error):
    grade = grade_of(tmp_path, body)
    assert grade.reward is None
    assert grade.error is not None
    assert grade.error.startswith(error.format(file=tmp_path / "grader.py"))


def test_an_error_without_a_readable_message(tmp_path):
    code = "class Odd(Exception):\n    def __str__(self): raise ValueError\ndef grade(p, r):\n    raise Odd\n"
    assert (
        verifier_of(tmp_path, code).grade(PROMPT, "").error
        == f"Odd: (its message cannot be read) ({tmp_path}/grader.py:4)"
    )


def test_a_grade_is_kept_and_checked(tmp_path):
    code = "from lockstep.types import Grade\ndef grade(prompt, reply):\n    return Grade({})\n"

    def grade(arguments: str) -> Grade:
        return verifier_of(tmp_path, code.format(arguments)).grade(PROMPT, "")

    assert grade("0.5, {'style': 0.2}, '7', 'own'") == Grade(0.5, {"correct": 0.0, "style": 0.2}, "7", "own")
    assert grade("0.5, {'correct': 1}").metrics == {"correct": 1.0}
    assert grade("None, error='no judge'").error == "no judge"
    assert grade("None").error == "the grader gave no reward and no error"
    assert grade("float('nan')").error == "the grader's Grade has the reward nan, not a finite number"
    assert grade("1.0, {'style': float('inf')}").error == "the grader's metric 'style' is inf, not a finite number"
    named = grade("0.5, {'style': 'good', 'parts': {'a': 1}, 3: None, 'depth': 2}")
    assert (named.reward, named.metrics, named.error) == (0.5, {"correct": 0.0, "depth": 2.0}, None)
    assert named.facts == {"style": "good", "parts": "{'a': 1}", "3": "None"}
    texts = grade("1.0, extracted=42, method=None")
    assert (texts.reward, texts.extracted, texts.method) == (1.0, "42", "")
    assert grade("None, error=ValueError('x')").error == "ValueError('x')"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (
            "def grade(reply): return 1",
            "grade",
            "the function takes (reply), but is called with 2 positional arguments",
        ),
        ("def grade(a, b, c): return 1", "grade", "the function takes (a, b, c), but is called with 2"),
        (
            "def grade(*, prompt, reply): return 1",
            "grade",
            "the function takes (*, prompt, reply), but is called with 2",
        ),
        ("async def grade(a, b): return 1", "grade", "the function is async"),
        ("from math import log as grade", "grade", "its parameters are not known: no signature found for builtin"),
        ("grade = 3", "grade", "the path names an object of type int, not a function"),
        ("def grades(a, b): return 1", "grade", "did you mean grades?"),
        ("def grade(a, b) return 1", "grade", "SyntaxError"),
        ("import not_there_at_all", "grade", "ModuleNotFoundError"),
        ("x = 1\nraise SystemExit", "grade", "grader.py:2"),
    ],
)
def test_refused_when_it_is_built(tmp_path, code, name, message):
    with pytest.raises(TaskError) as error:
        verifier_of(tmp_path, code, name)
    assert message in str(error.value)
    assert str(tmp_path / "grader.py") in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskError, match="there is no such file"):
        build_verifier(schema.PythonVerifier(path=f"{tmp_path}/none.py:grade"))


def test_extra_defaults_and_dataclasses_work(tmp_path):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    pays: float = 0.5\n"
        "def grade(prompt, reply, rule=Rule()):\n    return rule.pays\n"
    )
    assert verifier_of(tmp_path, code).grade(PROMPT, "").reward == 0.5
