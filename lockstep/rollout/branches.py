"""Builds the training rows of an episode from its requests to the engine and from the tokens that the engine sampled.

A request whose prompt begins with all tokens of a row continues that row; the other tokens of its prompt are observations. Any
other request begins a new row: its history was rewritten, or forks from the middle of a row. So every sampled token is trained
exactly once, in the row in which it was sampled. Where the prompt of another row repeats the token, it is only context: after
the same tokens it has the same log-probability, and training it there would count its gradient twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import DEFECT, EngineError
from lockstep.types import Branch, Completion, TokenIds


@dataclass(slots=True)
class _Row:
    """A row under way: all its ids, prompt included, and the spans of them that were sampled."""

    ids: TokenIds
    prompt: int
    """Length of the prompt."""
    replies: list[tuple[int, Completion]] = field(default_factory=list)
    """Start of each reply in `ids`."""


def branches_of(completions: Sequence[Completion]) -> tuple[Branch, ...]:
    """Return the rows of an episode from its completions, in the order of their requests.

    A request that could continue several rows continues the longest. Raises EngineError if a token were lost or doubled.
    """
    rows: list[_Row] = []
    for done in completions:
        asked = done.request.prompt_ids
        continued = [row for row in rows if asked[: len(row.ids)] == row.ids]
        row = max(continued, key=lambda one: len(one.ids), default=None)
        if row is None:
            row = _Row(asked, len(asked))
            rows.append(row)
        row.replies.append((len(asked), done))
        row.ids = (*asked, *done.ids)
    found = tuple(_branch(row) for row in rows)
    sampled, trained = sum(len(one.ids) for one in completions), sum(sum(row.trained) for row in found)
    if sampled != trained:
        raise EngineError(f"{trained} tokens of an episode would be trained, but {sampled} were sampled", fix=DEFECT)
    return found


def _branch(row: _Row) -> Branch:
    count = len(row.ids) - row.prompt
    logprobs, trained, routes = [0.0] * count, [False] * count, b""
    for start, done in row.replies:
        span = slice(start - row.prompt, start - row.prompt + len(done.ids))
        logprobs[span], trained[span] = done.logprobs, [True] * len(done.ids)
        routes += done.routes[len(routes) :]
    return Branch(row.ids[: row.prompt], row.ids[row.prompt :], tuple(logprobs), tuple(trained), routes=routes)
