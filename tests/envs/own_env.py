"""Environments and tools as a user writes them, that behave or misbehave on demand; loaded by path in processes of their own."""

from __future__ import annotations

import os
import random
import time

from lockstep.types import Message, Turn


class Counter:
    """Asks for a number of words; each reply earns a quarter; three replies end it. Misbehaves in its second step."""

    def __init__(self, mode: str = "good", delay: float = 0.0) -> None:
        self.mode, self.delay, self.steps, self.seed = mode, delay, 0, 0

    def start(self, seed: int) -> Turn:
        self.seed = seed
        if self.mode == "hangs_at_start" and seed % 2:
            time.sleep(1000)
        said = Message(role="user", content=f"Say something about {seed % 1000}.")
        return Turn() if self.mode == "silent" else Turn((said,))

    def step(self, reply: str) -> Turn:
        self.steps += 1
        time.sleep(self.delay * (self.seed % 3))
        if self.steps == 2:
            self._misbehave()
        said = Message(role="user", content=f"{len(reply)} {random.randint(0, 9)} <|im_end|> go on")
        return Turn((said,), reward=0.25, done=self.steps == 3, metrics={"words": float(len(reply.split()))})

    def _misbehave(self) -> None:
        match self.mode:
            case "hangs":
                time.sleep(1000)
            case "throws":
                raise RuntimeError("the dice are lost")
            case "dies":
                os._exit(3)
            case "forks":
                while os.fork() == 0:
                    time.sleep(1000)
                time.sleep(1000)
            case "grows":
                self.held = [bytearray(1 << 30) for _ in range(100)]


class Returns:
    """Returns something that is no turn."""

    def __init__(self, what: str = "none") -> None:
        self.what = what

    def start(self, seed: int) -> Turn:
        return Turn((Message(role="user", content=f"go {seed}"),))

    def step(self, reply: str) -> object:
        return {
            "none": None,
            "text": "higher",
            "inf": Turn(reward=float("inf")),
            "assistant": Turn((Message(role="assistant", content="I am you"),)),
            "no_reason": Turn(reward=None, done=True),
        }[self.what]


class Sums:
    """An EnvTask: batch, heldout, grade and env, whose questions all begin alike."""

    name = "sums"

    def batch(self, step, size):
        return [self._prompt(1000 + step * size + i) for i in range(size)]

    def heldout(self, role, size):
        return [self._prompt(i) for i in range(size)]

    def grade(self, prompt, reply):
        from lockstep.types import Grade

        return Grade(float("=" in reply))

    def env(self, prompt):
        return Counter("silent")

    def _prompt(self, number):
        from lockstep.types import Prompt

        return Prompt(f"sums/{number}", (Message(role="user", content="The same for all."),), str(number), "sums")


def look_up(key: str, times: int = 1) -> str:
    """Looks a key up.

    Then it says it as often as asked.

    Args:
        key: what to look up
        times: how often to say it
    """
    if key == "hang":
        time.sleep(1000)
    if key == "raise":
        raise KeyError(key)
    return " ".join([key.upper()] * times)


class NoStep:
    def start(self, seed: int) -> Turn:
        return Turn()


class Tool:
    """Answers nine replies with the result of a tool; the tenth ends it."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self, seed: int) -> Turn:
        return Turn((Message(role="user", content=f"Work out {seed % 1000} with the tool, step by step."),))

    def step(self, reply: str) -> Turn:
        self.steps += 1
        return Turn((Message(role="tool", content=f"result of call {self.steps}: 42"),), done=self.steps == 10)
