"""No verifier runs what a reply says as code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers import no_eval
from lockstep.verifiers.build import build_verifier
from tests.verifiers.gym_attacks import attacks

SECRET = "LOCKSTEP_TEST_KEY"


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "numeric"},
        {"kind": "text"},
        {"kind": "choice"},
        {"kind": "set"},
        {"kind": "regex"},
        {"kind": "json", "json_schema": {"type": "string", "pattern": "^[0-9]+$"}, "equal": False},
        {"kind": "math"},
    ],
)
def test_no_verifier_runs_a_reply(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "1")
    mark, answer = tmp_path / "ran", {"choice": "B", "regex": "a+"}.get(settings["kind"], "42")
    verifier = build_verifier(TypeAdapter(schema.Verifier).validate_python(settings))
    for attack in attacks(answer, str(mark), SECRET):
        for reply in (f"\\boxed{{{attack}}}", attack):
            assert verifier.grade(Prompt("p", (), answer), reply).reward == 0, attack
        assert not mark.exists(), attack


CODE = """
import sys
from lockstep.verifiers import no_eval, symbolic
work = symbolic.load()
mark = sys.argv[1]
import sympy, math_verify
touch = f"open({mark!r}, 'w')"
for run in (
    lambda: sympy.sympify(touch), lambda: sympy.S(touch), lambda: sympy.Number(touch), lambda: sympy.parse_expr(touch),
    lambda: eval(touch), lambda: exec(touch), lambda: math_verify.parse(touch, parsing_timeout=None),
    lambda: sympy.lambdify([], touch)(),
):
    try:
        run()
    except Exception:
        pass
assert work({"answer": "\\\\frac{x^2-1}{x-1}", "reference": "x+1"}) == "equal"
"""


def test_the_process_that_compares_expressions_can_run_no_text(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    done = subprocess.run([sys.executable, "-c", CODE, str(mark)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "value"), [("1+2*3", 7), ("-(2**3)/4", -2), ("[1, 'a']", [1, "a"]), ("0x10 << 2", 64), ("2.50", 2.5)]
)
def test_values_are_read(text: str, value: object) -> None:
    assert no_eval.read_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "f(1)",
        "x.a",
        "[x for x in [1]]",
        "lambda: 1",
        "a[0]",
        "exp(x, evaluate=False)",
        "'a' + 'b'",
        "1 if 1 else 2",
        "1j",
    ],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not allowed in an expression|not a number"):
        no_eval.parse_expr(text)
