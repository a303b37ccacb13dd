"""The playbook: which entries a run's numbers point to, and in which order."""

from __future__ import annotations

import pytest

from lockstep.health.playbook import PLAYBOOK, findings
from lockstep.health.smoke import SmokeGate
from lockstep.loops.step_metrics import rollout_metrics
from lockstep.track.catalogue import find
from lockstep.types import FinishReason, Grade, Group, Prompt, Rollout
from tests.health.test_judge import DEFAULTS, HEALTHY

RISING = [HEALTHY | {"reward/mean": 0.2 + 0.02 * step} for step in range(20)]
FLAT = [HEALTHY | {"reward/mean": 0.2 + 0.01 * (step % 2)} for step in range(20)]


def names(rows: list[dict[str, float]]) -> list[str]:
    return [one.entry.name for one in findings(rows)]


def test_its_metrics_exist_and_a_good_run_finds_nothing() -> None:
    assert all(find(sign.metric) for entry in PLAYBOOK for sign in entry.signs)
    assert names(RISING) == []
    assert names(FLAT) == []
    assert findings(FLAT[:4]) == []


def test_a_flat_run_is_asked_the_six_questions_in_order() -> None:
    dead = {
        "grad/norm": 0.0, "sync/probe_shift": 0.0, "reward/zero_std_groups": 0.8, "answer/has_answer": 0.3,
        "mismatch/k3": 0.01, "ratio/clip_share": 0.3,
    }  # fmt: skip
    found = findings([row | dead for row in FLAT])
    assert [one.entry.name.split(":")[0] for one in found] == [f"no improvement {number}" for number in range(1, 7)]
    assert found[2].evidence == ("reward/zero_std_groups 0.8 lately (above 0.5)",)
    assert names([row | dead for row in RISING]) == []  # a run that improves is not asked


@pytest.mark.parametrize(
    ("changed", "entry"),
    [
        ({"entropy/sampled": 2.0}, "instability"),
        ({"reward/high_but_wrong": 0.1}, "reward hacking"),
        ({"length/mean": 60.0}, "length collapse"),
        ({"length/truncated": 0.75}, "truncation"),
    ],
)
def test_each_row_of_the_notes_is_named(changed: dict[str, float], entry: str) -> None:
    assert names(RISING[:8] + [row | changed for row in RISING[8:]]) == [entry]


def test_spikes_are_told_apart_by_size() -> None:
    for size, name in ((8.0, "spikes of 3 to 100 times"), (300.0, "spikes of 100 times and more")):
        assert names([*RISING[:9], RISING[9] | {"grad/norm": size}, *RISING[10:]]) == [name]


def test_wrong_replies_rewarded_like_right_ones_are_counted() -> None:
    prompt = Prompt("q/1", ({"role": "user", "content": "?"},), "1")

    def rollout(reward: float | None, correct: float) -> Rollout:
        grade = Grade(reward, {"correct": correct})
        return Rollout(prompt, (1,), (5,), (-0.5,), (True,), "x", FinishReason.STOP, 0, grade)

    def share(*graded: tuple[float | None, float]) -> float | None:
        group = Group(prompt, tuple(rollout(*one) for one in graded))
        return rollout_metrics([group], DEFAULTS).get("reward/high_but_wrong")

    assert share((1.0, 1), (2.0, 1), (0.0, 0), (1.2, 0), (0.9, 0)) == 0.2
    assert share((1.0, 1), (None, 0), (1.0, 0)) == 0.5
    assert share((1.2, 0), (0.9, 0)) is None


def test_the_gate_is_left_out_where_it_is_off() -> None:
    recipe = DEFAULTS.model_copy(update={"health": DEFAULTS.health.model_copy(update={"smoke_steps": 0})})
    gate = SmokeGate(recipe)
    gate.take(1, HEALTHY, [])
    assert gate.due(1) == gate.due(0) == []
