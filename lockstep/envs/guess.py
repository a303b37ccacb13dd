"""A built-in environment: the policy guesses a hidden number from hints."""

from __future__ import annotations

import re

from lockstep.types import Message, Turn

_NUMBER = re.compile(r"-?\d{1,12}(?!\d)")


class GuessNumber:
    """Guessing game. The first number of a reply is the guess. Finding the number scores 1; else `progress` times the share
    that the hints ruled out.
    """

    def __init__(self, hidden: int, low: int, high: int, progress: float = 0.0) -> None:
        self._hidden, self._progress = hidden, progress
        self._range = self._low, self._high = low, high
        self._paid = 0.0

    def start(self, seed: int) -> Turn:
        return Turn(opening(*self._range))

    def step(self, reply: str) -> Turn:
        found = _NUMBER.search(reply)
        if found is None:
            return _say("Answer with a number.", {"tool_errors": 1.0})
        guess = int(found.group())
        if guess == self._hidden:
            return Turn(
                reward=1.0 - self._paid, done=True, metrics={"correct": 1.0, "guesses": 1.0}, extracted=str(guess)
            )
        if guess < self._hidden:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return _say("higher" if guess < self._hidden else "lower", {"guesses": 1.0}, self._newly_earned(), str(guess))

    def _newly_earned(self) -> float:
        low, high = self._range
        earned = self._progress * (1 - (self._high - self._low) / (high - low))
        new, self._paid = earned - self._paid, earned
        return new


def opening(low: int, high: int) -> tuple[Message, ...]:
    """Return the question, the same for every hidden number."""
    text = f"I think of a whole number from {low} to {high}. Guess it: I answer higher or lower. Your guess?"
    return (Message(role="user", content=text),)


def _say(text: str, metrics: dict[str, float], reward: float = 0.0, extracted: str | None = None) -> Turn:
    return Turn((Message(role="user", content=text),), reward, metrics=metrics, extracted=extracted)
