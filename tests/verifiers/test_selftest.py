from __future__ import annotations

from lockstep.types import Grade, Prompt
from lockstep.verifiers.exact import Numeric, Text
from lockstep.verifiers.selftest import self_test


def ask(answer: str) -> Prompt:
    return Prompt("t/1", ({"role": "user", "content": "?"},), answer)


class Always:
    """Pays the same for everything; None cannot score."""

    def __init__(self, reward: float | None) -> None:
        self.reward = reward

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return Grade(self.reward, error=None if self.reward is not None else "no judge")


def test_good_verifiers_have_no_problems():
    assert self_test(Numeric("last_number", 1e-6), ask("-3/4")) == []
    assert self_test(Text("last_line"), ask("{a} and {b}")) == []


def test_a_grader_that_pays_for_everything_is_found():
    problems = self_test(Always(1.0), ask("7"))
    assert len(problems) == 4
    assert problems[0] == "t/1: an empty reply scores 1, not 0"


def test_a_grader_that_pays_for_nothing_is_found():
    assert self_test(Always(0.0), ask("7")) == ["t/1: the reference '7' in a box scores 0, not 1"]


def test_unscored_probes_are_problems_even_if_pay_is_free():
    assert len(self_test(Always(None), ask("7"), exact=False)) == 5
    assert self_test(Always(-3.5), ask("7"), exact=False) == []


def test_references_that_cannot_be_paid_are_found():
    assert "is not a number: '4 + 3'" in self_test(Numeric("none", 1e-6), ask("4 + 3"))[0]
    assert self_test(Text("none"), ask("an { open brace"))[0].endswith("scores 0, not 1")
    assert self_test(Text("none"), ask("x" * 5000))[0].endswith("scores 0, not 1")
