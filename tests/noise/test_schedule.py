"""The schedule against QeRL's values and against a loop written from its description."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from lockstep.config.algorithm import Critic, Ppo
from lockstep.config.schema import Noise, Recipe, Update
from lockstep.noise.schedule import Stage, sigmas, stage_at, stage_of


def test_ten_stages_are_those_of_qerl() -> None:
    wanted = (0, 0.01, 0.005623, 0.003162, 0.001778, 0.001, 0.000562, 0.000316, 0.000178, 0.0001)
    assert sigmas(Noise()) == pytest.approx(wanted, abs=5e-7)


def test_three_stages_are_nothing_start_and_end() -> None:
    assert sigmas(Noise(stages=3, sigma_start=0.05, sigma_end=0.0005)) == pytest.approx((0, 0.05, 0.0005))


@pytest.mark.parametrize(("stages", "updates"), [(10, 100), (10, 97), (3, 3), (7, 50), (4, 5)])
def test_stages_are_equal_intervals_of_the_optimizer_steps(stages: int, updates: int) -> None:
    noise = Noise(stages=stages)
    found = [stage_at(noise, update, updates).index for update in range(updates)]
    # From the description: cut [0, updates) at multiples of updates / stages; a step belongs where it begins.
    wanted = [max(k for k in range(stages) if k * updates <= update * stages) for update in range(updates)]
    assert found == wanted
    assert set(found) == set(range(stages))


def test_the_last_stage_holds_beyond_the_end() -> None:
    assert stage_at(Noise(), 100, 100) == Stage(9, pytest.approx(0.0001))  # type: ignore[arg-type]


def test_a_step_counts_all_its_updates_and_a_warm_up_none() -> None:
    plain = Recipe(steps=10, noise=Noise(stages=5), update=Update(samples_per_update=32))
    assert plain.updates_per_step == 2
    assert [stage_of(plain, step).index for step in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    warm = Recipe(steps=8, noise=Noise(stages=3), algorithm=Ppo(critic=Critic(warmup_steps=2)))
    assert [stage_of(warm, step).index for step in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_a_recipe_without_noise_has_no_stage() -> None:
    with pytest.raises(ValueError, match="no noise"):
        stage_of(Recipe(), 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": {"sigma_start": 0.001, "sigma_end": 0.01}}, "noise must fall over the run"),
        ({"noise": {"sigma_end": 0}}, "greater than 0"),
        ({"noise": {"stages": 2}}, "greater than or equal to 3"),
        ({"noise": {"stages": 10}, "steps": 9}, "some stages would never begin"),
        ({"noise": {"layer_scale": {"layers[": 1.0}}}, "is not a valid regular expression"),
        ({"noise": {"layer_scale": {"layers": -1.0}}}, "below 0"),
        ({"noise": {"targets": ["("]}}, "is not a valid regular expression"),
        ({"noise": {"targets": []}}, "names no norm"),
    ],
)
def test_what_the_recipe_alone_shows_to_be_wrong_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        Recipe.model_validate(settings)
