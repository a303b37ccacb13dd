"""Saves and restores the state of a run: weights, optimizer, critic, counters.

No state of random generators is saved: each seed is computed from the run's seed, the step, the prompt and the sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.state import CheckpointState, ModelFiles, save_state
from lockstep.checkpoint.store import CheckpointInfo, prune
from lockstep.config.load import dump
from lockstep.config.schema import Health, Local, Paths, Recipe, Track
from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.run.extend import began_with, lengths
from lockstep.track.jsonl import Prefix, strict
from lockstep.track.rundir import RunDirectory
from lockstep.types import Proof

if TYPE_CHECKING:
    from lockstep.build.parts import Parts

CRITIC_PREFIX = "critic."
"""Prefix of the critic's tensors in optimizer.safetensors."""


def recipe_hash(recipe: Recipe) -> str:
    """Hash all settings that may change a result: the others (health, track …) may differ on a resume."""
    result = recipe.model_copy(
        update={
            "health": Health(),
            "track": Track(),
            "paths": Paths(),
            "placement": Local(),
            "allow": [],
            "optimizer": recipe.optimizer.model_copy(update={"offload": "none"}),
        }
    )
    return hashlib.sha256(dump(result).encode()).hexdigest()[:16]


def save_checkpoint(
    run: Path,
    parts: Parts,
    recipe: Recipe,
    step: int,
    proof: Proof,
    best: tuple[float, int] | None,
    rows: Prefix | None = None,
) -> Path:
    """Write the checkpoint of `step` trained steps, then delete those that the recipe does not keep.

    `best`: the highest value of save.keep_best so far, and its step. `rows`: metrics.jsonl up to this step.
    """
    path = save_state(run, *checkpoint_of(parts, recipe, step, proof, best, rows), overwrite=True)
    prune(run, recipe.save.keep_last, best[1] if best else None)
    return path


def checkpoint_of(
    parts: Parts,
    recipe: Recipe,
    step: int,
    proof: Proof,
    best: tuple[float, int] | None = None,
    rows: Prefix | None = None,
) -> tuple[CheckpointState, ModelFiles]:
    """Collect what a checkpoint holds: live tensors, to be written before the next update."""
    learner = parts.learner.save()
    meta: dict[str, Any] = {
        "counters": learner.counters,
        "carried": parts.carried.as_json(),
        "fingerprint": proof.fingerprint,
        "recipe": recipe_hash(recipe),
        "numerics": parts.policy.numerics,
        "computes": recipe.numerics.model_dump(mode="json"),
        "model": recipe.model.path,
        "adapter": recipe.adapter.kind,
        "rows": strict(rows),
        "best": strict(best),
    }
    optimizer = dict(learner.optimizer)
    if parts.critic is not None:
        meta["critic"] = parts.critic.counters()
        optimizer |= {f"{CRITIC_PREFIX}{name}": tensor for name, tensor in parts.critic.tensors().items()}
    state = CheckpointState(step, learner.weights, optimizer, meta)
    source = parts.policy.resolved.path if recipe.adapter.kind == "none" else None
    return state, ModelFiles(learner.file, learner.texts, source)


def require_own_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Raise RunDirectoryError if recipe.yaml is not the one that the run was started with, settings of health apart."""
    began = run.manifest().get("recipe")
    # An earlier length, if it was killed while it was extended.
    right_length = recipe.steps in (lengths(run) or [recipe.steps])
    if began is not None and not (right_length and began == recipe_hash(began_with(recipe, run))):
        raise RunDirectoryError(
            "the recipe was edited after the run began, so it does not describe this run any more",
            where=str(run.recipe_path),
            fix="undo the edit, or start a new run with the edited recipe: lockstep train RECIPE name=NAME",
        )


def require_own_rows(run: RunDirectory, info: CheckpointInfo) -> None:
    """Raise RunDirectoryError if metrics.jsonl does not begin with the rows that were there when `info` was saved."""
    saved = info.meta.get("rows")  # checkpoints of older versions have none
    if not isinstance(saved, Mapping):
        return
    rows = Prefix(saved["bytes"], saved["sha256"])
    if not rows.begins(run.metrics_path):
        size = run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
        short = f"{rows.bytes - size} of {rows.bytes} bytes are missing" if size < rows.bytes else "rows were changed"
        raise RunDirectoryError(
            f"the file does not hold the rows that were written up to step {info.step}: {short}",
            where=str(run.metrics_path),
            fix=f"restore the file from a backup, or begin another run from these weights: warm_start={info.path}",
        )


def known_recipes(run: RunDirectory, recipe: Recipe) -> set[str]:
    """Return the hashes that a checkpoint of the run may name: of each length that it has had, and of the host it came from."""
    fetched = run.manifest().get("fetched_from") or {}
    steps = (*lengths(run), recipe.steps)
    return {recipe_hash(recipe.model_copy(update={"steps": n})) for n in steps} | {fetched.get("recipe", "")} - {""}


def restore(parts: Parts, state: CheckpointState, recipes: Set[str]) -> None:
    """Continue from the checkpoint whose weights the parts were built with. Raises CheckpointError if the weights differ, or
    its recipe is none of `recipes` (hashes).
    """
    meta: Mapping[str, Any] = state.meta
    if meta["recipe"] not in recipes:
        raise CheckpointError(
            "the checkpoint was saved by a run with another recipe",
            where=f"checkpoint of step {state.step}",
            fix="resume with the run's own recipe.yaml",
        )
    critic = {n.removeprefix(CRITIC_PREFIX): t for n, t in state.optimizer.items() if n.startswith(CRITIC_PREFIX)}
    policy = {n: t for n, t in state.optimizer.items() if not n.startswith(CRITIC_PREFIX)}
    parts.learner.restore(meta["counters"], policy)
    if parts.critic is not None:
        parts.critic.restore(meta["critic"], critic)
    parts.carried.restore(meta["carried"])
    found = parts.learner.fingerprint().combined
    if found != meta["fingerprint"]:
        raise CheckpointError(
            f"the restored weights are not the saved ones: fingerprint {found} instead of {meta['fingerprint']}",
            where=f"checkpoint of step {state.step}",
            fix="check that model.path and model.revision still name the weights that the run started from",
        )
