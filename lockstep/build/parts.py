"""The objects of a run, as plain records; build.py makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from lockstep.algorithms.build import Objective
from lockstep.build.step_state import Carried
from lockstep.build.warm_start import Parent
from lockstep.chat.chat import ChatFormat
from lockstep.learner.critic import TorchCritic
from lockstep.learner.learner import TorchLearner, base_model
from lockstep.models import ResolvedModel
from lockstep.models.decoder import context_of
from lockstep.noise.targets import Targets
from lockstep.plan.choice import MemoryPlan
from lockstep.sync.transports import CopySync, SharedSync
from lockstep.tasks.base import BuiltTask
from lockstep.types import RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that can be sampled: the common part of training, evaluation and sampling."""

    resolved: ResolvedModel
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    numerics: Literal["fp32", "bf16"]
    parent: Parent | None = None
    """The checkpoint that it started from; None for the model itself."""

    @property
    def context(self) -> int | None:
        """Longest sequence that the model takes."""
        return context_of(base_model(self.model).config)


@dataclass(frozen=True, slots=True)
class Parts:
    """A run's parts, in the order in which data flows through them."""

    policy: Policy
    task: BuiltTask
    engine: RolloutEngine
    objective: Objective
    learner: TorchLearner
    critic: TorchCritic | None
    sync: SharedSync | CopySync
    carried: Carried
    memory: MemoryPlan | None
    """The memory plan; None for a model of unknown sizes."""
    noise: Targets | None = None
    """The norms that get the recipe's noise; None without noise."""
