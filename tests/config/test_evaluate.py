"""Modes that keep what their names say, and decisions that rest on nothing too small."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config.evaluate import EvalMode, preset_mode
from lockstep.config.load import dump, load
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError


def test_several_replies_at_temperature_zero_are_refused_outside_of_nondet_proxy() -> None:
    with pytest.raises(ValidationError, match="temperature 0 gives the same reply every time"):
        EvalMode(name="greedy", samples=8)
    proxy = EvalMode(name="nondet_proxy", samples=8)
    assert proxy.numbers == ("avg@8", "pass@8", "maj@8")
    for wrong in ({"samples": 1}, {"samples": 8, "temperature": 0.6}):
        with pytest.raises(ValidationError, match="several replies at temperature 0"):
            EvalMode(name="nondet_proxy", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "greedy_pass@1", "temperature": 0.5}, "is one reply at temperature 0"),
        ({"name": "pass@8", "temperature": 0.6, "samples": 4}, "pass@8 needs 8 samples"),
        ({"name": "maj@4", "temperature": 0.6, "samples": 8}, "maj@4 needs 4 samples"),
        ({"name": "pass@8", "temperature": 0.6, "samples": 8, "estimates": ["maj@8"]}, "whose first estimate is maj@8"),
        ({"name": "x", "temperature": 0.6, "samples": 8, "estimates": ["best@8"]}, "best@8 is not an estimate"),
        ({"name": "x", "temperature": 0.6, "samples": 8, "estimates": ["avg@4"]}, "avg@4 needs 4 samples"),
    ],
)
def test_names_that_promise_something_are_held_to_it(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        EvalMode.model_validate(settings)


def test_the_headline_is_what_the_name_says_or_the_mean() -> None:
    eight = {"temperature": 0.6, "samples": 8}
    assert EvalMode().numbers == ("pass@1",)
    assert EvalMode(estimates=["avg@1", "maj@1"]).numbers == ("pass@1",), "one number, one name"
    assert EvalMode(name="sampled", **eight).numbers == ("avg@8", "pass@8", "maj@8")
    assert EvalMode(name="maj@8", **eight).numbers == ("maj@8", "avg@8", "pass@8")
    assert EvalMode(name="x", estimates=["pass@2", "avg@8"], **eight).numbers == ("pass@2", "avg@8")


def test_fixed_modes_by_name() -> None:
    assert preset_mode("greedy_pass@1") == EvalMode(name="greedy_pass@1")
    assert preset_mode("pass@8") == EvalMode(name="pass@8", temperature=0.6, samples=8)
    assert preset_mode("nondet_proxy") == EvalMode(name="nondet_proxy", samples=8)
    assert preset_mode("nondet_proxy@4") == EvalMode(name="nondet_proxy@4", samples=4)
    assert preset_mode("greedy") is None


SETS = "eval.also=[{role: ood_probe, items: 202}, {role: sanity, items: 18}, {role: train, items: 50}]"


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("eval/sanity.greedy/accuracy", "a sanity set must not decide anything (18 items, 1 item = 5.56 points)"),
        ("eval/train.greedy/accuracy", "a train set must not decide anything (it is not held out)"),
        ("eval/ood.greedy/accuracy", "no evaluation has this name; there are eval/greedy/accuracy"),
        ("eval/greedy/mean_tokens", "mean_tokens says nothing about quality"),
        ("eval/nondet_proxy/accuracy", "a diagnosis of the hardware"),
    ],
)
def test_no_decision_hangs_on_what_may_not_decide(metric: str, says: str) -> None:
    modes = "eval.modes=[{name: greedy}, {name: nondet_proxy, samples: 8}]"
    for setting in (f"save.keep_best={metric}", f"eval.stop={{kind: drops, metric: {metric}}}"):
        with pytest.raises(ConfigError) as caught:
            load([SETS, modes, setting])
        assert says in str(caught.value), setting


@pytest.mark.parametrize(
    ("metric", "says"), [("reward/maen", "did you mean reward/mean"), ("foo", "groups are reward, answer")]
)
def test_the_best_is_not_kept_by_a_metric_that_does_not_exist(metric: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([f"save.keep_best={metric}"])
    assert f"save.keep_best={metric}: no such metric; {says}" in str(caught.value)


def test_what_may_decide_is_taken_and_survives_a_saved_recipe(tmp_path: Any) -> None:
    stop = "eval.stop={kind: plateau, metric: eval/ood_probe.sampled/accuracy}"
    recipe = load([SETS, "save.keep_best=eval/ood_probe.greedy/accuracy", stop])
    assert [one.role for one in recipe.eval.sets] == ["id_probe", "ood_probe", "sanity", "train"]
    (tmp_path / "r.yaml").write_text(dump(recipe))
    assert load([str(tmp_path / "r.yaml")]) == recipe
    assert load(["save.keep_best=reward/mean"]).save.keep_best == "reward/mean"


def test_rules_need_evaluations_and_each_role_comes_once() -> None:
    for words, says in (
        (["eval.enabled=false", "save.keep_best=eval/greedy/accuracy"], "never measured"),
        (["eval.stop={kind: drops, metric: reward/mean}"], "a stopping rule needs a metric of an evaluation"),
        (
            ["eval.stop={kind: drops}"],
            "no evaluation has this name",
        ),  # its default is an OOD set, which this recipe lacks
        (["eval.also=[{role: id_probe}]"], "each role may be evaluated only once"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(words)


def test_the_main_set_keeps_plain_names() -> None:
    settings = Recipe.model_validate({"eval": {"role": "ood_probe", "also": [{"role": "id_probe"}]}}).eval
    assert [settings.score_name(one.role, "greedy") for one in settings.sets] == ["greedy", "id_probe.greedy"]
