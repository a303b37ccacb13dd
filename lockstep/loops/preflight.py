"""Checks before a run that need no weights: device, model, rows, task, held-out items, room for the prompts.

`start_run` makes them before there is a run directory, `lockstep doctor RECIPE` to say whether the run would start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.algorithms.build import build_objective
from lockstep.build.build import prepare_for_engine, require_rows
from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.device import choose_device
from lockstep.doctor.check import Check
from lockstep.errors import LockstepError
from lockstep.evaluation.lm_eval import task_file
from lockstep.evaluation.plan import eval_plan
from lockstep.evaluation.runner import heldout_items
from lockstep.loops.checks import check_purity
from lockstep.loops.rollouts import check_pool, check_prompts
from lockstep.loops.sampling import round_prompts
from lockstep.loops.sft_data import Material, read_material, refuse_asked, with_steps
from lockstep.models import load_tokenizer, resolve
from lockstep.models.decoder import context_of
from lockstep.plan.epochs import with_steps_of_epochs
from lockstep.plan.model_shape import whole_model
from lockstep.plan.preview import weights_here
from lockstep.run.callbacks import load_callbacks
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.track.rundir import refuse_taken
from lockstep.track.sinks import check_installed
from lockstep.types import Prompt


@dataclass(frozen=True, slots=True)
class Ready:
    """Results of the checks that the run continues with."""

    task: BuiltTask
    material: Material | None
    """Rows of supervised fine-tuning."""
    notes: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    """Prompts of the first step."""
    heldout: tuple[Prompt, ...]
    """Held-out items of all evaluations."""
    seconds: float
    """Time that the checks took."""


def preflight(recipe: Recipe) -> Ready:
    """Check a recipe whose steps are known. Raises LockstepError for the first thing that would end the run."""
    begin = time.monotonic()
    prepare_for_engine(recipe)  # before anything asks for a GPU
    choose_device(recipe.device)
    build_objective(recipe)  # it tries a user's own loss and estimator
    load_callbacks(recipe.health.callbacks)
    ready_lm_eval(recipe)
    folder = resolve(recipe.model).path
    material = read_material(recipe) if recipe.sft is not None else None
    task, notes = ready_task(recipe)
    held = ready_items(recipe, task)
    if material is not None:
        refuse_asked(material, held)
    prompts = ready_prompts(recipe, task, held, folder)
    return Ready(task, material, tuple(notes), tuple(prompts), tuple(held), time.monotonic() - begin)


def with_known_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of steps that its epochs mean. Raises ConfigError, DataError, RunDirectoryError."""
    return with_steps(recipe) if recipe.loop == "sft" else with_steps_of_epochs(recipe)


def ready_task(recipe: Recipe) -> tuple[BuiltTask, list[str]]:
    """Return the task, with its data read and its grader tried, and notes about its questions."""
    task = build_task(recipe.task, recipe.seed)
    return task, check_purity(task, recipe) if recipe.loop == "rl" else []


def ready_items(recipe: Recipe, task: BuiltTask) -> list[Prompt]:
    """Return the held-out items of every evaluation. Raises EvaluationError or TaskError if there are too few."""
    if not recipe.eval.enabled:
        return []
    found: list[Prompt] = []
    for number, chosen in enumerate(recipe.eval.sets):
        setting = f"eval.also.{number - 1}.items=" if number else "eval.items="
        found += heldout_items(task, eval_plan(recipe, "fp32", chosen=chosen), setting)
    return found


def ready_lm_eval(recipe: Recipe) -> str:
    """Return the files of lm-eval's tasks. Raises MachineError without lm-eval, EvaluationError without a file."""
    return ", ".join(str(task_file(asked)) for asked in (recipe.eval.lm_eval if recipe.eval.enabled else ()))


def ready_prompts(recipe: Recipe, task: BuiltTask, held: list[Prompt], folder: Path) -> list[Prompt]:
    """Return the prompts of the first step. Raises ChatError for a prompt of training or evaluation that the model's chat
    template refuses, or that leaves no room for a reply, and ModelError for weights or a tokenizer of another model.
    """
    chat = ChatFormat(load_tokenizer(resolve(recipe.model)), recipe.chat, None)
    model = whole_model(folder, recipe.model.trust_remote_code)
    require_rows(model, chat, recipe.model.path)
    context = context_of(model.config)
    prompts = round_prompts(task, recipe, 0, 0, (), 0) if recipe.loop == "rl" else []
    check_prompts(chat, prompts, recipe.rollout.max_tokens, context)
    if recipe.loop == "rl":
        check_pool(chat, task, recipe.rollout.max_tokens, context)
    check_prompts(chat, held, recipe.eval.max_tokens or recipe.rollout.max_tokens, context)
    return prompts


# --- as checks of the doctor ----------------------------------------------------------------------------------------
def start_checks(recipe: Recipe) -> list[Check]:
    """Make the same checks for the doctor. Each source is read once; nothing is fetched or written."""
    path = Path(recipe.runs_dir) / recipe.name
    sinks = [sink.name for sink in recipe.track.sinks]
    found = [_tried("run folder", lambda: refuse_taken(path, recipe.paths.checkpoints), f"{path} is free")]
    found.append(_tried("trackers", lambda: check_installed(recipe.track), ", ".join(sinks) or "none asked"))
    found.append(_tried("device", lambda: choose_device(recipe.device), recipe.device))
    found.append(_tried("objective", lambda: build_objective(recipe), "loss and advantages can be computed"))
    if called := recipe.health.callbacks:
        found.append(_tried("callbacks", lambda: load_callbacks(called), ", ".join(one.path for one in called)))
    if recipe.eval.lm_eval:
        found.append(_tried("lm_eval", lambda: ready_lm_eval(recipe)))
    rows: list[Material] = []
    if recipe.sft is not None:
        found.append(_tried("rows", lambda: _rows(recipe, rows)))
    if recipe.task.kind != "none":
        found += _task_checks(recipe, rows)
    return found


def _task_checks(recipe: Recipe, rows: list[Material]) -> list[Check]:
    tasks: list[BuiltTask] = []

    def build() -> str:
        tasks.append(ready_task(recipe)[0])
        return "; ".join([f"{recipe.task.kind}: its data was read and its grader tried", *tasks[0].notes])

    found = [_tried("task", build)]
    if not tasks:
        return found
    held: list[Prompt] = []

    def items() -> str:
        held.extend(ready_items(recipe, tasks[0]))
        for material in rows:
            refuse_asked(material, held)
        return f"{len(held)} held-out items" if recipe.eval.enabled else "off (eval.enabled: false)"

    found.append(_tried("evaluation", items))
    folder = weights_here(recipe.model)
    if folder is not None and found[-1].verdict == "ok":
        room = lambda: ready_prompts(recipe, tasks[0], held, folder)  # noqa: E731
        found.append(_tried("prompts", room, "the chat template takes them, and they leave room for a reply"))
    return found


def _rows(recipe: Recipe, rows: list[Material]) -> str:
    rows.append(read_material(with_known_steps(recipe)))
    return "; ".join(rows[0].notes)


def _tried(name: str, check: Callable[[], object], good: str = "") -> Check:
    """Turn one step of a start into a check; an error that it raises is the finding."""
    try:
        found = check()
    except LockstepError as error:
        return Check.failed(name, error)
    return Check(name, "ok", good or str(found))
