"""Host-side bookkeeping of the paged engine: prompts, running sequences, and where a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

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
