"""PPO's critic: predicts a value before each response token, with its own copy of the weights or from the policy's hidden states.

Legend: R tokens with loss of a micro-batch, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from lockstep.config.schema import Recipe
from lockstep.errors import CheckpointError, LearnerError
from lockstep.learner.execution import Execution, execution_of
from lockstep.learner.learner import base_model, hidden_states
from lockstep.learner.oom import run_or_halve, score_or_halve
from lockstep.learner.packing import Packed, microbatches, number_tokens, pack
from lockstep.learner.ranks import Ranks, deal
from lockstep.learner.recompute import set_recompute
from lockstep.learner.value_head import CriticShare, ValueHead, ValueTraining, critic_metrics
from lockstep.models.fused_layers import fuse_layers
from lockstep.models.merged_weights import merged_of
from lockstep.models.routing import Routing, follow_routes
from lockstep.models.weights import clean_name
from lockstep.types import Batch, Metrics, TrainSequence

_WEIGHT = "weight."
"""Prefix of a weight's name among `tensors`; the optimizer's names begin with master., exp_avg., exp_avg_sq. and step."""


def build_critic(
    policy_model: nn.Module, recipe: Recipe, plan: Execution | None = None, ranks: Ranks | None = None
) -> TorchCritic:
    """Return the critic of recipe.algorithm.critic, at its start: every value is 0. `plan` and `ranks` are the learner's.

    Build it from the policy's model as loaded, before anything else changes that. Raises LearnerError if the recipe has none.
    """
    settings = recipe.algorithm.critic
    if settings is None:
        raise LearnerError(
            "the recipe has no critic", where="algorithm.critic", fix="set algorithm.critic, or do not build a critic"
        )
    base = base_model(policy_model)
    decoder = base.get_decoder()
    like = next(decoder.parameters())
    execution = execution_of(recipe.update, like.device, plan)
    head = ValueHead(base.config.get_text_config().hidden_size, like)
    trained = {f"value_head.{name}": parameter for name, parameter in head.named_parameters()}
    match settings.backbone:
        case "own":
            decoder = trained_copy(decoder)
            if like.is_cuda:
                fuse_layers(decoder)
            set_recompute(decoder, execution.recompute)
            trained |= {clean_name(name): p for name, p in decoder.named_parameters() if p.requires_grad}
            training = ValueTraining(head, trained, settings, recipe, coef=1.0, ranks=ranks)
        case "shared":
            training = ValueTraining(head, trained, settings, recipe, coef=settings.coef, ranks=ranks)
        case _:
            assert_never(settings.backbone)
    joint = settings.backbone == "shared"
    routed = base if joint and recipe.update.replay_routing else None
    share = recipe.update.share_prompts
    return TorchCritic(decoder, training, execution, joint=joint, share_prompts=share, ranks=ranks, routed=routed)


def trained_copy(module: Any) -> Any:
    """Return a copy whose trained parameters are new and whose frozen ones are the original's, in the same memory."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


class TorchCritic:
    """Implements types.Critic over a transformers decoder with a value head.

    A critic with its own backbone trains that and the head. With a shared backbone the learner's update trains both losses
    together: give `joint` to TorchLearner; `update` here then trains only the head, on unchanged states (warm-up).
    """

    def __init__(
        self,
        decoder: nn.Module,
        training: ValueTraining,
        execution: Execution,
        *,
        joint: bool,
        share_prompts: bool,
        ranks: Ranks | None = None,
        routed: nn.Module | None = None,
    ) -> None:
        self._merged = merged_of(decoder)
        self.decoder, self._training = decoder, training
        """The decoder. Frozen parameters are the policy's own, in the same memory; with a shared backbone all of them are."""
        self.trainable = training.trained
        """Parameters that an update of the critic alone changes, by name: value_head.weight, value_head.bias, an own
        backbone's.
        """
        self._share, self._budget = share_prompts, execution.tokens_per_microbatch
        self._routed = routed
        """The policy, if its routers are to choose what sampling chose, as they do in the learner's update."""
        self._rank, self._ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._device = next(decoder.parameters()).device
        self.joint = training if joint else None
        """The part that the learner trains together with the policy; None with an own backbone."""

    def values(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> list[tuple[float, ...]]:
        """Return the value before each response token, 0 where not trained: the value of the state that predicts the token.

        One of several ranks returns () for the sequences of the others.
        """

        def repack(chosen: Sequence[int]) -> Packed:
            return self._pack(sequences, chosen, prefix)

        def value(packed: Packed) -> Tensor:
            return score_or_halve(packed, lambda part: self._training.head(self._states(part)), repack)

        with torch.no_grad():
            streams = (
                self._pack(sequences, own, prefix) for own in self._chunks(sequences, prefix)[self._rank :: self._ranks]
            )
            return number_tokens(sequences, streams, value)

    def update(self, batch: Batch) -> Metrics:
        """Make one optimizer step towards the returns, in as many micro-batches as the token budget needs.

        A non-finite gradient changes nothing. Raises LearnerError after too many of those in a row, or without returns.
        """
        share = self.update_share(batch)
        return critic_metrics([share]) | {"critic/oom_splits": float(share.splits)}

    def update_share(self, batch: Batch) -> CriticShare:
        """Make this rank's share of an update; of a single rank that is all of it."""
        optimizer, splits = self._training.optimizer, 0
        self._training.forget()

        def run(packed: Packed) -> None:
            with torch.set_grad_enabled(self.joint is None):
                hidden_RH = self._states(packed)
            if hidden_RH.shape[0]:
                part = self._training.loss(hidden_RH, [batch.sequences[i] for i in packed.order])
                if part.loss.requires_grad:
                    optimizer.before_backward()
                    part.loss.backward()
                self._training.record(part)

        def repack(chosen: Sequence[int]) -> Packed:
            return self._pack(batch.sequences, chosen, batch.prefix)

        for number, chunks in enumerate(deal(self._chunks(batch.sequences, batch.prefix), self._ranks)):
            if self._rank < len(chunks):
                optimizer.collected.clear()
                self._training.begin(number * self._ranks + self._rank)
                packed = repack(chunks[self._rank])
                splits += run_or_halve(packed, run, repack, lambda: list(optimizer.collected))
            optimizer.exchange(len(chunks))
        share = self._training.step()
        for merged in self._merged:
            merged.forget()
        return replace(share, splits=splits)

    # --- state ----------------------------------------------------------------------------------------------------
    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, the live ones."""
        return {name: parameter.detach() for name, parameter in self.trainable.items()}

    def counters(self) -> dict[str, int]:
        return self._training.counters()

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a resume needs besides the counters: weights as `weight.NAME`, and the optimizer's state."""
        weights = {f"{_WEIGHT}{name}": tensor for name, tensor in self.weights().items()}
        return weights | self._training.optimizer.tensors()

    @torch.no_grad()
    def restore(self, counters: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Continue where `counters` and `tensors` were saved, to the bit. Raises CheckpointError for those of another critic."""
        saved = {n.removeprefix(_WEIGHT): t for n, t in tensors.items() if n.startswith(_WEIGHT)}
        own = self.weights()
        wrong = {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape}
        if problems := sorted((own.keys() ^ saved.keys()) | wrong):
            raise CheckpointError(
                f"{len(problems)} tensors of the critic are missing, unknown or of another shape",
                where=problems[0],
                fix="resume with the recipe that the run was started with",
            )
        self._training.restore(counters, {n: t for n, t in tensors.items() if not n.startswith(_WEIGHT)})
        for name, tensor in saved.items():
            own[name].copy_(tensor)

    def _pack(self, sequences: Sequence[TrainSequence], chosen: Sequence[int], prefix: int) -> Packed:
        row = None if self._routed is None else Routing.of(self._routed).row
        return pack(sequences, chosen, share_prompts=self._share, device=self._device, prefix=prefix, row=row)

    def _states(self, packed: Packed) -> Tensor:
        if self._routed is not None:
            follow_routes(self._routed, packed.routes_TX)
        return hidden_states(self.decoder, packed)

    def _chunks(self, sequences: Sequence[TrainSequence], prefix: int) -> list[list[int]]:
        """Return the micro-batches of all ranks."""
        return microbatches(sequences, self._budget, share_prompts=self._share, prefix=prefix)
