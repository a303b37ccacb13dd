"""Calls of processes: a worker that was given up, and what is known of its calls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.child import Inbox
from lockstep.cluster.process_workers import LOST, ProcessWorkers
from lockstep.config.schema import Split
from lockstep.plain_values import to_plain


class Silent:
    """A process that answers nothing by itself."""

    pid = 0

    def __init__(self, threads: int) -> None:
        self.sent: list[bytes] = []

    def connect(self, inbox: Inbox) -> None:
        self.inbox: Any = inbox

    def send(self, message: bytes) -> None:
        self.sent.append(message)


def test_a_sampler_that_was_given_up_may_answer_before_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Silent] = []

    def take(threads: int) -> Silent:
        made.append(Silent(threads))
        return made[-1]

    monkeypatch.setattr("lockstep.cluster.process_workers.take", take)
    workers = ProcessWorkers(Split(timeout_s=1), tmp_path, gpu=False)
    trainer, sampler = made
    workers.start([1], "drop")
    time.sleep(0.5)
    workers.start([0], "drop")
    assert workers.results(9, {0, 1}, raises=False) == {1: LOST}
    for one in (sampler, trainer):
        one.inbox.put((one, ["ok", to_plain(type(None), None)]))
    assert workers.results(9, {0}) == {0: None}
    assert trainer.sent[1] == sampler.sent[1]
