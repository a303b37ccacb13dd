"""Records between an HTTP server and an engine: a prompt as token ids, and what answers it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from socket import socket
from typing import Protocol, TypeAlias

from lockstep.types.basic import TokenIds
from lockstep.types.rollout import Completion, Sampling


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a reply that is under way, from its first on, with their log-probabilities."""

    ids: TokenIds
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampleAsk:
    """One reply that a client asks for. Example: SampleAsk("chat-9", "chain_sum/17#0", (1, 84, 2), Sampling(64))"""

    id: str
    """Name of this reply, unique while it is open."""
    key: str
    """Client or episode that it belongs to; in training the key of the rollout."""
    prompt_ids: TokenIds
    sampling: Sampling
    seed: int | None = None
    """Seed of the sample. None: seed_for(*the sampler's seed, key, number of earlier asks of this key without a seed)."""
    seen: Callable[[Sampled], None] | None = None
    """Told every few tokens what is sampled so far, where the engine is a NativeRollouts. It must return at once."""


class Sampler(Protocol):
    """Answers asks of many threads at once. `lockstep.serve.thread.EngineThread` is one, around a RolloutEngine."""

    def sample(self, ask: SampleAsk) -> Future[Completion]:
        """Queue an ask and return at once. The completion's `request` has the ask's id and prompt ids, and the seed.

        The future raises EngineError if the engine failed or cannot serve the ask, and is cancelled by `cancel`. Raises
        BusyError at once if the queue is full, EngineError if the sampler is closed.
        """
        ...

    def cancel(self, id: str) -> None:
        """Free what an ask holds within a few tokens; its future is cancelled. Unknown and answered ids are passed over."""
        ...


class Door(Protocol):
    """An endpoint as the owner of its clients has it."""

    @property
    def address(self) -> str:
        """The base of all addresses. Example: http://127.0.0.1:41233"""
        ...

    def admit(self, token: str, key: str) -> None:
        """Serve requests with this token as those of `key`."""

    def withdraw(self, token: str) -> None:
        """Refuse the token from now on, and end its requests."""

    def take(self, connection: socket) -> None:
        """Serve a connection that another process or thread accepted, as one to `address`."""


OpenDoor: TypeAlias = Callable[[Sampler], AbstractContextManager[Door]]
"""Opens an endpoint for a sampler, until its context is left."""
