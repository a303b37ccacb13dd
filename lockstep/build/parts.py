"""Records that hold the objects of a run: policy, task, engine, learner, sync. build.py makes them, and the loops use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from lockstep.algorithms.build import Objective
from lockstep.algorithms.kl import adapted_coef
from lockstep.build.warm_start import Parent
from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import MixedTask, Recipe
from lockstep.device import GpuPeak, gpu_peak
from lockstep.learner.protocol import RunCritic, RunLearner
from lockstep.models import ResolvedModel
from lockstep.noise.targets import Targets
from lockstep.plan.choice import MemoryPlan
from lockstep.sync.transports import RunSync
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.mixed import Progress
from lockstep.types import Metrics, Request, RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Everything about a policy except its weights. The driver of a run on workers has only this."""

    resolved: ResolvedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    numerics: Literal["fp32", "bf16"]
    context: int | None
    """Longest sequence that the model takes."""
    parent: Parent | None = None
    """The checkpoint that it started from; None for the model itself."""


@dataclass(frozen=True, slots=True)
class Policy(PolicyFacts):
    """A model that can be sampled: the common part of training, evaluation and sampling."""

    model: nn.Module = field(kw_only=True)


@dataclass(slots=True)
class Carried:
    """State that a run carries from step to step besides weights and optimizer; saved in every checkpoint, restored to the bit.

    Example: Carried(kl_coef=0.05, empty_steps=0)
    """

    kl_coef: float
    """Weight of the KL penalty in the next step."""
    empty_steps: int = 0
    """Number of steps so far that found no group to train on, and so made no update."""
    progress: Progress | None = None
    """Progress of the curriculum of mixed tasks; None without one."""
    recent: dict[str, list[float]] = field(default_factory=dict)
    """Gradient norms and losses of the last updates, by metric, which tell a spike."""

    @staticmethod
    def at_start(recipe: Recipe) -> Carried:
        task = recipe.task
        curriculum = isinstance(task, MixedTask) and task.curriculum is not None
        return Carried(recipe.algorithm.kl.coef, progress=Progress() if curriculum else None)

    def adapt_kl(self, recipe: Recipe, kl: float, samples: int) -> None:
        """Move the coefficient after a step whose mean k1 per token was `kl`; without a target it stays."""
        settings = recipe.algorithm.kl
        if settings.target is not None:
            self.kl_coef = adapted_coef(
                self.kl_coef, kl=kl, target=settings.target, samples=samples, horizon=settings.horizon
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.kl_coef, self.empty_steps = saved["kl_coef"], saved["empty_steps"]
        found = saved.get("progress")  # checkpoints from before mixed tasks have none
        self.progress = None if found is None else Progress(**found)
        self.recent = dict(saved.get("recent", {}))  # older checkpoints have none


class Meanwhile:
    """Work that can wait: the driver of workers does it while they update. Else it is done if its result is asked for."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []

    def later(self, work: Callable[[], Found]) -> Callable[[], Found]:
        """Take some work; returns a function that returns its result. It is done once."""
        done = cache(work)
        self._waiting.append(done)
        return done

    def do(self) -> None:
        """Do what waits."""
        while self._waiting:
            self._waiting.pop(0)()

    def drop(self) -> None:
        """Forget what still waits, as all does in a run of one process."""
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class Parts:
    """A run's parts, in the order in which data flows through them."""

    policy: PolicyFacts
    task: BuiltTask
    engine: RolloutEngine
    objective: Objective
    learner: RunLearner
    critic: RunCritic | None
    sync: RunSync
    carried: Carried
    memory: MemoryPlan | None
    """The memory plan; None for a model of unknown sizes."""
    noise: Targets | None = None
    """The norms that get the recipe's noise; None without noise."""
    rank_seconds: Callable[[], Metrics] = dict
    """Returns the seconds of each worker by phase since the last call; none in a run of one process."""
    peak: Callable[[], GpuPeak | None] = gpu_peak
    """Returns the largest use of a GPU so far, of all workers that train; None on a CPU."""
    meanwhile: Meanwhile = field(default_factory=Meanwhile)
    """Work of this process for the time of an update."""
    begin: Callable[[Sequence[Request]], None] | None = None
    """Has workers sample requests of the next step once they hold its weights; None if something may come in between."""
    beside: bool = False
    """True if workers grade the replies that they sample for training; see rollout.beside."""
