"""The memory plan as a run makes it: from its model's folder and its prompts, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.algorithms.build import build_objective
from lockstep.build.build import build_engine, build_parts, build_policy, build_task_of
from lockstep.build.memory import available_bytes, execution, longest_prompt, plan_run, rows_of_engine
from lockstep.chat.chat import ChatFormat
from lockstep.config.load import load
from lockstep.errors import DoesNotFitError
from lockstep.learner.execution import Execution
from lockstep.models import load_tokenizer, resolve
from lockstep.plan.choice import plan_memory
from lockstep.plan.model_shape import read_shape
from lockstep.rollout.native import NativeEngine
from tests.loops.runs import trained, words


def test_a_run_prints_its_plan_before_it_loads(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, "steps=1")
    lines = (run.path / "log.txt").read_text().splitlines()
    table = next(i for i, line in enumerate(lines) if "phase" in line and "GiB" in line)
    loaded = next(i for i, line in enumerate(lines) if "parameters are trained" in line)
    assert table < loaded
    assert any("no reason to refuse" in line for line in lines)


def test_a_plan_is_of_the_folder_and_of_the_prompts(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir, "algorithm.kl.coef=0.1"))
    task, said = build_task_of(recipe), list[str]()
    plan = plan_run(recipe, task, build_objective(recipe), said.append)
    assert plan is not None
    assert plan.inputs.shape == read_shape(tiny_model_dir)
    resolved = resolve(recipe.model)
    chat = ChatFormat(load_tokenizer(resolved), recipe.chat, None)
    lengths = [len(chat.render_prompt(prompt)) for prompt in task.batch(0, recipe.prompts_per_step)]
    assert plan.inputs.prompt == longest_prompt(resolved, recipe, task) == max(lengths)
    assert plan.inputs.extra_passes  # of the reference
    assert plan.inputs.copies == ("reference model",)
    assert said[0].startswith("micro-batches of up to ")


def test_on_a_gpu_the_plan_decides_what_the_recipe_leaves_open(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir))
    shape = read_shape(tiny_model_dir)
    on_gpu = plan_memory(recipe, shape, "cuda", 8 * 2**30, prompt_tokens=30, passes=False)
    assert execution(on_gpu) == Execution(on_gpu.sizes.tokens, on_gpu.sizes.recompute)
    on_cpu = plan_memory(recipe, shape, "cpu", 8 * 2**30, prompt_tokens=30, passes=False)
    assert execution(on_cpu) is None
    assert execution(None) is None


def test_auto_rows_of_the_engine_are_the_plans(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir, "prompts_per_step=40", "samples_per_prompt=10", "rollout={}"))
    plan = plan_memory(recipe, read_shape(tiny_model_dir), "cuda", 8 * 2**30, prompt_tokens=30, passes=False)
    fewer = replace(plan, sizes=replace(plan.sizes, slots=77))  # what fits of the 400
    assert plan.sizes.slots == 400
    assert rows_of_engine(recipe, "cuda", fewer) == 77
    assert rows_of_engine(recipe, "cuda", None) == 400  # an evaluation has no plan
    assert rows_of_engine(recipe, "cpu", None) == 64
    number = load(words(tmp_path, tiny_model_dir, "rollout.slots=100"))
    assert rows_of_engine(number, "cuda", fewer) == rows_of_engine(number, "cpu", None) == 100


def test_the_engine_has_as_many_rows_as_the_plan_says(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir, "rollout.slots=auto"))
    task = build_task_of(recipe)
    plan = plan_run(recipe, task, build_objective(recipe), lambda line: None)
    policy = build_policy(recipe)
    assert plan is not None
    for given, rows in ((plan, 64), (replace(plan, sizes=replace(plan.sizes, slots=5)), 5)):
        engine = build_engine(policy, recipe, memory=given)
        assert isinstance(engine, NativeEngine)
        assert engine._capacity == rows


def test_a_model_of_unknown_sizes_is_loaded_without_a_plan(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson.")
    recipe = load(words(tmp_path / "run", folder))
    said: list[str] = []
    assert plan_run(recipe, build_task_of(recipe), build_objective(recipe), said.append) is None
    assert said[0].startswith("no memory plan: ")


def test_what_is_available_is_free_memory() -> None:
    assert 0 < available_bytes(torch.device("cpu")) < 2**50


def test_what_does_not_fit_is_refused_before_loading(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir))
    with pytest.raises(DoesNotFitError, match="does not fit"):
        plan_memory(recipe, read_shape(tiny_model_dir), "cuda", 2**30, prompt_tokens=30, passes=False)


@pytest.mark.gpu
def test_a_gpu_run_is_given_the_plans_sizes(tmp_path: Path, tiny_model_dir: Path) -> None:
    recipe = load(words(tmp_path, tiny_model_dir, "device=cuda"))
    parts = build_parts(recipe, build_task_of(recipe))
    assert parts.memory is not None
    assert parts.learner.execution == execution(parts.memory)
    assert parts.memory.available <= torch.cuda.mem_get_info()[1]
