from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.algorithm import PythonLoss
from lockstep.config.load import built_in, dump, load, load_mapping, load_run
from lockstep.config.schema import (
    Data,
    EvalMode,
    FileTask,
    Lora,
    NoAdapter,
    PythonTask,
    ReasoningGymTask,
    Recipe,
    TextVerifier,
)
from lockstep.config.text import parse
from lockstep.errors import ConfigError


def write(folder: Path, text: str, name: str = "r.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def mistakes(*args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(args)
    return caught.value.mistakes


def test_nothing_given_is_the_default_recipe() -> None:
    assert load([]) == Recipe()


def test_later_arguments_win(tmp_path: Path) -> None:
    first = write(tmp_path, "steps: 5\noptimizer: {lr: 1e-6, eps: 1e-9}\n", "a.yaml")
    second = write(tmp_path, "steps: 6\noptimizer:\n  lr: 3e-6\n", "b.yaml")
    recipe = load(["steps=4", first, second, "optimizer.eps=1e-7"])
    assert (recipe.steps, recipe.optimizer.lr, recipe.optimizer.eps) == (6, 3e-6, 1e-7)
    assert load([second, first]).steps == 5


def test_more_steps_than_can_be_listed_are_refused() -> None:
    assert load(["steps=1000000"]).steps == 10**6
    assert mistakes("steps=1000000000", "eval.every=1") == ["steps=1000000000: must be at most 1000000"]


def test_override_values_are_yaml() -> None:
    recipe = load(
        ["rollout.stop=[a, b]", "optimizer.betas=[0.8, 0.9]", "model.revision=null", "chat.system='1'", "threads=2"]
    )
    assert recipe.rollout.stop == ["a", "b"]
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert (recipe.model.revision, recipe.chat.system, recipe.threads) == (None, "1", 2)
    assert load(["update={epochs: 2}", "update.recompute=full"]).update.epochs == 2
    assert load(["chat.suffix=a=b"]).chat.suffix == "a=b"


def test_items_of_lists_are_set_by_number() -> None:
    modes = load(["eval.modes.1.temperature=0.5", "eval.modes.1.samples=4"]).eval.modes
    assert modes == [EvalMode(), EvalMode(name="sampled", temperature=0.5, samples=4)]
    assert load(["rollout.stop=[a, b]", "rollout.stop.1=c"]).rollout.stop == ["a", "c"]
    assert load(["optimizer.betas.1=0.95"]).optimizer.betas == (0.9, 0.95)
    assert mistakes("eval.modes.2.samples=4") == ["eval.modes.2: no such item; eval.modes has 2, counted from 0"]
    assert mistakes("eval.modes.-1.samples=4") != []


def test_model_may_be_a_text(tmp_path: Path) -> None:
    file = write(tmp_path, "model: org/a\n")
    assert load([file]).model.path == "org/a"
    assert load(["model.dtype=fp32", file, "model=org/b"]).model.model_dump() == Recipe().model.model_dump() | {
        "path": "org/b",
        "dtype": "fp32",
    }
    assert load_mapping({"model": "org/c"}).model.path == "org/c"


def test_a_section_without_kind_is_the_default_variant() -> None:
    task = load(["task.dataset=leg_counting", "task.verifier.tolerance=0.1"]).task
    assert isinstance(task, ReasoningGymTask)
    assert task.dataset == "leg_counting"
    assert isinstance(load([]).adapter, NoAdapter)


def test_another_kind_drops_the_settings_of_the_old_one(tmp_path: Path) -> None:
    file = write(tmp_path, "adapter: {kind: lora, rank: 4}\ntask: {dataset: x, verifier: {tolerance: 0.1}}\n")
    assert load([file]).adapter == Lora(rank=4)
    recipe = load([file, "adapter.kind=none", "task.kind=file", "task.data=q.jsonl"])
    assert recipe.adapter == NoAdapter()
    assert recipe.task == FileTask(data=Data(source="q.jsonl"))
    verifier = load([file, "task.verifier.kind=text"]).task
    assert isinstance(verifier, ReasoningGymTask)
    assert (verifier.dataset, verifier.verifier) == ("x", TextVerifier())


def test_the_same_kind_keeps_what_was_set(tmp_path: Path) -> None:
    file = write(tmp_path, "adapter: {kind: lora, rank: 4}\n")
    assert load([file, "adapter.kind=lora", "adapter.alpha=8"]).adapter == Lora(rank=4, alpha=8)
    assert load(["task.size=7", "task.kind=reasoning_gym"]).task == ReasoningGymTask(size=7)


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (["algorithm={kind: dr_grpo, advantage: {std_eps: 1e-5}}"], {"advantage": {"divide_by_std": False}}),
        (["algorithm.kind=dapo", "algorithm.loss.clip_low=0.1"], {"loss": {"clip_low": 0.1, "clip_high": 0.28}}),
        (["algorithm.kind=dapo", "algorithm.dynamic_sampling.max_rounds=4"], {"dynamic_sampling": {"enabled": True}}),
        (
            ["algorithm.kind=reinforce_pp_baseline", "algorithm.advantage.gamma=0.9"],
            {"advantage": {"baseline": "group_mean"}},
        ),
        (["algorithm.kind=gspo", "algorithm.loss.clip_low=1e-4"], {"loss": {"kind": "gspo", "clip_high": 4e-4}}),
        (["algorithm={kind: dapo, loss: {kind: clip, clip_low: 0.1}}"], {"loss": {"clip_high": 0.28}}),
        (["algorithm={kind: dapo, loss: {kind: gspo}}"], {"loss": {"kind": "gspo", "clip_high": 4e-4}}),
    ],
)
def test_one_setting_of_a_part_leaves_the_algorithms_other_defaults(args: list[str], kept: dict[str, Any]) -> None:
    """Without this, `dr_grpo` with another std_eps would divide by the deviation after all."""
    recipe = load(args)
    for part, settings in kept.items():
        assert getattr(recipe.algorithm, part).model_dump().items() >= settings.items()
    assert load_mapping(parse(dump(recipe), "").value) == recipe  # type: ignore[arg-type]


def test_a_loss_of_ones_own_may_be_written_as_its_path() -> None:
    own = PythonLoss(path="my.py:fn", settings={"x": 1})
    assert load(["algorithm.loss=my.py:fn"]).algorithm.loss == PythonLoss(path="my.py:fn")
    assert load(["algorithm.loss=my.py:fn", "algorithm.loss.settings.x=1"]).algorithm.loss == own
    assert load(["algorithm.loss={kind: python, path: 'my.py:fn', settings: {x: 1}}"]).algorithm.loss == own


def test_settings_of_a_kind_may_come_before_it() -> None:
    assert load(["adapter.rank=4", "adapter.kind=lora"]).adapter == Lora(rank=4)


def test_a_mistake_does_not_vanish_with_the_old_variant(tmp_path: Path) -> None:
    file = write(tmp_path, "adapter: {kind: lora, rnak: 4}\n")
    assert "adapter.rnak=4: no such setting" in mistakes(file, "adapter.kind=none")[0]


def test_an_override_that_a_later_argument_drops_is_an_error() -> None:
    (line,) = mistakes("adapter.kind=lora", "adapter.rank=4", "adapter.kind=none")
    assert line.startswith("adapter.rank=4: dropped by a later argument")


def test_mappings_merge_and_an_empty_one_resets() -> None:
    merged = load(["task.settings={a: 1}", "task.settings.b=2"]).task
    assert isinstance(merged, ReasoningGymTask)
    assert merged.settings == {"a": 1, "b": 2}
    reset = load([*("task.settings={a: 1}", "task.settings={}")]).task
    assert isinstance(reset, ReasoningGymTask)
    assert reset.settings == {}
    assert (
        load(["rollout={slots: 3, top_k: 4}", "rollout={}", "rollout.top_k=5"]).rollout.slots == Recipe().rollout.slots
    )


def test_lists_are_replaced() -> None:
    assert load(["rollout.stop=[a, b]", "rollout.stop=[c]"]).rollout.stop == ["c"]


def test_built_in_recipes_load_by_name() -> None:
    assert "smoke" in built_in()
    for name in built_in():
        assert load([name]) == load([str(built_in()[name])])
    assert load(["smoke", "steps=3"]).steps == 3


def test_numbers_and_texts_are_not_mixed_up() -> None:
    assert load(["optimizer.lr=1"]).optimizer.lr == 1.0
    assert mistakes('steps="5"') == ['steps="5": must be a whole number']
    assert mistakes("steps=5.0") == ["steps=5.0: must be a whole number"]
    assert mistakes("steps=true") == ["steps=true: must be a whole number"]
    assert mistakes("optimizer.lr=true") == ["optimizer.lr=true: must be a number"]
    assert mistakes("algorithm.advantage.std_ddof=true") == [
        "algorithm.advantage.std_ddof=true: must be a whole number"
    ]
    assert mistakes("update.share_prompts=1") == ["update.share_prompts=1: must be true or false"]
    assert mistakes("model.revision=1234567") == [
        "model.revision=1234567: must be text; put it in quotes: '\"1234567\"'"
    ]


def test_bad_arguments_are_one_line_each(tmp_path: Path) -> None:
    empty, listed = write(tmp_path, "# nothing\n", "e.yaml"), write(tmp_path, "\n- steps\n", "l.yaml")
    broken = write(tmp_path, "steps: 3\na: [\n", "b.yaml")
    assert mistakes(empty) == [f"{empty}:1: empty; a recipe has at least one setting"]
    assert mistakes(listed) == [f"{listed}:2: a recipe is a mapping of settings (name: value), this is a list"]
    assert mistakes(broken)[0].startswith(f"{broken}:3: while parsing a flow")
    assert mistakes(str(tmp_path)) == [f"{tmp_path}: a folder, not a recipe file"]
    assert mistakes("nowhere/r.yaml")[0].startswith("nowhere/r.yaml: no such recipe file or built-in recipe")
    assert mistakes("smokee") == ["smokee: no such recipe file or built-in recipe; did you mean smoke?"]
    assert mistakes("optimizer.lr")[0].endswith("to change a setting, write optimizer.lr=VALUE")
    for bad in ("=3", "a..b=3", ".a=3", "a b=3", "-steps=3", "a.=3"):
        assert mistakes(bad) == [f"{bad}: not an override; write section.setting=value, without spaces"]
    assert mistakes("steps=")[0].startswith("steps=: no value; write null")
    assert mistakes("rollout.stop=[a")[0].startswith("rollout.stop=[a: not a YAML value: ")
    assert mistakes("chat.system=*x")[0].startswith("chat.system=*x: not a YAML value: aliases")
    assert mistakes("task.settings={a: 1, a: 2}") == ["task.settings={a: 1, a: 2}: a: written twice, first in line 1"]
    assert len(mistakes(empty, listed, broken, "a..b=3", "smokee")) == 5


def test_an_existing_file_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    assert load([write(tmp_path, "steps: 7\n", "lr=1e-5.yaml")]).steps == 7


def test_where_names_the_arguments() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["steps=x", "seed=y"])
    assert str(caught.value).startswith("2 mistakes in steps=x seed=y:\n  ")
    with pytest.raises(ConfigError, match=r"1 mistake in runs/a/recipe.yaml:"):
        load_mapping({"steps": 0}, where="runs/a/recipe.yaml")


def test_dump_is_complete_and_loads_to_the_equal_recipe(tmp_path: Path) -> None:
    for args in ([], ["smoke"], ["adapter.kind=lora", "task={kind: python, path: 'a.py:B'}", "optimizer.lr=3e-6"]):
        recipe = load(args)
        assert load([write(tmp_path, dump(recipe))]) == recipe
        assert load(["steps=9", "rollout.stop=[x]", "task.kind=python", write(tmp_path, dump(recipe))]) == recipe
    assert isinstance(load([*args]).task, PythonTask)
    parts = "[{name: a, verifier: {kind: math}}, {name: b, verifier: {kind: text}}]"
    combined = load([f"task.verifier={{kind: composite, parts: {parts}}}"])  # combine=all takes no weights
    assert load([write(tmp_path, dump(combined))]) == combined


def test_load_mapping_leaves_its_argument_alone() -> None:
    tree = {"model": "a", "task": {"dataset": "x"}}
    load_mapping(tree)
    assert tree == {"model": "a", "task": {"dataset": "x"}}


def test_an_argument_may_be_longer_than_a_file_name() -> None:
    long = "x" * 10_000
    assert load([f"chat.system={long}"]).chat.system == long
    assert "no such recipe file" in mistakes(long)[0]


def test_keys_of_free_mappings_may_be_numbers() -> None:
    task = load(["task.settings.0=a", "task.settings.0=b"]).task
    assert isinstance(task, ReasoningGymTask)
    assert task.settings == {"0": "b"}


def test_a_pipe_as_recipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load([str(tmp_path / "recipe.yaml")])


# --- short forms ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["algorithm=dapo"], ["algorithm.kind=dapo"]),
        (["algorithm=dapo", "algorithm.loss.clip_low=0.1"], ["algorithm.kind=dapo", "algorithm.loss.clip_low=0.1"]),
        (["algorithm.loss=cispo"], ["algorithm.loss.kind=cispo"]),
        (["adapter=lora", "adapter.rank=4"], ["adapter.kind=lora", "adapter.rank=4"]),
        (["task=file", "task.data=x", "task.verifier=math"], ["task={kind: file, data: x, verifier: {kind: math}}"]),
        (
            ["task=file", "task.data=x", "task.verifier=own.py:grade"],
            ["task={kind: file, data: x, verifier: {kind: python, path: 'own.py:grade'}}"],
        ),
        (["eval.modes=greedy"], ["eval.modes=[{name: greedy}]"]),
        (["eval.modes=greedy,avg@8"], ["eval.modes=[{name: greedy}, {name: avg@8, temperature: 0.6, samples: 8}]"]),
    ],
)
def test_a_kind_alone_is_short_for_its_section(short: list[str], long: list[str]) -> None:
    assert load(short) == load(long)


def test_a_recipe_that_is_not_there_is_sought_beside_its_path_first(tmp_path: Path) -> None:
    write(tmp_path, "steps: 3", "units.yaml")
    for name in ("unit.yaml", "units"):
        with pytest.raises(ConfigError, match=r"did you mean .*units\.yaml"):
            load([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        load(["quickstrat"])


# --- a run names its task -------------------------------------------------------------------------------------------
def test_a_run_of_rl_without_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="task: required"):
        load_run(["steps=3"])
    assert load_run(["steps=3", "task=reasoning_gym"]).task.kind == "reasoning_gym"


def test_supervised_fine_tuning_without_a_task_measures_its_validation_loss_alone() -> None:
    sft = ["loop=sft", "sft.data=chats.jsonl", "eval.every=5"]
    recipe = load_run(sft)
    assert (recipe.task.kind, recipe.eval.enabled, recipe.eval.every) == ("none", False, 5)
    assert load_mapping(parse(dump(recipe), "").value) == recipe
    with pytest.raises(ConfigError, match="the recipe has no task"):
        load_run([*sft, "eval.enabled=true"])
    with pytest.raises(ConfigError, match=r"task\.kind=none has no questions"):
        load_run(["task=none"])
