"""Records the experts to which each token of a forward pass was routed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lockstep.models.routing import Routing, follow_routes


class Routes:
    """The record of an engine's last pass, to be read token by token."""

    def __init__(self, model: nn.Module, *, record: bool) -> None:
        """Take a transformers model without PEFT around it. Raises ModelError for a record of a model without experts."""
        self._model, self._routing = model, Routing.of(model) if record else None
        self._taken, self._size, self._at = b"", 0, 0

    @contextmanager
    def of(self, tokens: int) -> Iterator[None]:
        """Record the pass inside, of a stream that begins with `tokens` tokens; those behind are padding and leave none."""
        follow_routes(self._model, None)  # what a learner of the same model replayed last
        if self._routing is None:
            yield
            return
        self._routing.begin(None, recording=True)
        try:
            yield
            row = self._routing.row
            self._taken, self._size, self._at = (
                row.pack(self._routing.taken(tokens)),
                row.numbers * row.kind().itemsize,
                0,
            )
        finally:
            self._routing.begin(None, recording=False)

    def next(self, tokens: int) -> bytes:
        """Return the record of the next tokens of the pass; empty if none is kept."""
        start, self._at = self._at, self._at + tokens * self._size
        return self._taken[start : self._at]
