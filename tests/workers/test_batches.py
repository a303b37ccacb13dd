"""Calls that are sent to one process together: their outcomes are those of calls one by one, and none waits for a slow one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from lockstep.config import schema
from lockstep.types import Grade, Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.python import UserFunction
from lockstep.workers import process, wire
from lockstep.workers.pool import Answered, Exceeded, Work, WorkerPool
from tests.workers.test_pool import PROMPT, gone

CODE = """
import ctypes, os, time
from contextlib import suppress
from pathlib import Path
from lockstep.types import Grade

def grade(prompt, reply):
    with Path(__file__).with_name("log").open("a") as log:
        log.write(reply + "\\n")
    match reply:
        case "throw": raise ValueError("odd reply")
        case "hang": time.sleep(1000)
        case "slow": time.sleep(1.5)
        case "text": return "1"
        case "fork by C": ctypes.CDLL(None).fork()
        case "eat": return len(bytearray(10 * 2**30))
        case "exit": os._exit(3)
        case "large": return Grade(1.0, extracted="x" * 900_000)
        case "too large": return Grade(1.0, extracted="x" * 2**21)
        case "garbage":
            for descriptor in range(3, 10):
                with suppress(OSError):
                    os.write(descriptor, b"garbage\\n")
        case "forge":
            for descriptor in range(3, 10):
                with suppress(OSError):
                    os.write(descriptor, b'{"id": 100, "ok": [], "last": false}\\n')
    return float(reply == prompt.answer)
"""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Time enough that no quick call is taken for a slow one on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "LATE_SECONDS", 1.2)
        yield


@pytest.fixture(scope="module")
def grader(patience: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[UserFunction, Path]]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "grader.py").write_text(CODE)
    settings = schema.PythonVerifier(path=f"{folder}/grader.py:grade", seconds=4, memory_gib=0.5, workers=1)
    made = build_verifier(settings)
    assert isinstance(made, UserFunction)
    yield made, folder / "log"
    made.pool.close()


@pytest.fixture
def unhurried(grader: tuple[UserFunction, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call is given away because it takes long, however busy the machine is."""
    monkeypatch.setattr(process, "LATE_SECONDS", 60.0)
    yield
    grader[0].pool.close()  # a process is told at its start how long a slow call takes


def sent(
    verifier: UserFunction, replies: Sequence[str], late: Callable[[], None] = lambda: None, prompt: Prompt = PROMPT
) -> list[Grade]:
    """The grades of one batch: of its first replies."""
    return [grade for (grade,) in verifier.grade_many([(prompt, [reply]) for reply in replies], late)]


@pytest.mark.parametrize(
    ("bad", "made"),
    [
        ("throw", 1),
        ("text", 1),
        ("large", 1),
        ("hang", 1),
        ("eat", 1),
        ("fork by C", 1),
        ("exit", 2),
        ("too large", 8),
        ("garbage", 0),
        ("forge", 0),
    ],
)
@pytest.mark.usefixtures("unhurried")
def test_a_batch_has_the_grades_of_calls_one_by_one(grader: tuple[UserFunction, Path], bad: str, made: int) -> None:
    verifier, log = grader
    replies = ["7", "8", bad, "7", "", "x" * 100_000, "7"]
    alone = [verifier.grade(PROMPT, reply) for reply in replies]
    log.unlink()
    grades: list[Grade] = []
    while len(grades) < len(replies):
        found = sent(verifier, replies[len(grades) :])
        assert found
        grades += found
    assert grades == alone
    assert [grade.reward for grade in grades] == [1.0, 0.0, alone[2].reward, 1.0, 0.0, 0.0, 1.0]
    if made:  # as often as alone, and the others once; a process that talks is ended a little later
        assert log.read_text().split("\n") == ["7", "8", *[bad] * made, "7", "", "x" * 100_000, "7", ""]


def test_answers_of_a_process_that_ends_before_it_has_read_all_calls_are_taken() -> None:
    theirs, requests = os.pipe()
    answers, to_us = os.pipe()
    link = process.Link(requests, answers, 2**20)
    link.push(b"x" * 2**20 + b"\n")
    assert link.pending
    os.write(to_us, wire.dumps({"id": 1}) + wire.dumps({"id": 2}))
    os.close(theirs)
    os.close(to_us)
    assert [link.exchange(b"", 1)["id"] for _ in range(2)] == [1, 2]
    with pytest.raises(process.Gone):
        link.exchange(b"", 1)
    link.close()


def test_calls_after_a_slow_one_are_left_to_others(grader: tuple[UserFunction, Path]) -> None:
    verifier, log = grader
    verifier.grade(PROMPT, "7")
    log.unlink()
    pids, events = verifier.pool.pids, list[str]()
    events += [f"{grade.reward}" for grade in sent(verifier, ["7", "slow", "8", "8"], lambda: events.append("late"))]
    assert events == ["late", "1.0", "0.0"]
    assert sent(verifier, ["7", "7"]) == [Grade(1.0, {"correct": 1.0})] * 2
    assert log.read_text().split() == ["7", "slow", "7", "7"]
    assert verifier.pool.pids == pids


def test_a_call_that_cannot_be_sent_costs_no_other(grader: tuple[UserFunction, Path]) -> None:
    verifier, _ = grader
    strange = Prompt("t/2", PROMPT.messages, "7", data={"model": object()})
    asked = [(PROMPT, ["7"]), (PROMPT, ["8"]), (strange, ["7"]), (PROMPT, ["7"])]
    assert [grade.reward for (grade,) in verifier.grade_many(asked)] == [1.0, 0.0]
    ((failed,),) = verifier.grade_many(asked[2:])
    assert failed.error == "call.prompt.data.model is a object, which cannot be sent"


def test_a_batch_that_is_given_up_leaves_no_process(grader: tuple[UserFunction, Path]) -> None:
    verifier, _ = grader
    (pid,) = verifier.pool.pids
    grades = verifier.grade_many([(PROMPT, [reply]) for reply in ["7", "hang", "7"]])
    assert next(grades)[0].reward == 1.0
    del grades
    assert gone([pid])
    assert verifier.grade(PROMPT, "7").reward == 1.0
    pids = verifier.pool.pids
    verifier.pool.close()
    assert gone(pids)


def test_a_process_that_is_killed_during_a_batch_costs_no_verdict(grader: tuple[UserFunction, Path]) -> None:
    verifier, _ = grader
    grades = verifier.grade_many([(PROMPT, [reply]) for reply in ["7", "slow", "8"]])
    assert next(grades)[0].reward == 1.0
    psutil.Process(verifier.pool.pids[0]).kill()
    assert [grade.reward for (grade,) in grades] == [0.0]
    assert sent(verifier, ["8", "7"])[1].reward == 1.0


def test_each_call_has_its_own_processor_time() -> None:
    work = Work("lockstep.verifiers.symbolic", {}, "math", wall_seconds=20, cpu_seconds=0.5, memory=2**29)
    pool = WorkerPool(work, 1)
    calls = [{"answer": "x+1", "reference": "1+x"}, {"answer": "9^{9^{9}}", "reference": "1"}]
    outcomes = list(pool.call_many([*calls, *calls]))
    while len(outcomes) < 4:
        outcomes += pool.call_many([*calls, *calls][len(outcomes) :])
    assert outcomes == [Answered("equal"), Exceeded("cpu", "more than 0.5 s of processor time")] * 2
    pool.close()
