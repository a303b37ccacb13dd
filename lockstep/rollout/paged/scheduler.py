"""Host-side bookkeeping of the paged engine: prompts, running sequences, and where a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.errors import EngineError, StaleWeightsError
from lockstep.rollout.paged.state import PAGE
from lockstep.types import FinishReason, Request, TokenIds


@dataclass(slots=True)
class Prompt:
    """A prompt in the cache. Its full pages are shared; of a half-filled last one every sample has a copy."""

    ids: TokenIds
    pages: list[int]
    logits_V: Tensor | None = None
    """Logits of what follows it."""
    users: int = 0
    """Running sequences that read its pages."""


@dataclass(slots=True)
class Running:
    """One request being decoded."""

    request: Request
    prompt: Prompt
    own: list[int]
    """Pages that are its alone."""
    drawn: int = 0
    """Tokens sampled when the host last looked."""
    read: int = 0
    """Tokens already searched for stop strings."""

    @property
    def pages(self) -> list[int]:
        return self.prompt.pages[: len(self.prompt.ids) // PAGE] + self.own


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def check_request(request: Request, version: int, context: int) -> None:
    """Raise StaleWeightsError for another version, EngineError for a request that no engine could serve."""
    if request.version != version:
        raise StaleWeightsError(
            f"asked for weights {request.version}, the engine holds {version}",
            where=request.id,
            fix="push the learner's weights with WeightSync before sampling",
        )
    longest = len(request.prompt_ids) + request.sampling.max_tokens
    if not request.prompt_ids or request.sampling.max_tokens < 1:
        raise EngineError("a request needs a prompt and a token budget of at least 1", where=request.id)
    if not 0 <= request.prefix < len(request.prompt_ids):
        raise EngineError(
            f"a shared prefix of {request.prefix} tokens leaves nothing of {len(request.prompt_ids)}", where=request.id
        )
    if context and longest > context:
        raise EngineError(
            f"{len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} new ones exceed the model's "
            f"context of {context}",
            where=request.id,
            fix="shorten the prompt or lower rollout.max_tokens",
        )


def ended_at(
    sequence: Running,
    ids: Sequence[int],
    done: bool,
    decode: Callable[[Sequence[int]], str],
    stop_ids: frozenset[int],
) -> tuple[int, FinishReason] | None:
    """How many tokens of a sequence count and why it ended there; None if it goes on. Marks what was read."""
    stops = sequence.request.sampling.stop
    if stops and not sequence.request.sampling.ignore_eos:
        # A character may take four tokens, one for each of its bytes.
        window = max(64, 4 * max(map(len, stops)) + 8)
        for end in range(sequence.read + 1, sequence.drawn + 1):
            text = decode(ids[max(0, end - window) : end])
            if any(stop in text for stop in stops):
                return end, FinishReason.STOP
        sequence.read = sequence.drawn
    if not done:
        return None
    ended = ids[sequence.drawn - 1] in stop_ids and not sequence.request.sampling.ignore_eos
    return sequence.drawn, FinishReason.STOP if ended else FinishReason.LENGTH
