"""Records and interfaces between an HTTP server and an engine: requests for replies, as token ids, and their results."""

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
    """All tokens so far of an unfinished reply, with their log-probabilities."""

    ids: TokenIds
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request for one reply. Example: ClientRequest("chat-9", "chain_sum/17#0", (1, 84, 2), Sampling(64))"""

    id: str
    """Name of this reply, unique among unfinished ones."""
    key: str
    """Client or episode that it belongs to; in training the key of the rollout."""
    prompt_ids: TokenIds
    sampling: Sampling
    seed: int | None = None
    """Seed of the sample. None: seed_for(*the sampler's seed, key, number of earlier requests of this key without a seed)."""
    seen: Callable[[Sampled], None] | None = None
    """Called every few tokens with the tokens so far, if the engine is a NativeRollouts. It must return at once."""


class Sampler(Protocol):
    """Answers requests of many threads at once. `lockstep.serve.thread.EngineThread` is one, around a RolloutEngine."""

    def sample(self, ask: ClientRequest) -> Future[Completion]:
        """Queue a request and return at once. The completion's `request` has the same id and prompt ids, and the seed.

        The future raises EngineError if the engine failed or cannot serve the request, and is cancelled by `cancel`. Raises
        BusyError at once if the queue is full, EngineError if the sampler is closed.
        """
        ...

    def cancel(self, id: str) -> None:
        """Cancel the future of a request, and free its memory within a few tokens. Unknown and answered ids are ignored."""
        ...


class EndpointAccess(Protocol):
    """An HTTP endpoint, as seen by the code that gives clients access to it."""

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


OpenEndpoint: TypeAlias = Callable[[Sampler], AbstractContextManager[EndpointAccess]]
"""Opens an endpoint for a sampler, until its context is left."""
