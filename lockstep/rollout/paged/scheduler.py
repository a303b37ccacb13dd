"""Host-side bookkeeping of the paged engine: prompts, running sequences, and where a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import EngineError
from lockstep.memory import main_memory
from lockstep.rollout.paged.state import PAGE, Rows
from lockstep.rollout.requests import stopped_at
from lockstep.types import FinishReason, Request, TokenIds


@dataclass(slots=True)
class Prompt:
    """A prompt in the cache. Its full pages are shared; a half-filled last page is copied for every sample."""

    ids: TokenIds
    pages: list[int]
    logits_V: Tensor | None = None
    """Logits of the token after it."""
    users: int = 0
    """Number of running sequences that read its pages."""
    begun: int = 0
    """Number of leading tokens that are taken over from an earlier turn."""
    source: int | None = None
    """Page of which the last of these are to be copied."""


@dataclass(slots=True)
class Running:
    """One request being decoded."""

    request: Request
    prompt: Prompt
    own: list[int]
    """Pages of this sequence alone."""
    drawn: int = 0
    """Number of tokens sampled, as far as the host knows."""
    done: bool = False
    """True once the host knows that the device has ended it."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Tokens that the host has read, and their log-probabilities."""
    searched: int = 0
    """Number of tokens already searched for stop strings."""

    @property
    def pages(self) -> list[int]:
        return self.prompt.pages[: len(self.prompt.ids) // PAGE] + self.own


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def pages_for(request: Request) -> int:
    """Return the pages that a request can fill when it runs alone."""
    return pages_of(len(request.prompt_ids)) + pages_of(request.sampling.max_tokens) + 1


@dataclass(frozen=True, slots=True)
class Room:
    """Resources of a queue that is decoded together."""

    longest: int
    """Number of pages of its longest sequence."""
    tokens: int
    """Most tokens that one of its requests may sample."""
    pages: int
    """Number of pages of all that run together, shared prompts counted once."""


def room_of(queue: Collection[Request], slots: int) -> Room:
    """Return the resources for as many requests as there are slots, the largest ones."""
    count = min(slots, len(queue))
    longest = max(max(r.room, len(r.prompt_ids) + r.sampling.max_tokens) for r in queue)
    own = sorted((pages_of(max(r.room, r.sampling.max_tokens)) + 1 for r in queue), reverse=True)[:count]
    shared = {r.group: pages_of(len(r.prompt_ids)) for r in queue}
    wanted = sum(own) + sum(sorted(shared.values(), reverse=True)[:count])
    return Room(pages_of(longest), max(r.sampling.max_tokens for r in queue), wanted)


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free for keys and values."""
    if device.type != "cuda":
        return int(main_memory().free) // 2
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


def begin_rows(rows: Rows, started: Sequence[Running]) -> None:
    """Write the pages, seeds and settings of new sequences to their rows."""
    device = rows.table_BS.device
    table_BS = np.zeros((len(started), rows.table_BS.shape[1]), np.int32)
    for own_S, sequence in zip(table_BS, started, strict=True):
        pages = sequence.pages
        own_S[: len(pages)] = pages
    seeds = torch.tensor([s.request.seed for s in started], dtype=torch.uint64).view(torch.int64)
    sampling = [s.request.sampling for s in started]
    rows.table_BS[:] = torch.from_numpy(table_BS).to(device)
    rows.seed_B[:] = seeds.to(device)
    # The first token is drawn without a decode step, so the position is that of the last prompt token.
    for tensor, values in (
        (rows.position_B, [len(s.prompt.ids) - 1 for s in started]),
        (rows.drawn_B, [0] * len(started)),
        (rows.budget_B, [s.max_tokens for s in sampling]),
        (rows.temperature_B, [s.temperature for s in sampling]),
        (rows.ignore_B, [int(s.ignore_eos) for s in sampling]),
        (rows.done_B, [0] * len(started)),
    ):
        tensor[:] = torch.tensor(values, dtype=tensor.dtype).to(device)


def check_room(requests: Iterable[Request], pages: int) -> None:
    """Raise EngineError for a request that a cache of `pages` pages cannot hold."""
    for request in requests:
        if (needed := pages_for(request)) > pages:
            raise EngineError(
                f"{len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} new tokens need {needed} pages "
                f"of {PAGE} tokens, but free memory holds only {pages}",
                where=f"request {request.id}",
                fix="lower rollout.max_tokens, or free memory on the device",
            )


def ended_at(
    sequence: Running, decode: Callable[[Sequence[int]], str], stop_ids: frozenset[int]
) -> tuple[int, FinishReason] | None:
    """Return a sequence's number of valid tokens and why it ended; None if it continues. Marks the searched tokens."""
    ids, stops = sequence.ids, sequence.request.sampling.stop
    if stops and not sequence.request.sampling.ignore_eos:
        if (end := stopped_at(ids, sequence.searched, stops, decode)) is not None:
            return end, FinishReason.STOP
        sequence.searched = len(ids)
    if not sequence.done:
        return None
    ended = ids[-1] in stop_ids and not sequence.request.sampling.ignore_eos
    return len(ids), FinishReason.STOP if ended else FinishReason.LENGTH
