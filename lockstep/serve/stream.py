"""Streams replies to clients: new tokens pass from the sampler's threads to the thread that answers the request."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.errors import EngineError
from lockstep.types import Completion, Sampled


class ReplyUpdates:
    """Queue of new tokens and finished replies of one request, filled by the sampler's threads, read by the answering thread.

    A request may ask for several replies (choices), numbered by `index`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampled: dict[int, Sampled] = {}
        self._done: dict[int, Future[Completion]] = {}

    def sampled(self, index: int, sampled: Sampled) -> None:
        """Store the tokens of a reply so far, in place of earlier ones."""
        with self._changed:
            self._sampled[index] = sampled
            self._changed.notify()

    def done(self, index: int, future: Future[Completion]) -> None:
        """Store a finished reply."""
        with self._changed:
            self._done[index] = future
            self._changed.notify()

    def take(self, seconds: float) -> list[tuple[int, Sampled | Future[Completion]]]:
        """Return and clear the updates, sorted by index; waits at most `seconds` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._sampled or self._done, seconds)
            found = sorted((self._sampled | self._done).items())
            self._sampled, self._done = {}, {}
            return found


@dataclass(slots=True)
class SentReply:
    """The part of a reply that was already sent to the client."""

    text: str = ""
    thoughts: str = ""
    tokens: int = 0
    """Number of tokens whose log-probabilities and ids were sent."""

    def more(self, text: str, thoughts: str) -> tuple[str, str]:
        """Return the text after the part already sent, of answer and thoughts, and count it as sent."""
        new = text[len(self.text) :], thoughts[len(self.thoughts) :]
        self.text, self.thoughts = self.text + new[0], self.thoughts + new[1]
        return new

    def rest(self, text: str, thoughts: str) -> tuple[str, str]:
        """Return the rest of the complete answer and thoughts. Raises EngineError if they do not begin with what was sent."""
        if not (text.startswith(self.text) and thoughts.startswith(self.thoughts)):
            what = "the end of the reply changes how its beginning is parsed, and the beginning was already sent"
            raise EngineError(what, fix="send the request with stream=false")
        return self.more(text, thoughts)
