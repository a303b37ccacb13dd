"""Records and interfaces that all parts of Lockstep share; import them from here. Importing this does not import torch.

Data flows through `rollout`, `serving`, `training`, `weights` (settings of the engine, and the proof of sync) and `evaluation`;
`protocols` holds the interfaces that pass it on.

Shape suffixes used here and everywhere: T tokens (packed end to end), N sequences, P prompts, G samples of one prompt, V
vocabulary, H hidden.
"""

from __future__ import annotations

from lockstep.types.basic import Message, Metrics, TokenIds, WeightStream, all_trained, count_trained, repeated, spans
from lockstep.types.evaluation import Conditions, Estimate, ItemResult, Score
from lockstep.types.protocols import (
    Critic,
    Env,
    EnvTask,
    Learner,
    NativeRollouts,
    RolloutEngine,
    Task,
    Tracker,
    WeightSync,
)
from lockstep.types.rollout import (
    Branch,
    Completion,
    FinishReason,
    Grade,
    Group,
    Prompt,
    ReplyText,
    Request,
    Rollout,
    Sampling,
    Turn,
)
from lockstep.types.serving import ClientRequest, EndpointAccess, OpenEndpoint, Sampled, Sampler
from lockstep.types.training import Batch, Loss, LossInput, LossOutput, Scored, TrainSequence
from lockstep.types.weights import Forward, ForwardReport, LearnerFacts, NormNoise, Probe, Proof

__all__ = [
    "Batch",
    "Branch",
    "ClientRequest",
    "Completion",
    "Conditions",
    "Critic",
    "EndpointAccess",
    "Env",
    "EnvTask",
    "Estimate",
    "FinishReason",
    "Forward",
    "ForwardReport",
    "Grade",
    "Group",
    "ItemResult",
    "Learner",
    "LearnerFacts",
    "Loss",
    "LossInput",
    "LossOutput",
    "Message",
    "Metrics",
    "NativeRollouts",
    "NormNoise",
    "OpenEndpoint",
    "Probe",
    "Prompt",
    "Proof",
    "ReplyText",
    "Request",
    "Rollout",
    "RolloutEngine",
    "Sampled",
    "Sampler",
    "Sampling",
    "Score",
    "Scored",
    "Task",
    "TokenIds",
    "Tracker",
    "TrainSequence",
    "Turn",
    "WeightStream",
    "WeightSync",
    "all_trained",
    "count_trained",
    "repeated",
    "spans",
]
