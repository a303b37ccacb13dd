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
    """A model that can be sampled: what training, evaluation and sampling have in common."""

    resolved: ResolvedModel
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    numerics: Literal["fp32", "bf16"]
    parent: Parent | None = None
    """What it started from, if that is not the model itself."""

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
    """None for a model whose sizes cannot be told."""
    noise: Targets | None = None
    """The norms that the recipe's noise is put on; None without noise."""
