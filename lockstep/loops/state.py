"""What a run saves and how it comes back: weights, optimizer, critic, counters. Random numbers need none: seeds are functions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checkpoint.state import CheckpointState, ModelFiles, read_state, save_state
from lockstep.checkpoint.store import CheckpointInfo, prune
from lockstep.config.load import dump
from lockstep.config.schema import Health, Recipe
from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.learner.adapter_files import live_tensors, read_base, saved_tensors, saved_texts
from lockstep.learner.adapters import facts_of
from lockstep.sync.fingerprint import fingerprint
from lockstep.track.jsonl import Prefix, strict
from lockstep.track.rundir import RunDirectory
from lockstep.types import Proof

if TYPE_CHECKING:
    from lockstep.loops.parts import Parts

CRITIC_PREFIX = "critic."
"""Of the critic's tensors, which stand among the optimizer's."""


def recipe_hash(recipe: Recipe) -> str:
    """Of all settings that may change a result: those of health may change while a run is resumed."""
    result = recipe.model_copy(update={"health": Health()})
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
    adapter = recipe.adapter.kind != "none"
    meta: dict[str, Any] = {
        "counters": parts.learner.counters(),
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
    optimizer = parts.learner.optimizer.tensors()
    if parts.critic is not None:
        meta["critic"] = parts.critic.counters()
        optimizer |= {f"{CRITIC_PREFIX}{name}": tensor for name, tensor in parts.critic.tensors().items()}
    state = CheckpointState(step, _stored(parts, adapter=adapter), optimizer, meta)
    facts = facts_of(parts.policy.model)
    texts = saved_texts(parts.policy.model, recipe.adapter, facts.base) if facts else {}
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    source = None if adapter else parts.policy.resolved.path
    path = save_state(run, state, ModelFiles(weights, texts, source), overwrite=True)  # type: ignore[arg-type]
    prune(run, recipe.save.keep_last, best[1] if best else None)
    return path


def require_own_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Raise RunDirectoryError if recipe.yaml is not the one that the run was started with, settings of health apart."""
    began = run.manifest().get("recipe")
    if began is not None and began != recipe_hash(recipe):
        raise RunDirectoryError(
            "was edited after the run began: its settings are those of another run",
            where=str(run.recipe_path),
            fix="put it back as it was, or start a new run with it: lockstep train",
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
            f"does not hold the rows that were written up to step {info.step}: {short}",
            where=str(run.metrics_path),
            fix=f"put the file back as it was, or begin another run from these weights: warm_start={info.path}",
        )


def read_weights(info: CheckpointInfo) -> tuple[dict[str, Tensor], CheckpointState]:
    """A checkpoint's weights under the names of lockstep.models.weights, and the whole state."""
    state = read_state(info)
    return live_tensors(state.weights, residual=bool(read_base(info.path)[1])), state


def restore(parts: Parts, state: CheckpointState, recipe: Recipe) -> None:
    """Continue from a checkpoint whose weights the parts were built with. Raises CheckpointError if they are others."""
    meta: Mapping[str, Any] = state.meta
    if meta["recipe"] != recipe_hash(recipe):
        raise CheckpointError(
            "it was saved under another recipe", where=f"step {state.step}", fix="resume with the run's own recipe.yaml"
        )
    critic = {n.removeprefix(CRITIC_PREFIX): t for n, t in state.optimizer.items() if n.startswith(CRITIC_PREFIX)}
    policy = {n: t for n, t in state.optimizer.items() if not n.startswith(CRITIC_PREFIX)}
    parts.learner.restore(meta["counters"], policy)
    if parts.critic is not None:
        parts.critic.restore(meta["critic"], critic)
    parts.carried.restore(meta["carried"])
    found = fingerprint(parts.learner.weights()).combined
    if found != meta["fingerprint"]:
        raise CheckpointError(
            f"the restored weights have fingerprint {found}, the saved ones had {meta['fingerprint']}",
            where=f"step {state.step}",
            fix="check that model.path and model.revision still name the weights that the run started from",
        )


def _stored(parts: Parts, *, adapter: bool) -> dict[str, Tensor]:
    if not adapter:
        return {n: t for n, t in parts.learner.weights() if not n.endswith(".lora_scaling")}
    return saved_tensors(parts.policy.model)
