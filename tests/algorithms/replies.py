"""Replies as credit assignment reads them."""

from __future__ import annotations

from lockstep.types import TrainSequence


def episode(
    group: int,
    reward: float | None,
    trained: tuple[bool, ...],
    penalties: tuple[float, ...] = (),
    values: tuple[float, ...] = (),
    turn_rewards: tuple[tuple[int, float], ...] = (),
) -> TrainSequence:
    """A graded reply; its tokens and log-probabilities do not matter."""
    zeros = (0.0,) * len(trained)
    return TrainSequence(
        prompt_ids=(1,),
        ids=(2,) * len(trained),
        trained=trained,
        rollout_logprobs=zeros,
        advantages=zeros,
        weight=0.0,
        group=group,
        values=values or None,
        reward=reward,
        turn_rewards=turn_rewards,
        penalties=penalties,
    )
