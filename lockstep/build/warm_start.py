"""Warm start: a new run from the trained weights of another, which are proven to be those that were saved.

A resume continues the same run: weights, optimizer, step count. A warm start is another run, with its own recipe, optimizer and
steps; it takes only weights. Full training begins from full training; adapters begin on top of a fully trained base, or
continue adapters of the same shape, over the same base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoint.manifest import COMMIT
from lockstep.checkpoint.state import CheckpointState, read_state
from lockstep.checkpoint.store import PLACE, CheckpointInfo, open_checkpoint, verify_checkpoint
from lockstep.config.load import load
from lockstep.config.schema import Adapter, Recipe
from lockstep.errors import CheckpointError
from lockstep.learner.adapter_files import live_tensors, read_base
from lockstep.models.weights import load_weights, named_weights
from lockstep.sync.fingerprint import fingerprint
from lockstep.track.places import run_of
from lockstep.track.rundir import RunDirectory, is_run

WHERE = "warm_start"


@dataclass(frozen=True, slots=True)
class Parent:
    """A checkpoint that a run starts from; every byte was verified."""

    info: CheckpointInfo
    run: Path | None
    """The run of the checkpoint; None for a checkpoint folder on its own."""
    recipe: Recipe | None
    """Recipe of that run."""
    parent: Parent | None = None
    """Checkpoint that an adapter's run had started from itself: its base."""

    @property
    def fingerprint(self) -> str:
        return str(self.info.meta["fingerprint"])

    @property
    def trained(self) -> str:
        """Kind of its adapter; none means full training."""
        return str(self.info.meta["adapter"])

    @property
    def line(self) -> str:
        """One line for people. Example: "runs/sft at step 60, weights 0123456789abcdef"."""
        return f"{self.run or self.info.path} at step {self.info.step}, weights {self.fingerprint}"

    @property
    def lineage(self) -> dict[str, object]:
        """Entry of the manifest: this checkpoint, and the origin of its own run, as in that run's manifest."""
        before = RunDirectory.open(self.run).manifest().get("parent") if self.run is not None else None
        facts = {"run": str(self.run or self.info.path), "step": self.info.step, "fingerprint": self.fingerprint}
        return {**facts, "trained": self.trained, "parent": before}


def pinned(recipe: Recipe) -> Recipe:
    """Resolve `warm_start` to the path of a checkpoint, so that a resume uses the same one.

    Raises CheckpointError or RunDirectoryError if there is none.
    """
    if recipe.warm_start is None:
        return recipe
    return recipe.model_copy(update={"warm_start": str(find_checkpoint(recipe.warm_start).path)})


def checkpoint_at(path: Path) -> CheckpointInfo | None:
    """Return the checkpoint that a run directory (its newest) or a checkpoint folder stands for, verified; None for others."""
    if (path / COMMIT).is_file():
        return verify_checkpoint(path)
    return open_checkpoint(path) if is_run(path) else None


def find_checkpoint(name: str) -> CheckpointInfo:
    """Return the checkpoint that a setting names, as `checkpoint_at`. Raises CheckpointError if there is none."""
    path = Path(name)
    if (info := checkpoint_at(path)) is not None:
        return info
    gone = PLACE.match(path.name) is not None
    raise CheckpointError(
        "the checkpoint that this run starts from is missing" if gone else "the path is neither a run nor a checkpoint",
        where=f"{WHERE}={name}",
        fix="put the checkpoint back: this run needs it, also for a resume"
        if gone
        else "set the path of a run or of a checkpoint",
    )


def find_parent(recipe: Recipe) -> Parent | None:
    """Return a recipe's start, back to full training. Raises CheckpointError if it does not fit the recipe's adapter."""
    if recipe.warm_start is None:
        return None
    parent = _read(recipe.warm_start)
    _require_fit(parent, recipe.adapter)
    return parent


def _read(name: str) -> Parent:
    info = find_checkpoint(name)
    run = run_of(info.path)
    if run is None:
        return Parent(info, None, None)
    recipe = load([str(RunDirectory.open(run).recipe_path)])
    over = info.meta["adapter"] != "none" and recipe.warm_start is not None
    return Parent(info, run, recipe, _read(str(recipe.warm_start)) if over else None)


def _require_fit(parent: Parent, adapter: Adapter) -> None:
    if parent.trained == "none":
        return
    where = f"{WHERE}={parent.run or parent.info.path}"
    if adapter.kind == "none":
        raise CheckpointError(
            f"the checkpoint has adapters ({parent.trained}), but this run trains all weights",
            where=where,
            fix="export the model with lockstep export --merge and set model.path to it, or use that run's adapter settings",
        )
    if getattr(adapter, "start", None) is not None:
        raise CheckpointError(
            "adapter.start would have no effect: the run continues the adapters of its warm start",
            where=where,
            fix="leave out warm_start or adapter.start",
        )
    before = parent.recipe.adapter if parent.recipe else None
    ignored = {"start", "init"}  # start settings: the adapter continues, so they have no effect
    differ = []
    if before is not None:
        old, new = before.model_dump(exclude=ignored), adapter.model_dump(exclude=ignored)
        differ = [
            f"adapter.{key} was {old.get(key)}, is {new.get(key)}" for key in old | new if old.get(key) != new.get(key)
        ]
    if differ or parent.trained != adapter.kind:
        raise CheckpointError(
            f"the checkpoint's adapters differ from this run's: {'; '.join(differ) or f'{parent.trained}, not {adapter.kind}'}",
            where=where,
            fix="use the adapter settings of that run to continue its adapters, or merge them into a model first",
        )


def base_checkpoint(name: str) -> str | None:
    """Return the checkpoint of the last full training behind a warm start's setting; None if only adapters were trained."""
    base = base_of(_read(name))
    return None if base is None else str(base.info.path)


def base_of(parent: Parent | None) -> Parent | None:
    """Return the last full training behind a warm start; None if its adapters are over the recipe's own model."""
    while parent is not None and parent.trained != "none":
        parent = parent.parent
    return parent


# --- weights --------------------------------------------------------------------------------------------------------
def load_base(model: nn.Module, parent: Parent | None) -> None:
    """Load the last full training behind `parent` into a model without adapters. Raises CheckpointError if it does not fit."""
    parent = base_of(parent)
    if parent is None:
        return
    weights = _stored(parent.info)
    found = fingerprint(iter(weights.items())).combined
    if found != parent.fingerprint:
        raise CheckpointError(
            f"the checkpoint's weights have changed: their fingerprint is {found}, but it was {parent.fingerprint} when saved",
            where=str(parent.info.path),
            fix="choose another checkpoint, or restore this one from a copy",
        )
    own = dict(named_weights(model))
    strange = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
    if strange:
        raise CheckpointError(
            f"the checkpoint's model differs from this run's in {len(strange)} tensors, such as {strange[0]}",
            where=f"{WHERE}={parent.info.path}",
            fix=f"set model.path to the model of that run: {parent.info.meta['model']}",
        )
    load_weights(model, ((name, tensor.to(own[name].dtype)) for name, tensor in weights.items()))


def adapter_weights(parent: Parent | None, numerics: str) -> Mapping[str, Tensor] | None:
    """Return the adapters to continue; None if the run begins new ones or none.

    Raises CheckpointError if their precision differs from that of this run's weights.
    """
    if parent is None or parent.trained == "none":
        return None
    saved = str(parent.info.meta["numerics"])
    if saved != numerics:
        raise CheckpointError(
            f"the checkpoint's adapters and base are in {saved}, but this run's model is in {numerics}",
            where=f"{WHERE}={parent.info.path}",
            fix=f"set model.dtype={saved}",
        )
    return _stored(parent.info)


def require_proven(model: nn.Module, parent: Parent) -> None:
    """Raise CheckpointError unless base and adapters together are the saved weights."""
    found = fingerprint(named_weights(model)).combined
    if found != parent.fingerprint:
        numerics: Any = parent.info.meta["numerics"]
        raise CheckpointError(
            f"the fingerprint of base and adapters is {found}, but it was {parent.fingerprint} when they were saved",
            where=f"{WHERE}={parent.info.path}",
            fix=f"use that run's model ({parent.info.meta['model']}, {numerics}) and its adapter settings",
        )


def read_weights(info: CheckpointInfo) -> tuple[dict[str, Tensor], CheckpointState]:
    """Return a checkpoint's weights under the names of lockstep.models.weights, and the whole state."""
    state = read_state(info)
    return live_tensors(state.weights, residual=bool(read_base(info.path)[1])), state


def _stored(info: CheckpointInfo) -> dict[str, Tensor]:
    return read_weights(info)[0]
