"""Mixes: shares by weight, each prompt once before any comes again, curricula by solve rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from lockstep.config import schema
from lockstep.data.order import batch_indices
from lockstep.tasks.mixed import Mixed, Progress
from lockstep.types import FinishReason, Grade, Group, Prompt, Rollout


class Numbered:
    notes: tuple[str, ...] = ()

    def __init__(self, name: str, pool: int) -> None:
        self.name, self.pool = name, pool

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return [self._prompt(index) for index in batch_indices(step, size, self.pool, 3)]

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return [self._prompt(1000 + index) for index in range(size)]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        assert prompt.id.startswith(f"{self.name}/")
        assert prompt.task == self.name
        return Grade(float(reply == prompt.answer))

    def _prompt(self, index: int) -> Prompt:
        return Prompt(f"{self.name}/{index}", (), str(index), self.name)


def mix(weights: dict[str, float], curriculum: schema.Curriculum | None = None, pool: int = 40) -> Mixed:
    shares = {name: schema.Share(weight=w, task=schema.GuessNumberTask()) for name, w in weights.items()}
    settings = schema.MixedTask(tasks=shares, curriculum=curriculum)
    return Mixed(settings, {name: Numbered("n" + name, pool) for name in weights})


@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0, "c": 0.5}, {"a": 0.7, "b": 0.1, "c": 0.2}]
)
def test_every_prefix_of_the_run_has_the_shares(weights: dict[str, float]) -> None:
    task, total = mix(weights), sum(weights.values())
    counts: Counter[str] = Counter()
    for step in range(200):
        batch = task.batch(step, 7)
        assert len({prompt.id for prompt in batch}) == 7
        counts.update(prompt.task for prompt in batch)
        for name, weight in weights.items():
            assert abs(counts[name] - weight / total * 7 * (step + 1)) <= 2


def test_a_step_is_a_function_of_its_number_and_each_prompt_comes_once_an_epoch() -> None:
    task, again = mix({"a": 2.0, "b": 1.0}), mix({"a": 2.0, "b": 1.0})
    assert list(task.batch(17, 6)) == list(again.batch(17, 6))
    asked = [prompt.id.replace("~2", "") for step in range(20) for prompt in task.batch(step, 6)]
    for name, times in (("a", 80), ("b", 40)):
        own = [id for id in asked if id.startswith(f"{name}/")]
        assert len(own) == times
        assert all(set(Counter(own[start : start + 40]).values()) == {1} for start in range(0, times, 40))


def test_prompts_that_come_again_within_a_step_have_ids_of_their_own() -> None:
    task = mix({"a": 1.0}, pool=3)
    batch = task.batch(0, 7)
    assert len({prompt.id for prompt in batch}) == 7
    assert Counter(prompt.answer for prompt in batch).most_common(1)[0][1] == 3
    assert all(task.grade(prompt, prompt.answer).reward == 1.0 for prompt in batch)


def test_held_out_prompts_are_split_by_weight() -> None:
    counts = Counter(prompt.task for prompt in mix({"a": 3.0, "b": 1.0}).heldout("id_probe", 8))
    assert counts == {"a": 6, "b": 2}


def group(task: str, *rewards: float | None) -> Group:
    prompt = Prompt(f"{task}/x", (), "", task)
    rollouts = [
        Rollout(prompt, (1,), (2,), (0.0,), (True,), "", FinishReason.STOP, 0, Grade(reward, error="e"), i)
        for i, reward in enumerate(rewards)
    ]
    return Group(prompt, tuple(rollouts))


def test_a_curriculum_asks_more_of_what_is_solved_sometimes() -> None:
    band = schema.Curriculum(low=0.2, high=0.8, outside=0.25, memory=0.5)
    task, progress = mix({"easy": 1.0, "mid": 1.0, "hard": 1.0}, band), Progress()
    assert task.shares(progress) == pytest.approx({"easy": 1 / 3, "mid": 1 / 3, "hard": 1 / 3})
    task.learn(progress, [group("easy", 1, 1), group("mid", 1, 0, None), group("hard", 0, 0)])
    assert progress.rates == {"easy": 1.0, "mid": 0.5, "hard": 0.0}
    assert task.shares(progress) == pytest.approx({"easy": 1 / 6, "mid": 4 / 6, "hard": 1 / 6})
    task.learn(progress, [group("hard", 1, 1), group("easy", None)])
    assert progress.rates == {"easy": 1.0, "mid": 0.5, "hard": 0.5}
    counts = Counter(prompt.task for _ in range(30) for prompt in task.deal(progress, 3))
    assert counts == {"easy": 10, "mid": 40, "hard": 40}  # 1/9, 4/9, 4/9; the small share is asked too
    assert progress.drawn == counts


def test_dealing_goes_on_from_what_was_saved() -> None:
    band = schema.Curriculum()
    task, whole = mix({"a": 2.0, "b": 1.0}, band), Progress()
    first = [p.id for p in task.deal(whole, 5)]
    saved = Progress(**asdict(whole))
    rest = [p.id for p in task.deal(whole, 5)]
    assert [p.id for p in mix({"a": 2.0, "b": 1.0}, band).deal(saved, 5)] == rest
    assert not set(first) & set(rest)
