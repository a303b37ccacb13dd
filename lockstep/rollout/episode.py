"""Records of rollouts in progress, and checks that exactly the sampled tokens are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.schema import Turns
from lockstep.envs.runners import Fault, Runner
from lockstep.errors import DEFECT, EngineError, StaleWeightsError
from lockstep.types import Completion, Prompt, TokenIds, Turn, count_trained


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of an episode: where it starts among the tokens after the first prompt, and its reward."""

    start: int
    completion: Completion
    reward: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.completion.ids)


@dataclass(slots=True)
class Episode:
    """A rollout in progress; a question is an episode of one reply. Tuples are per token after the first prompt."""

    key: str
    prompt: Prompt
    sample: int
    """Index within the prompt's group."""
    version: int
    """Weight version that must sample it."""
    budget: int
    """Most tokens after the first prompt."""
    prompt_ids: TokenIds
    prefix: int
    limits: Turns
    runner: Runner | None
    ids: TokenIds = ()
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token; 0 for observed tokens."""
    trained: tuple[bool, ...] = ()
    """True for tokens that were sampled."""
    routes: bytes = b""
    """Experts of each token, as the first pass over it chose them."""
    replies: list[Reply] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    text: str = ""
    """The decoded reply to a question; an episode is decoded when it ends."""
    started: bool = False
    """True if its environment has given its opening."""
    unread: str | None = None
    """Reply that the environment has not received yet."""
    final: Turn | None = None
    """The environment's turn for a final answer, which is being graded."""
    fault: Fault | None = None
    """Reason why it cannot be scored, known while its reply is still being sampled."""
    cut: Literal["", "turns", "timeout", "error"] = ""


def check_reply(completion: Completion, episode: Episode) -> None:
    """Raise unless a reply was sampled by the right weights, after exactly the episode's ids."""
    if completion.version != episode.version:
        raise StaleWeightsError(
            f"the reply was sampled by version {completion.version} of the weights, but version {episode.version} was requested",
            where=f"reply {completion.request.id}",
            fix="load no weights while replies are being sampled",
        )
    if completion.request.prompt_ids != episode.prompt_ids + episode.ids or not completion.ids:
        raise EngineError(
            "the reply is empty, or was sampled after other tokens than those of its episode",
            where=f"reply {completion.request.id}",
            fix=DEFECT,
        )


def check_tokens(episode: Episode) -> None:
    """Raise EngineError unless the tokens marked as trained are exactly those that were sampled, with their log-probabilities."""
    sampled = 0
    for reply in episode.replies:
        span, done = slice(reply.start, reply.end), reply.completion
        same = episode.ids[span] == done.ids and episode.logprobs[span] == done.logprobs
        same = same and count_trained(episode.trained[span]) == len(done.ids)
        if not same or done.request.prompt_ids != episode.prompt_ids + episode.ids[: reply.start]:
            raise EngineError(
                "the tokens to be trained are not those that were sampled", where=f"reply {done.request.id}", fix=DEFECT
            )
        sampled += len(done.ids)
    trained = count_trained(episode.trained)
    if sampled != trained or len(episode.ids) != len(episode.trained):
        raise EngineError(
            f"{trained} of the episode's tokens would be trained, but {sampled} were sampled",
            where=f"episode {episode.key}",
            fix=DEFECT,
        )
