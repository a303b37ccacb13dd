"""reasoning-gym's own score functions: a reply runs nothing, forges nothing, and the verdicts stay what they are."""

from __future__ import annotations

import ast
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from lockstep.types import Prompt
from lockstep.verifiers.gym_scores import EVALUATED, GymScores, scorer
from lockstep.verifiers.sandbox.host import SandboxError
from tests.verifiers.gym_attacks import attacks

SECRET = "LOCKSTEP_TEST_KEY"
REST = sorted(set(DATASETS) - set(EVALUATED) - {"composite", "codeio", "futoshiki", "game_of_life_halting"})
"""composite and codeio cannot be used, futoshiki needs many seconds for a question, game_of_life_halting takes any text."""


@cache
def items(dataset: str) -> list[dict[str, Any]]:
    made = reasoning_gym.create_dataset(dataset, seed=5, size=2)
    return [{key: made[i].get(key) for key in ("question", "answer", "metadata")} for i in range(2)]


def prompt_of(dataset: str, item: dict[str, Any]) -> Prompt:
    examples = (item["metadata"].get(key) for key in ("example_answer", "example_correct_answer", "possible_answer"))
    answer = item["answer"] if item["answer"] is not None else next(filter(None, examples), "")
    return Prompt(f"{dataset}/1", ({"role": "user", "content": "?"},), str(answer), dataset, item)


def run_nothing(dataset: str, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    """Grade attacks, a wrong and a right reply between them; then give the same attacks to the sandbox directly."""
    mark = folder / "ran"
    monkeypatch.setenv(SECRET, "1")
    monkeypatch.setenv("PWD", str(folder))
    grader, prompt = GymScores(dataset, "{}", partial=False), prompt_of(dataset, items(dataset)[0])
    # Other score functions find the right answer in a longer text: that is no code that ran.
    tried = list(attacks(prompt.answer if dataset in EVALUATED else "?", str(mark), SECRET))
    tried = tried if count is None else random.Random(dataset).sample(tried, count)
    right = f"<answer>{prompt.answer}</answer>"
    before = grader.grade(prompt, right).reward
    for attack in tried:
        assert grader.grade(prompt, f"<answer>{attack}</answer>").reward == 0, attack
        assert not mark.exists(), attack
    for attack in tried if dataset in EVALUATED and count is None else tried[:3]:
        score = scorer().score(dataset, "{}", attack, items(dataset)[0])
        assert isinstance(score, str) or score < 0.99 or attack in NOT_FINITE, attack
        assert not mark.exists(), attack
    assert grader.grade(prompt, "<answer>surely not</answer>").reward == 0
    assert grader.grade(prompt, right).reward == before


NOT_FINITE = ("nan", "NaN", "[NaN]", "nan + nani")
"""Wrong before they reach a score function."""


@pytest.mark.parametrize("dataset", ["n_queens", "countdown", "simple_integration", "complex_arithmetic"])
def test_no_reply_runs_code_or_forges_a_score(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_nothing(dataset, tmp_path, monkeypatch, 10)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [*EVALUATED, *REST])
def test_no_reply_runs_code_through_any_data_set(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_nothing(dataset, tmp_path, monkeypatch, None if dataset in EVALUATED else 10)


SAME = [
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "word_ladder",
]


def scores_are_those_of_the_data_set(dataset: str) -> None:
    made = reasoning_gym.create_dataset(dataset, seed=1, size=1)
    first, second = items(dataset)
    for item in (first, second):
        answers = [prompt_of(dataset, other).answer for other in (first, second)]
        for answer in [*answers, f" {answers[0]} ", answers[0][:-1], "17", "x", str(answers[0].split())]:
            try:
                ours = float(made.score_answer(answer=answer, entry=item))  # these answers may be evaluated
            except Exception:
                ours = -1.0
            theirs = scorer().score(dataset, "{}", answer, item)
            assert theirs == ours or (isinstance(theirs, str) and ours < 1), (answer, ours, theirs)  # or a limit


@pytest.mark.parametrize("dataset", SAME)
def test_scores_are_those_of_the_data_set(dataset: str) -> None:
    scores_are_those_of_the_data_set(dataset)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>7</answer>", 1.0),
        ("<think>4 + 3</think><answer>7</answer>", 1.0),
        ("<think>maybe <answer>7</answer>", 0.0),
        ("<think><answer>7</answer></think> I do not know", 0.0),
    ],
)
def test_an_answer_among_the_thoughts_is_none(reply: str, reward: float) -> None:
    item = {"question": "4 + 3", "answer": "7", "metadata": {}}
    assert GymScores("chain_sum", "{}", partial=False).grade(prompt_of("chain_sum", item), reply).reward == reward


@pytest.mark.slow
@pytest.mark.parametrize("dataset", sorted({*EVALUATED, *REST} - set(SAME)))
def test_scores_are_those_of_every_data_set(dataset: str) -> None:
    scores_are_those_of_the_data_set(dataset)


@pytest.mark.parametrize(
    ("dataset", "answer", "why"),
    [
        ("chain_sum", "open('/etc/passwd')", ""),
        ("spiral_matrix", "[str(x) for x in (1, 2)]", ""),
        pytest.param("countdown", "9**9**9**9**9", "processor time", marks=pytest.mark.slow),
    ],
)
def test_a_score_function_meets_its_limits(dataset: str, answer: str, why: str) -> None:
    score = scorer().score(dataset, "{}", answer, items(dataset)[0])
    assert why in score if isinstance(score, str) else score < 0.1 and not why


def test_settings_that_no_data_set_can_be_made_with_are_said() -> None:
    with pytest.raises(SandboxError, match="min_terms"):
        scorer().score("chain_sum", '{"min_terms": -1}', "1", items("chain_sum")[0])


def test_an_item_may_be_large() -> None:
    item = items("n_queens")[0]
    large = item | {"metadata": item["metadata"] | {"valid_answers": [*["x" * 1000] * 6000, item["answer"] or "_ Q"]}}
    assert scorer().score("n_queens", "{}", item["answer"] or "_ Q", large) == 1.0


def test_a_killed_sandbox_is_replaced() -> None:
    item = items("chain_sum")[0]
    for _ in range(2):
        assert scorer().score("chain_sum", "{}", item["answer"], item) == 1.0
        sandbox = scorer()._sandbox
        assert sandbox is not None
        os.kill(sandbox.pid, 9)


def test_the_data_sets_that_evaluate_answers_are_all_known() -> None:
    """A new version of reasoning-gym must not bring another one unseen."""
    found = set()
    for name, (made, _) in DATASETS.items():
        file = sys.modules[made.__module__].__file__
        nodes = ast.walk(ast.parse(Path(str(file)).read_text(encoding="utf-8")))
        if {getattr(n, "id", getattr(n, "attr", "")) for n in nodes} & {"eval", "exec", "sympify", "lambdify"}:
            found.add(name)
        if hasattr(sys.modules[made.__module__], "sympy") or hasattr(sys.modules[made.__module__], "sp"):
            found.add(name)
    assert found - OWN_TEXT == set(EVALUATED)


OWN_TEXT = {"advanced_geometry", "basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting"}
"""These evaluate what they made themselves, or use sympy without its parser."""
