"""Targets of `lockstep eval` and `lockstep sample`, and the proven transfer of their weights to an engine.

    find_target(NAME)             a run, one of its checkpoints, or a model → Target: recipe, step, verified checkpoint
    build_eval_session(recipe)    a target's recipe → EvalSession: model with the base's weights, task, engine
    session.prove()               the base's weights in the engine → Proof
    session.read(checkpoint), session.prove_saved(…)    a checkpoint's weights, checked against their record → Proof

Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.build.adapter_folder import AdapterTarget, adapter_settings, find_adapter, refuse_sharded
from lockstep.checkpoint.manifest import COMMIT
from lockstep.checkpoint.store import CheckpointInfo, list_checkpoints, open_checkpoint, verify_checkpoint
from lockstep.config.load import load, load_run, use_paths
from lockstep.config.numerics import Numerics
from lockstep.config.schema import Model, NoAdapter, Recipe
from lockstep.errors import DEFECT, CheckpointError, ConfigError, CorruptCheckpointError, EvaluationError
from lockstep.models.builtin import BUILTINS
from lockstep.models.resolve import HUB_ID
from lockstep.track.places import run_of
from lockstep.track.rundir import RunDirectory, is_run

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.build.parts import Policy
    from lockstep.learner.frozen import FrozenLearner
    from lockstep.sync.transports import CopySync, RunSync, SharedSync
    from lockstep.tasks.base import BuiltTask
    from lockstep.types import Learner, Proof, RolloutEngine

STEP_NAME = re.compile(r"step_(\d{6,})")
TRAINED = re.compile(r"(?:global_step_|checkpoint-|step_)(\d+)")
"""Folder names that trainers give by the number of finished steps."""

OWN = ("model", "adapter", "warm_start")
"""Settings that belong to a run's weights: they stay the run's own under any recipe, except for overrides."""


@dataclass(frozen=True, slots=True)
class Target:
    """Weights to be evaluated or sampled, with their recipe."""

    label: str
    """Name for people. Example: "runs/mine at step 40"."""
    recipe: Recipe
    """The recipe to evaluate with; its model and adapter are those of the weights."""
    step: int
    """Number of trained steps behind the weights; 0 is a model that the recipe did not train."""
    checkpoint: CheckpointInfo | None = None
    """The checkpoint, every byte verified; None for the model's own weights."""
    run: Path | None = None
    trained: Recipe | None = None
    """The run's own recipe, without overrides."""
    recipe_model: Recipe | None = None
    """Recipe of the model that the given recipe names, if the target is another model."""
    adapter: AdapterTarget | None = None
    """The adapter of a folder that is not one of our checkpoints."""
    name: str = ""
    """Name given by the user (name=path)."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: damaged checkpoints that were passed over."""

    @property
    def whole(self) -> bool:
        """True if its checkpoint holds every weight, so that its start weights are not needed."""
        return self.checkpoint is not None and self.recipe.adapter.kind == "none"


def find_target(
    name: str, recipes: Sequence[str] = (), overrides: Sequence[str] = (), step: int | None = None
) -> Target:
    """Find the target that `name` means: a run directory, a checkpoint or adapter folder, or a model (built-in name, hub id,
    folder).

    A run's recipe is its own, with `overrides`; with `recipes` the task and everything else come from there, but model and
    adapter stay the run's. Adapters and models need `recipes`. Without `step` a run stands for its newest intact checkpoint;
    step 0 is its base. Raises RunDirectoryError, ConfigError, ModelError, or CheckpointError, also for a sharded training
    folder.
    """
    path = Path(name)
    place = STEP_NAME.fullmatch(path.resolve().name)
    if place and (run := run_of(path)) is not None:
        _refuse_step(name, step)
        return _of_run(run, recipes, overrides, int(place[1]))
    if is_run(path):
        return _of_run(path, recipes, overrides, step)
    if (path / COMMIT).is_file():
        _refuse_step(name, step)
        return _of_lone_checkpoint(path, recipes, overrides)
    if path.is_dir():
        if found := find_adapter(path):
            return _of_adapter(name, found, recipes, overrides, step)
        refuse_sharded(path)
    return _of_model(name, recipes, overrides, step)


def _of_run(path: Path, recipes: Sequence[str], overrides: Sequence[str], step: int | None) -> Target:
    run = RunDirectory.open(path)
    trained = load([str(run.recipe_path)])
    use_paths(trained)
    if recipes:
        mine = [word for word in overrides if word.split("=")[0].split(".")[0] in OWN]
        asked = load_run([*recipes, *(word for word in overrides if word not in mine)])
        kept = load([str(run.recipe_path), *mine])
        own = {name: getattr(kept, name) for name in OWN}
        recipe = _in_numerics(asked.model_copy(update=own), trained.numerics)
    else:
        recipe = load([str(run.recipe_path), *overrides])
    if step == 0:
        return Target(f"{path} at step 0, its base", recipe, 0, run=path, trained=trained)
    info = _checkpoint(path, step, trained)
    label = f"{path} at step {info.step}"
    return Target(label, _in_saved_precision(recipe, info), info.step, info, path, trained, notes=info.notes)


def _checkpoint(run: Path, step: int | None, trained: Recipe) -> CheckpointInfo:
    if not list_checkpoints(run):
        raise CheckpointError(
            "the run has no checkpoint yet",
            where=str(run),
            fix=f"wait for the first checkpoint (save.every={trained.save.every}), or give its base: --step 0",
        )
    try:
        return open_checkpoint(run, step, allow_fallback=step is None)
    except CorruptCheckpointError as error:
        others = ", ".join(str(info.step) for info in list_checkpoints(run) if info.complete and info.step != step)
        fix = f"give another checkpoint with --step: {others}" if others else "no other checkpoint exists: train again"
        raise CorruptCheckpointError(error.what, where=error.where, fix=fix) from error


def _of_lone_checkpoint(path: Path, recipes: Sequence[str], overrides: Sequence[str]) -> Target:
    if not recipes:
        what = f"{path}: this checkpoint is not in the folder of its run, so its recipe is unknown"
        raise ConfigError([f"{what}: --recipe RECIPE is needed"], fix=_NEEDS)
    info = verify_checkpoint(path)
    recipe = load_run([*recipes, *overrides])
    recipe = _in_numerics(recipe, Numerics.model_validate(info.meta.get("computes", {})))
    return Target(f"{path}, step {info.step}", _in_saved_precision(recipe, info), info.step, info)


def _of_adapter(
    name: str, found: AdapterTarget, recipes: Sequence[str], overrides: Sequence[str], step: int | None
) -> Target:
    if not recipes:
        raise ConfigError([f"{name}: an adapter needs --recipe RECIPE, to say which task"], fix=_NEEDS)
    _refuse_step(name, step)
    named, asked = load([*recipes]).model, load_run([*recipes, *overrides])
    model, notes = asked.model, []
    # An override of model.path takes precedence.
    if found.base and found.base != model.path and asked.model.path == named.path:
        notes.append(f"{name} was made for {found.base}; the recipe's model, {model.path}, is not used")
        model = Model(path=found.base, dtype=model.dtype)
    if found.path != Path(name):
        notes.append(f"the adapter is in {found.path}")
    began = asked.warm_start  # a base that was trained before; only our own adapters record whether it is theirs
    if began and not (found.path / "adapter_base.json").is_file():
        notes.append(f"warm_start={began} is not used: {name} does not say that it was made for those weights")
        began = None
    if began:  # its adapters are in the folder; their base may have been trained before them
        from lockstep.build.warm_start import base_checkpoint

        began = base_checkpoint(began)
    settings = adapter_settings(found, asked.adapter)
    recipe = asked.model_copy(update={"model": model, "adapter": settings, "warm_start": began})
    steps = [int(match[1]) for part in found.path.resolve().parts if (match := TRAINED.fullmatch(part))]
    return Target(name, recipe, steps[-1] if steps else 0, adapter=found, notes=tuple(notes))


def _of_model(name: str, recipes: Sequence[str], overrides: Sequence[str], step: int | None) -> Target:
    path = Path(name)
    if not recipes:
        if not path.exists() and any(path.parent.glob("*/manifest.json")):
            RunDirectory.open(path)  # raises, naming the runs that are there
        what, fix = (
            f"{name}: neither a run nor a checkpoint; as a model it needs --recipe RECIPE, to say which task",
            _NEEDS,
        )
        if not path.exists() and name not in BUILTINS:
            near = get_close_matches(path.name, [one.name for one in path.parent.glob("*")], n=1)
            hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
            what = f"{name}: neither a run nor a checkpoint: there is no such file or folder{hint}"
            fix = (
                f"correct the path, or for a model of the hub {_NEEDS}"
                if HUB_ID.fullmatch(name)
                else "correct the path"
            )
        raise ConfigError([what], fix=fix)
    if step:
        raise ConfigError([f"--step {step} is not possible: the model {name} has no steps"], fix="leave --step out")
    named, asked = load([*recipes]).model, load_run([*recipes, *overrides])
    if asked.model.path not in (named.path, name):
        what = f"model.path={asked.model.path} is not possible: the target is the model {name}"
        raise ConfigError([what], fix="leave model.path out, or give that model as the target")
    began = asked.warm_start  # trained weights, which would replace the model's own
    notes = (f"warm_start={began} is not used: these are the weights of {name} itself",) if began else ()
    asked = asked.model_copy(update={"adapter": NoAdapter(), "warm_start": None})
    if named.path == name:
        return Target(name, asked, 0, notes=notes)
    # The recipe's adapter, revision and trust were meant for the recipe's own model; those of overrides are for this one.
    model = Model(
        path=name,
        dtype=asked.model.dtype,
        revision=None if asked.model.revision == named.revision else asked.model.revision,
        trust_remote_code=asked.model.trust_remote_code and not named.trust_remote_code,
    )
    recipe = asked.model_copy(update={"model": model})
    return Target(name, recipe, 0, recipe_model=recipe.model_copy(update={"model": named}), notes=notes)


_NEEDS = "add --recipe RECIPE (a file or a built-in recipe's name)"


def _refuse_step(name: str, step: int | None) -> None:
    if step is not None:
        what = f"--step {step} is not possible: {name} has only one step"
        raise ConfigError([what], fix="give the run, or leave --step out")


def _in_saved_precision(recipe: Recipe, info: CheckpointInfo) -> Recipe:
    """Return the recipe with the checkpoint's precision: `dtype: auto` may mean another one on this machine."""
    if recipe.model.dtype != "auto":
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": info.meta["numerics"]})})


def _in_numerics(recipe: Recipe, trained: Numerics) -> Recipe:
    """Return the recipe with the numerics of training, unless the requested recipe sets numerics itself."""
    return recipe if recipe.numerics != Numerics() else recipe.model_copy(update={"numerics": trained})


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's weights in memory, verified against the saved fingerprint."""

    weights: Mapping[str, Tensor]
    version: int
    fingerprint: str
    """Fingerprint of the whole model with these weights in place."""
    note: str = ""
    """Remark for the user."""


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A model in memory with an engine. It begins with the base's weights."""

    policy: Policy
    engine: RolloutEngine
    sync: SharedSync | CopySync
    learner: FrozenLearner

    @property
    def base(self) -> str:
        """Fingerprint of the base under an adapter; "" without one."""
        from lockstep.learner.adapters import facts_of

        facts = facts_of(self.policy.model)
        return "" if facts is None else facts.base.fingerprint

    def prove(self) -> Proof:
        """Give the engine the weights in place (at first the base's) and prove it. Raises SyncError."""
        return prove_in(self.sync, self.learner, self.engine)

    def read(self, info: CheckpointInfo) -> Saved:
        """Read a checkpoint: see read_checkpoint."""
        return read_checkpoint(self.policy, info)

    def read_adapter(self, found: AdapterTarget) -> Saved:
        """Read an adapter's folder: see read_adapter_folder."""
        return read_adapter_folder(self.policy, found)

    def place(self, saved: Saved) -> None:
        """Put a checkpoint's weights in place; the engine's proof is still of those before."""
        from lockstep.models.weights import load_weights

        load_weights(self.policy.model, iter(saved.weights.items()))
        self.learner.version = saved.version

    def prove_saved(self, saved: Saved) -> Proof:
        """Put a checkpoint's weights in place and prove that the engine has them. Raises SyncError, EvaluationError."""
        self.place(saved)
        return require_saved(self.prove(), saved)


@dataclass(frozen=True, slots=True)
class EvalSession(EvalModel):
    """A model in memory with an engine and a task."""

    task: BuiltTask


def prove_in(sync: RunSync, learner: Learner, engine: RolloutEngine) -> Proof:
    """Give an engine the learner's weights and prove it. Raises SyncError."""
    proof = sync.push(learner, engine)
    if proof.changed < 0:  # the first proof of this session: show that it would notice a false tensor
        sync.negative_control(learner, engine)
    return proof


def require_saved(proof: Proof, saved: Saved) -> Proof:
    """Return a proof. Raises EvaluationError if it is not of these weights."""
    if proof.fingerprint != saved.fingerprint:
        raise EvaluationError(
            f"the engine's weights have the fingerprint {proof.fingerprint}, but the checkpoint's have {saved.fingerprint}",
            where=f"version {saved.version}",
            fix=DEFECT,
        )
    return proof


def read_checkpoint(policy: Policy, info: CheckpointInfo) -> Saved:
    """Return the weights of a checkpoint, not yet in place. Raises EvaluationError if they differ from model or record."""
    from lockstep.build.build import adopt
    from lockstep.build.warm_start import read_weights
    from lockstep.models.weights import named_weights
    from lockstep.sync.fingerprint import fingerprint

    weights, state = read_weights(info)
    meta: Any = state.meta
    if meta["numerics"] != policy.numerics:
        _misfit(info, f"was saved in {meta['numerics']}, but the model was loaded in {policy.numerics}")
    weights = adopt(policy, weights)
    own = dict(named_weights(policy.model))
    if strange := sorted(weights.keys() - own.keys()):
        _misfit(info, f"has {len(strange)} tensors that the model lacks, such as {strange[0]}")
    found = fingerprint(iter((own | weights).items())).combined
    if found != meta["fingerprint"]:
        _misfit(info, f"had the fingerprint {meta['fingerprint']} when it was saved, but has {found} with this model")
    return Saved(weights, meta["counters"]["version"], found)


def read_adapter_folder(policy: Policy, found: AdapterTarget) -> Saved:
    """Return the weights of an adapter's folder, not yet in place.

    Raises ModelError if it was made for another base, EvaluationError unless its tensors are exactly those of this adapter.
    """
    from safetensors.torch import load_file

    from lockstep.learner.adapter_files import TENSORS, check_base, in_own_layout, live_tensors, read_adapter
    from lockstep.learner.adapters import facts_of
    from lockstep.models.weights import named_weights
    from lockstep.sync.fingerprint import fingerprint

    facts = facts_of(policy.model)
    note = check_base(read_adapter(found.path), facts.base) if facts is not None else ""
    own = dict(named_weights(policy.model))
    weights = in_own_layout(live_tensors(load_file(found.path / TENSORS), residual=False), own)
    wanted = {n for n, _ in named_weights(policy.model, trainable_only=True) if not n.endswith(".lora_scaling")}
    if odd := sorted(weights.keys() ^ wanted) or sorted(n for n in wanted if weights[n].shape != own[n].shape):
        side = "has" if odd[0] in weights else "lacks"
        raise EvaluationError(
            f"the adapter does not fit the model: it {side} the tensor {odd[0]}"
            + (f" and {len(odd) - 1} more" if odd[1:] else ""),
            where=str(found.path),
            fix="set model.path to the base that the adapter was made for; nothing was evaluated",
        )
    placed = {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}
    return Saved(placed, 1, fingerprint(iter((own | placed).items())).combined, note)


def build_eval_session(recipe: Recipe, *, replaced: bool = False) -> EvalSession:
    """Load model and task of a recipe. Raises LockstepError for anything that would fail later. `replaced` as in build_policy."""
    from lockstep.build.build import build_task_of, connect

    task = build_task_of(recipe)
    model = build_eval_model(recipe, replaced=replaced)
    connect(task, model.policy)
    return EvalSession(model.policy, model.engine, model.sync, model.learner, task)


def build_eval_model(recipe: Recipe, *, replaced: bool = False) -> EvalModel:
    """Load a recipe's model, and build its engine."""
    from lockstep.build.build import build_engine, build_policy, build_weight_sync
    from lockstep.learner.execution import execution_of
    from lockstep.learner.frozen import FrozenLearner

    policy = build_policy(recipe, replaced=replaced)
    shared = recipe.sync.model_copy(update={"transport": "shared"})
    sync = build_weight_sync(policy, recipe.model_copy(update={"sync": shared}))
    execution = execution_of(recipe.update, next(policy.model.parameters()).device)
    learner = FrozenLearner(policy.model, execution.tokens_per_microbatch)
    return EvalModel(policy, build_engine(policy, recipe), sync, learner)


def _misfit(info: CheckpointInfo, what: str) -> NoReturn:
    raise EvaluationError(
        f"the checkpoint {what}",
        where=str(info.path),
        fix="use the model, revision, precision and adapter that it was trained with; nothing was evaluated",
    )
