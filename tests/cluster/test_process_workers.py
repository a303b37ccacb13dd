"""Calls of processes: their deadlines, a worker that was given up, and what is said of a failure."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster import wire
from lockstep.cluster.child import ENDED, Inbox
from lockstep.cluster.host import FAILED, OK
from lockstep.cluster.process_workers import LOST, ProcessWorkers
from lockstep.config.schema import Colocated, Split
from lockstep.errors import LearnerError, WorkerLost
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

    def answer(self, *message: Any) -> None:
        self.inbox.put((self, [*message], time.monotonic()))

    def done(self) -> None:
        self.answer(OK, to_plain(type(None), None))

    def signal(self, number: int) -> None:
        pass

    def end(self, grace: float = 0.0) -> str:
        return "exit code 1"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Silent]:
    """The processes that are started, in order; all waits of the driver's own are short."""
    found: list[Silent] = []

    def take(threads: int) -> Silent:
        found.append(Silent(threads))
        return found[-1]

    short = {"LEAST_SECONDS": 0.3, "GRACE_SECONDS": 0.2, "SETTLE_SECONDS": 0.2, "STACK_SECONDS": 0.0}
    for name, value in {"take": take, **short}.items():
        monkeypatch.setattr(f"lockstep.cluster.process_workers.{name}", value)
    return found


def test_a_sampler_that_was_given_up_may_answer_before_it_is_replaced(tmp_path: Path, made: list[Silent]) -> None:
    workers = ProcessWorkers(Split(timeout_s=1), tmp_path, gpu=False)
    trainer, sampler = made
    workers.start([1], "drop")
    time.sleep(0.5)
    workers.start([0], "drop")
    assert workers.results(9, {0, 1}, raises=False) == {1: LOST}
    for one in (sampler, trainer):
        one.done()
    assert workers.results(9, {0}) == {0: None}
    assert trainer.sent[1] == sampler.sent[1]


def test_a_worker_that_answers_soon_leaves_another_the_time_of_a_first_call(tmp_path: Path, made: list[Silent]) -> None:
    """It may have had nothing to do, while the other compiles."""
    workers = ProcessWorkers(Colocated(gpus=2, timeout_s=3), tmp_path, gpu=False)
    workers.start([0, 1], "drop")
    made[1].done()
    assert workers.results(9, {0, 1}) == {1: None}
    assert workers.results(1.0, {0}) == {}
    made[0].done()
    assert workers.results(9, {0}) == {0: None}
    workers.start([0, 1], "drop")
    begin = time.monotonic()
    made[0].done()
    assert workers.results(9, {0, 1}) == {0: None}
    with pytest.raises(WorkerLost, match="rank 1 has not answered"):
        workers.results(9, {1})
    assert time.monotonic() - begin > 3  # 5 times the first, which took a second


def test_a_worker_is_not_charged_with_what_the_driver_does_meanwhile(tmp_path: Path, made: list[Silent]) -> None:
    workers = ProcessWorkers(Colocated(gpus=2, timeout_s=9), tmp_path, gpu=False)
    for seconds in (0.0, 0.3):
        workers.start([0], "learner.begin_update")
        time.sleep(seconds)
    for _ in range(2):
        made[0].done()
        time.sleep(0.3)
    assert [workers.results(9, {0}) for _ in range(2)] == [{0: None}] * 2
    assert 0.5 < workers.phase_seconds()["time/rank0_update"] < 0.8


def test_silence_names_all_that_have_not_answered(tmp_path: Path, made: list[Silent]) -> None:
    workers = ProcessWorkers(Colocated(gpus=3, timeout_s=1), tmp_path, gpu=False)
    workers.start([0, 1, 2], "drop")
    made[1].done()
    assert workers.results(9, {0, 1, 2}) == {1: None}
    with pytest.raises(WorkerLost, match="rank 0 has not answered for 1 s; neither has rank 2: one of them may wait"):
        workers.results(9, {0, 2})


def test_a_driver_that_was_stopped_reads_what_came_meanwhile(tmp_path: Path, made: list[Silent]) -> None:
    workers = ProcessWorkers(Colocated(gpus=2, timeout_s=1), tmp_path, gpu=False)
    workers.start([0], "drop")
    time.sleep(1.2)  # stopped: the threads that receive have not run either
    threading.Timer(0.05, made[0].done).start()
    assert workers.results(9, {0}) == {0: None}


def test_the_first_failure_of_a_worker_is_its_error(tmp_path: Path, made: list[Silent]) -> None:
    """What it does after that may end it."""
    workers = ProcessWorkers(Colocated(gpus=2, timeout_s=9), tmp_path, gpu=False)
    for _ in range(2):
        workers.start([0, 1], "drop")
    made[0].answer(FAILED, [LearnerError.__name__, "no room", "update", "make it smaller", time.time()])
    made[0].inbox.put((made[0], ENDED, time.monotonic()))
    with pytest.raises(LearnerError, match="no room") as caught:
        workers.results(9, {0, 1})
    assert "rank 0 in drop" in str(caught.value)


def test_files_under_way_do_not_stay(tmp_path: Path, made: list[Silent]) -> None:
    kept = {"rank_0.log", "stacks_0.txt", "pids.txt"}
    for name in (*kept, "part_3.safetensors", "rendezvous_1", "channel_2_0"):
        (tmp_path / name).touch()
    workers = ProcessWorkers(Colocated(gpus=2), tmp_path, gpu=False)
    assert {path.name for path in tmp_path.iterdir()} == kept
    (tmp_path / "weights.safetensors").touch()
    workers.close()
    assert {path.name for path in tmp_path.iterdir()} == kept


FAILING = """
import sys
from lockstep.cluster import host
from lockstep.errors import LearnerError

class Failing:
    def __init__(self, place): self.calls = []
    def train(self, batch: int) -> None: raise LearnerError(f"no room for {batch}")
    push = train
    def drop(self) -> None: raise LearnerError("dropped")

sys.modules["failing"] = sys.modules["__main__"]
sys.argv = ["host", sys.argv[1]]
host.TRAINER = "failing:Failing"
host.main()
"""


@pytest.mark.parametrize("method", ["train", "push"])
def test_no_call_is_made_after_one_of_an_update_has_failed(tmp_path: Path, method: str) -> None:
    """Other ranks exchange other tensors then; and nothing samples with weights that are not proven."""
    ours, theirs = Pipe()
    with subprocess.Popen([sys.executable, "-c", FAILING, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.send_bytes(wire.dumps([[0, 1, str(tmp_path), "", 1, 0], "failing:Failing"]))
        for asked, given in (
            ("drop", {}),
            (method, {"batch": to_plain(int, 1)}),
            ("train", {"batch": to_plain(int, 2)}),
            ("drop", {}),
        ):
            ours.send_bytes(wire.dumps([asked, given]))
        found = [wire.loads(ours.recv_bytes())[1][1] for _ in range(4)]
        ours.close()
        worker.wait(20)
    assert found == ["dropped", "no room for 1", "no room for 1", "no room for 1"]
