"""A task of sums, and an engine that answers from a table: small, deterministic, and true to the protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lockstep.chat import ChatFormat
from lockstep.errors import StaleWeightsError
from lockstep.tasks.base import BuiltTask
from lockstep.types import (
    Completion,
    FinishReason,
    Forward,
    ForwardReport,
    Grade,
    Message,
    Prompt,
    Request,
    TokenIds,
    WeightStream,
)


class Sums(BuiltTask):
    """Held-out sums of one-digit numbers; the answer is the whole reply. "?" cannot be scored."""

    name = "sums"

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        raise AssertionError("an evaluation must not touch training prompts")

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        pairs = [(a, b) for a in range(10) for b in range(10)][:size]
        return [
            Prompt(f"{role}/{i}", (Message(role="user", content=f"{a} + {b} ="),), str(a + b), self.name)
            for i, (a, b) in enumerate(pairs)
        ]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        if reply == "?":
            return Grade(None, error="the reply is a question mark")
        right = reply == prompt.answer
        return Grade(float(right), {"correct": float(right)}, reply, "whole")


Answer = Callable[[Request], str]


class TableEngine:
    """Answers `answers(request)`, last request first: an engine may finish in any order."""

    def __init__(self, chat: ChatFormat, answers: Answer, version: int = 3) -> None:
        self.chat, self.answers, self.version = chat, answers, version
        self.waiting: list[Request] = []
        self.asked: list[Request] = []
        self.forward = Forward()

    def set_forward(self, forward: Forward) -> ForwardReport:
        self.forward = forward
        return ForwardReport()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.version != self.version:
                raise StaleWeightsError("wrong version")
        self.waiting += requests
        self.asked += requests

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        while self.waiting:
            request = self.waiting.pop()
            ids = self.chat.tokenizer(self.answers(request), add_special_tokens=False)["input_ids"]
            ended = len(ids) < request.sampling.max_tokens
            ids = (*ids, self.chat.stop_ids[0]) if ended else tuple(ids[: request.sampling.max_tokens])
            finish = FinishReason.STOP if ended else FinishReason.LENGTH
            yield Completion(request, ids, (0.0,) * len(ids), finish, self.version)

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        return [(0.0,) * (len(s) - 1) for s in sequences]

    def load(self, weights: WeightStream, version: int) -> None:
        self.version = version

    def weights(self) -> WeightStream:
        return iter(())

    def close(self) -> None:
        return None
