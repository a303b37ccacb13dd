"""The recipes that compare algorithms differ in nothing but the algorithm and what comes with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.config.schema import CodeVerifier, FileTask, JudgeVerifier, Recipe
from lockstep.tasks.build import build_task

RECIPES = Path(__file__).parents[2] / "recipes"
ALGORITHMS = sorted((RECIPES / "algorithms").glob("*.yaml"))
OWN = {"name", "algorithm", "optimizer", "update"}
"""What a recipe of recipes/algorithms may have of its own."""


def shared(recipe: Recipe) -> dict[str, object]:
    return recipe.model_dump(exclude=OWN)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_the_work_is_the_same_for_all(path: Path) -> None:
    recipe, plain = load([str(path)]), load([str(RECIPES / "algorithms" / "grpo.yaml")])
    assert recipe.name == path.stem
    assert shared(recipe) == shared(plain)
    own = recipe.optimizer.model_dump(exclude={"lr", "max_grad_norm"})
    assert own == plain.optimizer.model_dump(exclude={"lr", "max_grad_norm"})
    assert recipe.update.model_dump(exclude={"samples_per_update"}) == plain.update.model_dump(
        exclude={"samples_per_update"}
    )


def test_it_is_the_work_of_the_sums_but_for_its_length_and_its_evaluations() -> None:
    sums, plain = load([str(RECIPES / "sums.yaml")]), load([str(RECIPES / "algorithms" / "grpo.yaml")])
    changed = {"name", "steps", "eval", "save"}
    assert plain.model_dump(exclude=changed) == sums.model_dump(exclude=changed)
    assert (plain.steps, plain.eval.every, plain.eval.at_start, plain.eval.items) == (64, 64, True, sums.eval.items)


def test_the_questions_of_the_quickstart_are_different_and_the_largest_stands_at_each_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(RECIPES.parent)
    task = load([str(RECIPES / "quickstart.yaml")]).task
    assert isinstance(task, FileTask)
    built = build_task(task, 0)
    asked = [*built.batch(0, 1000), *built.heldout("id_probe", 200)]
    assert len({prompt.messages[-1]["content"] for prompt in asked}) == 1200
    places: Counter[int] = Counter()
    for prompt in asked:
        numbers = [int(word) for word in str(prompt.messages[-1]["content"]).partition("?")[2].split(",")]
        assert prompt.answer == str(max(numbers))
        places[numbers.index(max(numbers))] += 1
    assert all(250 < places[place] < 350 for place in range(4))


def test_each_recipe_is_of_the_algorithm_that_it_is_called_after() -> None:
    named = {path.stem: load([str(path)]) for path in ALGORITHMS}
    stale = named.pop("stale")
    assert set(named) == {"grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"}
    assert all(recipe.algorithm.kind == name for name, recipe in named.items())
    assert stale.updates_per_step == 4
    default = load([str(RECIPES / "algorithms" / "grpo.yaml"), "optimizer.lr=null"]).lr
    assert stale.lr == pytest.approx(10 * default)
    assert (stale.algorithm.loss.kind, stale.algorithm.old_logprobs) == ("reinforce", "rollout")


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_where_the_ratio_is_the_point_it_is_not_1(name: str) -> None:
    assert load([str(RECIPES / "algorithms" / f"{name}.yaml")]).updates_per_step > 1


def test_the_code_recipe_is_graded_in_a_sandbox_that_must_be_whole() -> None:
    recipe = load([str(RECIPES / "code.yaml")])
    assert isinstance(recipe.task, FileTask)
    assert isinstance(recipe.task.verifier, CodeVerifier)
    assert recipe.task.verifier.isolation == "strict"
    assert (RECIPES.parent / recipe.task.data.source).is_file()
    rows = recipe.task.heldout_rows
    assert recipe.prompts_per_step + rows <= len((RECIPES / "data" / "code_tasks.jsonl").read_text().splitlines())


def test_the_judge_recipe_asks_of_right_replies_alone() -> None:
    verifier = load([str(RECIPES / "judge.yaml")]).task.verifier  # type: ignore[union-attr]
    assert isinstance(verifier, JudgeVerifier)
    assert verifier.rule is not None
    assert verifier.key_env == "JUDGE_API_KEY"
