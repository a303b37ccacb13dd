"""Runs an evaluation on several workers: each has all the weights and an engine; the driver has no model."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeAlias

from lockstep.build.adapter_folder import AdapterTarget
from lockstep.build.build import build_task_of
from lockstep.build.parts import Meanwhile, PolicyFacts
from lockstep.checkpoint.store import CheckpointInfo
from lockstep.cluster.build import connected, start_workers
from lockstep.cluster.group import GroupLearner, GroupSync
from lockstep.cluster.group_engine import GroupEngine
from lockstep.cluster.process_workers import Workers
from lockstep.cluster.sampler import Facts, Sampler
from lockstep.config.schema import Colocated, Local, Recipe
from lockstep.errors import WorkerError, WorkerLost
from lockstep.scoring.targets import EvalSession, Saved, build_eval_model, build_eval_session, prove_in, require_saved
from lockstep.sync.compare import RankProof
from lockstep.tasks.base import BuiltTask
from lockstep.types import LearnerFacts, Proof


class Evaluator(Sampler):
    """A worker that scores. `build` comes first; it reads saved weights itself, and proves its own engine."""

    def build(self, recipe: str, weights: bool) -> Facts:
        """Build model and engine. `weights`: a checkpoint will replace every weight."""
        self._prepare(recipe)
        self._own = own = build_eval_model(self._recipe, replaced=weights)
        self._serve_from(own.policy, own.engine)
        self._sync = own.sync
        learner = LearnerFacts(str(self._device), (), own.base, 0, 0, False)
        return Facts(learner, own.policy.numerics, own.policy.context, own.policy.chat.stop_ids, None)

    def read(self, path: str, step: int, meta: dict[str, Any]) -> tuple[int, str, str]:
        """Read a checkpoint that the driver verified; returns version, fingerprint and note."""
        return self._kept(self._own.read(CheckpointInfo(step, Path(path), complete=True, meta=meta)))

    def read_adapter(self, path: str, base: str, config: dict[str, Any]) -> tuple[int, str, str]:
        """Read an adapter's folder; returns version, fingerprint and note."""
        return self._kept(self._own.read_adapter(AdapterTarget(Path(path), base, config)))

    def _kept(self, saved: Saved) -> tuple[int, str, str]:
        self._saved = saved
        return saved.version, saved.fingerprint, saved.note

    def place(self) -> None:
        """Put what was read in place."""
        self._own.place(self._saved)

    def push(self) -> RankProof:
        """Prove the engine."""
        return RankProof(self._sync.push(self._own.learner, self.engine), self._sync.shift, self._sync.fingerprints, {})


@dataclass(frozen=True, slots=True)
class GroupSession:
    """Workers with a model and an engine each, and a task. EvalSession says what the methods do."""

    policy: PolicyFacts
    task: BuiltTask
    engine: GroupEngine
    sync: GroupSync
    learner: GroupLearner
    workers: Workers
    base: str

    def prove(self) -> Proof:
        """Prove that all engines have the weights in place. Raises SyncError naming tensors and ranks."""
        return prove_in(self.sync, self.learner, self.engine)

    def read(self, info: CheckpointInfo) -> Saved:
        """Have all workers read a checkpoint."""
        return Saved({}, *self.workers.call("read", str(info.path), info.step, dict(info.meta))[0])

    def read_adapter(self, found: AdapterTarget) -> Saved:
        """Have all workers read an adapter's folder."""
        return Saved({}, *self.workers.call("read_adapter", str(found.path), found.base, dict(found.config))[0])

    def prove_saved(self, saved: Saved) -> Proof:
        """Put what was read last in place and prove that all engines have it. Raises SyncError, EvaluationError."""
        self.workers.call("place")
        self.learner.version = saved.version
        return require_saved(self.prove(), saved)


Session: TypeAlias = EvalSession | GroupSession


def open_session(recipe: Recipe, stack: ExitStack, *, replaced: bool = False) -> Session:
    """Load model and task of a recipe where it places them. Processes that are started end with `stack`."""
    if isinstance(recipe.placement, Local):
        return build_eval_session(recipe, replaced=replaced)
    task = build_task_of(recipe)
    placement = Colocated(gpus=recipe.workers, timeout_s=recipe.placement.timeout_s)  # those that train score, too
    folder = _folder(stack)
    resolved, started = start_workers(recipe, placement, folder, stack, f"{__name__}:{Evaluator.__name__}")
    started.again = "evaluate again"
    workers = Workers(started, range(started.size))
    facts: Facts = workers.call("build", json.dumps(recipe.model_dump(mode="json")), replaced)[0]
    return GroupSession(
        connected(recipe, task, resolved, facts),
        task,
        GroupEngine(workers, recipe),
        GroupSync(workers),
        GroupLearner(workers, facts.learner, Meanwhile()),
        workers,
        facts.learner.base,
    )


def _folder(stack: ExitStack) -> Path:
    """Make a folder for the workers' logs, which stays if one of them was lost or failed."""
    folder = Path(mkdtemp(prefix="lockstep-eval-"))

    def remove(kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, WorkerLost | WorkerError):
            shutil.rmtree(folder, ignore_errors=True)

    stack.push(remove)
    return folder
