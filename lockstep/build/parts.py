"""Records that hold the objects of a run: policy, task, engine, learner, sync. build.py makes them, and the loops use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from lockstep.algorithms.build import Objective
from lockstep.build.step_state import Carried
from lockstep.build.warm_start import Parent
from lockstep.chat.chat import ChatFormat
from lockstep.device import GpuPeak, gpu_peak
from lockstep.learner.protocol import RunCritic, RunLearner
from lockstep.models import ResolvedModel
from lockstep.noise.targets import Targets
from lockstep.plan.choice import MemoryPlan
from lockstep.sync.transports import RunSync
from lockstep.tasks.base import BuiltTask
from lockstep.types import Metrics, RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
