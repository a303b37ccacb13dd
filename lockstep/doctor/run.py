"""The list of checks in the order of display, and the quick checks that every run makes before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.config.schema import Recipe
from lockstep.doctor import exercise, gpu, lock, machine, recipe
from lockstep.doctor.check import Check, Checking, perform
from lockstep.errors import MachineError


def doctor(wanted: Recipe | None = None) -> Iterator[Check]:
    """Make all checks of this machine, and of the recipe on it."""
    folder = Path("runs" if wanted is None else wanted.runs_dir)
    device = "auto" if wanted is None else wanted.device
    vllm = wanted is not None and wanted.rollout.engine == "vllm"
    extras = () if wanted is None else tuple(sorted({need.extra for need in recipe.needs(wanted)}))
    checks: list[tuple[str, Checking]] = [
        ("torch", lambda: gpu.check_gpu(device)),
        ("flash_attn", gpu.check_flash_attention),
        ("allocator", lambda: gpu.check_allocator(os.environ, vllm=vllm)),
        ("lock", lock.check_lock),
        *exercise.exercises(gpu=False),
        *machine.machine_checks(folder, extras, None if wanted is None else wanted.threads, _through_memory(wanted)),
    ]
    if wanted is not None and wanted.paths.checkpoints is not None:
        checks.append(("disk", lambda: machine.check_disk(wanted.paths.disk(wanted.runs_dir))))
    if wanted is not None:
        checks += [
            ("extras", lambda: recipe.check_extras(wanted)),
            ("model", lambda: recipe.check_model(wanted.model)),
            ("settings", lambda: recipe.check_recipe(wanted)),
        ]
    return perform(checks)


def require_machine(wanted: Recipe) -> list[Check]:
    """Make the checks that take no time and that nothing later in a run makes. Returns those that warn.

    Raises MachineError with all that fail. Model, plans, trackers and tasks are refused by the parts that need them.
    """
    found = list(
        perform(
            [
                ("limits", machine.check_limits),
                ("threads", lambda: machine.check_threads(wanted.threads)),
                ("memory", machine.check_memory),
                (
                    "shared memory",
                    lambda: [machine.check_shared_memory(needed=True)] if _through_memory(wanted) else [],
                ),
                ("extras", lambda: recipe.check_engine(wanted)),
                (
                    "gpu processes",
                    lambda: gpu.check_busy(wanted.device, wanted.workers, allowed="busy_gpu" in wanted.allow),
                ),
            ]
        )
    )
    failed = [check for check in found if check.verdict == "fail"]
    if failed:
        raise MachineError(
            "; ".join(f"{check.name}: {check.found}" for check in failed),
            where="this machine",
            fix="; ".join(check.fix for check in failed if check.fix) + "; `lockstep doctor` checks the rest",
        )
    return [check for check in found if check.verdict == "warn"]


def _through_memory(wanted: Recipe | None) -> bool:
    """Return whether weights pass from process to process through /dev/shm."""
    return wanted is not None and wanted.rollout.engine == "vllm" and wanted.rollout.vllm.process == "own"
