"""That what is trained is what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.errors import EngineError
from lockstep.types import Completion, TokenIds

if TYPE_CHECKING:
    from lockstep.envs.driver import Played


def check_append(completion: Completion, prompt_ids: TokenIds, ids: Sequence[int]) -> None:
    """Raise EngineError unless a reply was sampled behind exactly the ids that are there."""
    if completion.request.prompt_ids != (*prompt_ids, *ids) or not completion.ids:
        raise EngineError(
            "a reply was sampled after other ids than those of its episode, or has none",
            where=completion.request.id,
            fix="report this engine",
        )


def check_tokens(played: Played) -> None:
    """Raise EngineError unless what is trained is what was sampled: every id, its log-probability, and nothing else."""
    sampled = 0
    for reply in played.replies:
        span, done = slice(reply.start, reply.end), reply.completion
        same = played.ids[span] == done.ids and played.logprobs[span] == done.logprobs and all(played.trained[span])
        if not same or done.request.prompt_ids != played.prompt_ids + played.ids[: reply.start]:
            raise EngineError("its ids are not those that were sampled", where=done.request.id, fix="report this")
        sampled += len(done.ids)
    if sampled != sum(played.trained) or len(played.ids) != len(played.trained):
        raise EngineError(
            f"{sum(played.trained)} of its tokens are trained, {sampled} were sampled",
            where=played.ask.key,
            fix="report this",
        )
