"""Reward functions as TRL's documentation writes them, called as TRL 1.16 calls them, with TRL's own sum as the reference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.types import Prompt, ReplyText
from lockstep.verifiers.base import grade_replies
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.selftest import oddities, self_test
from lockstep.verifiers.trl import NONE_APPLIES, TrlRewards

FILE = Path(__file__).parent / "rewards" / "trl_rewards.py"
ROW = {"ground_truth": "7", "task": "math", "level": 3}
PROMPT = Prompt("t/1", ({"role": "user", "content": "What is 4 + 3?"},), "7", "t", ROW)
RIGHT = "<think>4 + 3 = 7</think>\\boxed{7}"


def rewards(*names: str, **settings: object) -> TrlRewards:
    paths: object = [f"{FILE}:{name}" for name in names] if len(names) > 1 else f"{FILE}:{names[0]}"
    return TrlRewards(schema.TrlVerifier.model_validate({"path": paths, "workers": 1, **settings}))


def replies(*texts: str) -> list[ReplyText]:
    return [ReplyText("", text, tuple(range(len(text)))) for text in texts]


def scores(grader: TrlRewards, *texts: str, prompt: Prompt = PROMPT) -> list[float | None]:
    return [grade.reward for grade in grade_replies(grader, prompt, replies(*texts))]


def test_a_function_of_the_documentation_scores_whole_replies():
    grades = grade_replies(rewards("correct"), PROMPT, replies(RIGHT, "\\boxed{8}", "no"))
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0]
    assert [grade.metrics for grade in grades] == [
        {"correct": correct, "not_applicable": 0.0} for correct in (1.0, 0.0, 0.0)
    ]
    assert scores(rewards("think_format"), RIGHT, "\\boxed{7}") == [1.0, 0.0]  # it sees the thoughts


def test_several_functions_are_summed_by_weight_and_the_first_decides():
    grader = rewards("correct", "think_format", "short", weights=[2.0, 0.5, 1.0])
    both, format_only = grade_replies(grader, PROMPT, replies(RIGHT, "<think>a</think>b"))
    assert both.reward == pytest.approx(2.0 + 0.5 - len(RIGHT) / 10)
    assert both.metrics == {
        "correct": 1.0,
        "not_applicable": 0.0,
        "part_correct": 1.0,
        "part_think_format": 1.0,
        "part_short": -len(RIGHT) / 10,
    }
    assert (format_only.metrics["correct"], format_only.metrics["part_think_format"]) == (0.0, 1.0)


def test_none_is_not_applicable_and_counted_never_0():
    grader = rewards("math_only", "coding_only")
    (math,) = grade_replies(grader, PROMPT, replies("it is 7"))
    assert (math.reward, math.metrics["not_applicable"], "part_coding_only" in math.metrics) == (1.0, 1.0, False)
    code = Prompt("t/2", PROMPT.messages, "", "t", {"task": "code"})
    (grade,) = grade_replies(grader, code, replies("def f(): pass"))
    assert (grade.reward, grade.metrics["correct"], grade.metrics["length"], grade.metrics["seen_math"]) == (
        1,
        1,
        13,
        0,
    )
    other = Prompt("t/3", PROMPT.messages, "", "t", {"task": "poem"})
    (grade,) = grade_replies(grader, other, replies("roses"))
    assert (grade.reward, grade.error, grade.metrics) == (None, NONE_APPLIES, {"not_applicable": 2.0})


def test_a_metric_that_is_not_finite_is_left_out():
    (grade,) = grade_replies(rewards("ratio"), PROMPT, replies("7"))
    assert grade.metrics == {"correct": 1.0, "not_applicable": 0.0, "share": 2.0}


def test_async_functions_run_at_the_same_time():
    grader = rewards("slow_judge", "slow_judge", "slow_judge")
    scores(grader, "a")
    start = time.monotonic()
    assert scores(grader, *["short"] * 20, "x" * 99) == [3.0] * 20 + [0.0]
    assert time.monotonic() - start < 0.05 * 20  # sixty waits of 0.05 s


def test_a_plain_function_may_run_a_loop_of_its_own():
    assert scores(rewards("own_loop", "slow_judge"), "a", "abc") == [2.0, 4.0]


def test_the_call_is_that_of_trl(tmp_path: Path):
    """The same function under TRL's own trainer code gets the same arguments; see TRL's `_calculate_rewards`."""
    copy = tmp_path / FILE.name
    copy.write_text(FILE.read_text())
    prompt = Prompt("t/1", PROMPT.messages, "7", "t", ROW | {"prompt": list(PROMPT.messages), "tags": ["a"]})
    grader = TrlRewards(schema.TrlVerifier(path=f"{copy}:echo", workers=1))
    grade_replies(grader, prompt, [ReplyText("b", "<think>a</think>b", (5, 6, 2)), ReplyText("", "c", (7,))])
    text = Prompt("t/1", PROMPT.messages, "7", "t", ROW | {"prompt": "What is 4 + 3?"})
    grade_replies(grader, text, [ReplyText("b", "b", (5,))])
    whole, standard = [json.loads(line) for line in copy.with_suffix(".calls.jsonl").read_text().splitlines()]
    assert whole == [
        [[{"role": "user", "content": "What is 4 + 3?"}]] * 2,
        [[{"role": "assistant", "content": "<think>a</think>b"}], [{"role": "assistant", "content": "c"}]],
        [[5, 6, 2], [7]],
        {"answer": ["7"] * 2, "ground_truth": ["7"] * 2, "task": ["math"] * 2, "level": [3] * 2, "tags": [["a"]] * 2},
    ]
    assert standard[:3] == [["What is 4 + 3?"], ["b"], [[5]]]


def test_the_form_can_be_chosen():
    assert scores(rewards("unique_letters", completions="text"), "aab") == [2.0]
    assert scores(rewards("unique_letters"), "aab") == [None]  # letters are looked for in a list of messages
    assert scores(rewards("correct", completions="messages"), RIGHT) == [1.0]


def test_trls_own_functions_run_from_a_file(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward\n"
        "overlong = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)\n"
    )
    paths = [f"{file}:{name}" for name in ("accuracy_reward", "think_format_reward", "overlong")]
    prompt = Prompt("t/1", PROMPT.messages, "7", "t", {"solution": "$7$"})
    grades = grade_replies(TrlRewards(schema.TrlVerifier(path=paths, workers=1)), prompt, replies(RIGHT, "\\boxed{8}"))
    assert [(g.metrics["part_accuracy_reward"], g.metrics["part_think_format_reward"]) for g in grades] == [
        (1, 1),
        (0, 0),
    ]
    assert [g.metrics["part_overlong"] for g in grades] == [-1.0, 0.0]
    unreadable = Prompt("t/2", PROMPT.messages, "", "t", {"solution": ""})
    (grade,) = grade_replies(TrlRewards(schema.TrlVerifier(path=paths[0], workers=1)), unreadable, replies(RIGHT))
    assert (grade.reward, grade.error) == (None, NONE_APPLIES)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("too_few", "too_few returned 1 rewards for 2 completions"),
        ("texts", "texts returned '1' for it, not a finite number or None"),
        ("nan", "nan returned nan for it"),
        ("without_kwargs", "got an unexpected keyword argument"),
    ],
)
def test_mistakes_are_unscored_and_never_0(name: str, error: str):
    grades = grade_replies(rewards(name), PROMPT, replies("a", "b"))
    assert [grade.reward for grade in grades] == [None, None]
    assert all(error in str(grade.error) for grade in grades)
    assert self_test(rewards(name), PROMPT)  # so a run is refused at the start


def test_a_call_that_hangs_costs_its_own_replies_only():
    group = rewards("hangs", seconds=1)
    assert scores(group, "hang", "b") == [None, None]
    assert scores(group, "a", "b") == [1.0, 1.0]
    assert group.pool.replaced == 1
    assert "time limit" in str(grade_replies(group, PROMPT, replies("hang"))[0].error)


def test_what_cannot_be_used_is_refused():
    with pytest.raises(TaskError, match="requires the argument trainer_state"):
        rewards("with_state")
    with pytest.raises(TaskError, match="did you mean correct"):
        rewards("corect")
    with pytest.raises(ValidationError, match="weights has 1 numbers for 2 functions"):
        rewards("correct", "short", weights=[1.0])
    with pytest.raises(ValidationError, match="give at least one function"):
        schema.TrlVerifier(path=[])


def test_the_self_test_tries_a_whole_group():
    assert self_test(rewards("correct"), PROMPT) == []
    assert self_test(rewards("short"), PROMPT) == []  # a reward function may give any reward
    assert self_test(rewards("never"), PROMPT) == []  # None is no fault of the grader
    assert oddities(rewards("correct"), PROMPT) == []
    assert "an empty reply scores 0.5" in oddities(rewards("echo"), PROMPT)[0]


@pytest.fixture(autouse=True)
def _no_calls_left() -> Iterator[None]:
    yield
    FILE.with_suffix(".calls.jsonl").unlink(missing_ok=True)


def test_parts_of_a_composite_may_be_rewards():
    part = {"kind": "trl", "path": f"{FILE}:longest_of_group", "workers": 1}
    parts = [{"name": "right", "verifier": {"kind": "numeric"}, "weight": 2}, {"name": "longest", "verifier": part}]
    verifier = build_verifier(
        schema.CompositeVerifier.model_validate({"kind": "composite", "combine": "weighted", "parts": parts})
    )
    group = [ReplyText.probe("\\boxed{7}"), ReplyText.probe("\\boxed{7} longer")]
    assert [grade.reward for grade in grade_replies(verifier, PROMPT, group)] == [pytest.approx(2 / 3), 1.0]
