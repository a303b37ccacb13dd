"""compute_score as verl's documentation and reward_score folder write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt, ReplyText
from lockstep.verifiers.base import grade_replies
from lockstep.verifiers.selftest import oddities, self_test
from lockstep.verifiers.verl import VerlScore

FILE = Path(__file__).parent / "rewards" / "verl_rewards.py"


def row(source: str = "openai/gsm8k", truth: object = "72") -> Prompt:
    data = {
        "data_source": source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 5},
    }
    return Prompt("t/1", ({"role": "user", "content": "How many?"},), str(truth), "t", data)


def verl(name: str = "compute_score", **settings: object) -> VerlScore:
    return VerlScore(schema.VerlVerifier.model_validate({"path": f"{FILE}:{name}", "workers": 1, **settings}))


def grade(grader: VerlScore, text: str, prompt: Prompt) -> Grade:
    return grade_replies(grader, prompt, [ReplyText("", text, (1, 2))])[0]


def test_one_function_for_all_data_sources():
    grader = verl()
    assert grade(grader, "so #### 72", row()) == Grade(1.0, {"correct": 1.0})
    assert grade(grader, "so #### 71", row()) == Grade(0.0, {"correct": 0.0})
    right = grade(grader, "Answer: 72", row("math_dapo"))
    assert (right.reward, right.metrics, right.extracted) == (1.0, {"correct": 1.0}, "72")
    wrong = grade(grader, "Answer: 7", row("math_dapo"))
    assert (wrong.reward, wrong.metrics, wrong.extracted) == (-1.0, {"correct": 0.0}, "7")
    other = grade(grader, "72", row("geometry"))
    assert other.reward is None
    assert str(other.error).startswith("NotImplementedError: Reward function is not implemented")


def test_a_function_for_each_data_source_gets_the_arguments_it_names():
    paths = {"openai/gsm8k": f"{FILE}:gsm8k", "math_dapo": f"{FILE}:math_dapo"}
    grader = verl(path=paths)
    assert grade(grader, "#### 72", row()).reward == 1.0
    assert grade(grader, "Answer: 71", row("math_dapo")).reward == -1.0
    unknown = grade(grader, "72", row("geometry"))
    assert (unknown.reward, "no function for data_source 'geometry'" in str(unknown.error)) == (None, True)
    assert self_test(grader, row("geometry"))  # so a run is refused at the start
    flexible = verl(path={"openai/gsm8k": f"{FILE}:gsm8k"}, reward_kwargs={"format_score": 0.1})
    assert grade(flexible, "#### 71", row()).reward == pytest.approx(0.1)


def test_structured_truths_extra_info_and_further_arguments():
    grader = verl("any_of", reward_kwargs={"partial": 0.25})
    prompt = row("searchR1_nq", {"target": ["Paris", "paris"]})
    assert grade(grader, "Paris", prompt) == Grade(1.0, {"index": 5.0, "correct": 1.0})
    assert grade(grader, "Rome", prompt).reward == 0.25


def test_async_functions_and_lists():
    assert grade(verl("by_model"), "72", row()).reward == 1.0
    assert grade(verl("as_list"), "7", row()).reward == 0.0


@pytest.mark.parametrize(("name", "error"), [("broken", "{'acc': 1.0}"), ("nothing", "None")])
def test_mistakes_are_unscored_and_never_0(name: str, error: str):
    found = grade(verl(name), "72", row())
    assert (found.reward, found.error) == (
        None,
        f"compute_score returned {error}, not a finite number or a dict with one as 'score'",
    )


def test_a_reply_that_hangs_costs_itself_only():
    grader = verl("hangs", seconds=1)
    assert [grade(grader, text, row()).reward for text in ("a", "hang", "b")] == [1.0, None, 1.0]


def test_a_task_without_verls_columns_gives_the_reference():
    plain = Prompt("t/1", (), "72", "math_dapo")
    assert grade(verl(), "Answer: 72", plain).reward == 1.0


def test_a_missing_function_is_refused():
    with pytest.raises(TaskError, match="did you mean compute_score"):
        verl("compute_scor")


def test_the_self_test_knows_forms_of_verls_examples():
    assert self_test(verl(), row()) == []
    assert oddities(verl(), row()) == []
    assert oddities(verl(), row("math_dapo")) == []
