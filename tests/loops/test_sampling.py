"""Dynamic sampling: which groups are kept, which prompts are asked, what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lockstep.config.schema import Recipe
from lockstep.data.order import batch_indices
from lockstep.loops.sampling import mixed, round_prompts, spread
from lockstep.types import FinishReason, Grade, Group, Prompt, Rollout

POOL = 40


class Numbered:
    """Prompts are numbers, in the order in which any built-in task asks them."""

    name = "numbered"

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return [Prompt(str(index), (), "") for index in batch_indices(step, size, POOL, 3)]

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return []

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return Grade(0.0)


def group(*grades: Grade, name: str = "p") -> Group:
    prompt = Prompt(name, (), "")
    return Group(
        prompt,
        tuple(
            Rollout(prompt, (1,), (2, 3), (-1.0, -1.0), (True, True), "", FinishReason.STOP, 0, grade, sample)
            for sample, grade in enumerate(grades)
        ),
    )


def correct(value: float, reward: float = 0.0) -> Grade:
    return Grade(reward, {"correct": value})


FAILED = Grade(None, error="the judge is not at home")


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ((correct(1), correct(0), correct(0)), True),
        ((correct(1), correct(1)), False),
        ((correct(0), correct(0)), False),
        ((correct(0, 0.1), correct(0, 0.7)), False),  # shaped rewards differ, but nothing is right
        ((correct(1, 0.5), correct(0, 0.5)), True),  # the rewards hide what is right
        ((correct(1), FAILED), False),
        ((correct(1), FAILED, correct(0)), True),
        ((FAILED, FAILED), False),
        ((Grade(0.25), Grade(0.5)), True),
        ((Grade(0.25), Grade(0.25)), False),
        ((Grade(0.25), correct(1, 0.5)), True),  # not all say what is correct: the rewards decide
    ],
)
def test_a_group_is_kept_if_some_are_right_and_some_wrong(grades: tuple[Grade, ...], expected: bool) -> None:
    assert mixed(group(*grades)) is expected


def recipe(rounds: int = 4, prompts: int = 3, *, enabled: bool = True) -> Recipe:
    sampling = {"enabled": enabled, "max_rounds": rounds}
    return Recipe.model_validate(
        {"prompts_per_step": prompts, "algorithm": {"kind": "grpo", "dynamic_sampling": sampling}}
    )


def asked(step: int, number: int, settings: Recipe, before: Sequence[Group] = (), accepted: int = 0) -> list[int]:
    return [int(prompt.id) for prompt in round_prompts(Numbered(), settings, step, number, before, accepted)]


def test_no_round_of_any_step_asks_what_another_asks() -> None:
    """13 batches of 3 are one pass over the pool of 40: three steps of four rounds fit."""
    every = [index for step in range(3) for number in range(4) for index in asked(step, number, recipe())]
    assert len(every) == len(set(every)) == 36
    assert asked(1, 2, recipe()) == list(batch_indices(1 * 4 + 2, 3, POOL, 3))


def test_without_dynamic_sampling_a_step_asks_its_own_batch() -> None:
    assert asked(7, 0, recipe(enabled=False)) == list(batch_indices(7, 3, POOL, 3))


def test_a_step_asks_nothing_twice() -> None:
    """A pool smaller than the rounds of a step comes around again within it."""
    settings = recipe(rounds=10, prompts=15)
    first, second, third = (list(batch_indices(20 + number, 15, POOL, 3)) for number in range(3))
    before = [group(name=str(index)) for index in (*first, *second)]
    assert set(third) & {*first, *second}, "the pass of 2 batches ended"
    assert asked(2, 2, settings, before) == [index for index in third if index not in {*first, *second}]


def test_a_further_round_asks_as_many_as_the_acceptance_suggests() -> None:
    """24 prompts gave 16 groups of 20: 4 more need 6 at that rate; with the margin of 1.5, 9."""
    settings = recipe(prompts=20)
    before = [group(name=f"old {number}") for number in range(24)]
    assert asked(0, 2, settings, before, 16) == list(batch_indices(2, 20, POOL, 3))[:9]
    assert len(asked(0, 2, settings, before, 1)) == 20, "at most the batch"
    assert len(asked(0, 2, settings, before, 0)) == 20, "nothing is known about the rate"


def test_groups_that_are_left_out_have_advantages_of_zero() -> None:
    groups = [group(correct(1), correct(0), name=str(number)) for number in range(4)]
    rows = [(1.0, -1.0), (0.5, -0.5)]
    assert spread(groups, [0, 2], rows) == [(1.0, -1.0), (0.0, 0.0), (0.5, -0.5), (0.0, 0.0)]
