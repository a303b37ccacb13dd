"""Streams of replies under way: what is new of them, and what of it was sent already."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from lockstep.errors import EngineError
from lockstep.types import Completion, Sampled


class News:
    """News of the choices of one request: from the threads of a sampler to the thread that answers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampled: dict[int, Sampled] = {}
        self._done: dict[int, Future[Completion]] = {}

    def sampled(self, index: int, sampled: Sampled) -> None:
        """Take the beginning of a reply; only the newest is of interest."""
        with self._changed:
            self._sampled[index] = sampled
            self._changed.notify()

    def done(self, index: int, future: Future[Completion]) -> None:
        """Take a reply."""
        with self._changed:
            self._done[index] = future
            self._changed.notify()

    def take(self, seconds: float) -> list[tuple[int, Sampled | Future[Completion]]]:
        """Return what is new by choice, in their order; waits at most `seconds` for anything."""
        with self._changed:
            self._changed.wait_for(lambda: self._sampled or self._done, seconds)
            found = sorted((self._sampled | self._done).items())
            self._sampled, self._done = {}, {}
            return found


@dataclass(slots=True)
class Sent:
    """Parts of a choice that were sent."""

    text: str = ""
    thoughts: str = ""
    tokens: int = 0
    """Tokens whose log-probabilities and ids were sent."""

    def more(self, text: str, thoughts: str) -> tuple[str, str]:
        """Return what is new in the beginnings of answer and thoughts, and count it as sent. What is shorter has nothing new."""
        new = text[len(self.text) :], thoughts[len(self.thoughts) :]
        self.text, self.thoughts = self.text + new[0], self.thoughts + new[1]
        return new

    def rest(self, text: str, thoughts: str) -> tuple[str, str]:
        """Return what is new in the whole answer and thoughts. Raises EngineError if they begin otherwise than what was sent."""
        if not (text.startswith(self.text) and thoughts.startswith(self.thoughts)):
            what = "the end of the reply changes how its beginning is read, and that was sent already"
            raise EngineError(what, fix="ask for it without stream")
        return self.more(text, thoughts)
