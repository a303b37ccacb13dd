"""Workers that throw, hang, fork, eat memory, or are killed: their calls are told apart, and the rest goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.config import schema
from lockstep.types import Grade, Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.python import UserFunction
from lockstep.workers.pool import Answered, Exceeded, Work, WorkerPool

PROMPT = Prompt("t/1", ({"role": "user", "content": "4 + 3"},), "7", data={"when": (1, {2: "x"})})
CODE = """
import ctypes, os, signal, subprocess, sys, time
from lockstep.types import Grade

calls = 0

def spin():
    while True:
        pass

def grade(prompt, reply):
    global calls
    calls += 1
    match reply:
        case "throw": raise ValueError("odd reply")
        case "hang": time.sleep(1000)
        case "spin": spin()
        case "text": return "1"
        case "none": return None
        case "inf": return float("inf")
        case "list": return [1.0, 0.0, 1.0]
        case "fork": os.fork()
        case "fork, caught":
            try:
                os.fork()
            except Exception:
                pass
        case "fork by C": ctypes.CDLL(None).fork()
        case "shell": os.system("sleep 1000")
        case "popen": subprocess.Popen(["sleep", "1000"])
        case "eat": return len(bytearray(10 * 2**30))
        case "eat slowly":
            kept = []
            while True:
                kept.append(bytearray(2**26))
        case "exit": os._exit(3)
        case "segfault": ctypes.string_at(0)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "flood": return Grade(1.0, extracted="x" * 2**22)
        case "print": print("1" * 100_000); sys.stdout.flush()
        case "forge": os.write(3, b'{"id": 1, "ok": {"reward": 1.0}}')
        case "calls": return float(calls)
        case "data": return prompt.data == {"when": (1, {2: "x"})}
        case "stuck": __import__("re").match(r"(a+)+$", "a" * 64 + "b")
    return float(reply == prompt.answer)
"""
UNSCORED = {
    "throw": "ValueError: odd reply ({file}:15)",
    "hang": "the grader met its time limit: no answer in 2 s ({file}:16)",
    "spin": "the grader met its time limit: no answer in 2 s ({file}:",
    "text": "the grader returned str, not a number, bool or Grade",
    "none": "the grader returned NoneType, not a number, bool or Grade",
    "inf": "the grader returned inf, not a finite number",
    "list": "the grader returned list, not a number, bool or Grade",
    "fork": "StartsProcessError: the code tried to start a process (os.fork), which is not allowed here ({file}:22)",
    "fork, caught": "it started a process (os.fork)",
    "fork by C": "it started a process (it left one behind)",
    "shell": "StartsProcessError: the code tried to start a process (os.system), which is not allowed here ({file}:29)",
    "popen": "StartsProcessError: the code tried to start a process (subprocess.Popen), which is not allowed here ({file}:30)",
    "eat": "the grader met its memory limit: MemoryError ({file}:31)",
    "eat slowly": "the grader met its memory limit: MemoryError ({file}:35)",
    "exit": "the grader did not live: its process ended (exit code 3)",
    "segfault": "the grader did not live: its process ended (signal SIGSEGV)",
    "kill": "the grader did not live: its process ended (signal SIGKILL)",
    "flood": "the grader did not live: its process ended (",
}


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "grader.py"
    path.write_text(CODE)
    made = build_verifier(schema.PythonVerifier(path=f"{path}:grade", seconds=2, memory_gib=0.5))
    assert isinstance(made, UserFunction)
    yield made, path
    made.pool.close()


def gone(pids) -> bool:
    """Whether all these processes end within five seconds."""
    for _ in range(100):
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not left:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("reply", UNSCORED)
def test_what_goes_wrong_is_unscored_and_named_and_the_next_is_right(grader, reply):
    verifier, path = grader
    start = time.monotonic()
    grade = verifier.grade(PROMPT, reply)
    assert time.monotonic() - start < 10
    assert grade.reward is None
    assert grade.error.startswith(UNSCORED[reply].format(file=path))
    assert verifier.grade(PROMPT, "7") == Grade(1.0, {"correct": 1.0})
    assert verifier.grade(PROMPT, "8").reward == 0.0


def test_printing_and_forging_change_nothing(grader):
    verifier, _ = grader
    assert verifier.grade(PROMPT, "print").reward == 0.0
    assert verifier.grade(PROMPT, "forge").reward in (0.0, None)
    assert verifier.grade(PROMPT, "7").reward == 1.0


def test_the_prompt_arrives_as_it_was(grader):
    assert grader[0].grade(PROMPT, "data").reward == 1.0


def test_a_prompt_that_cannot_be_sent_is_unscored(grader):
    strange = Prompt("t/2", PROMPT.messages, "7", data={"model": object()})
    error = grader[0].grade(strange, "7").error
    assert error == "call.prompt.data.model is a object, which cannot be sent"


def test_a_megabyte_reply_arrives(grader):
    long = "x" * 5_000_000
    assert grader[0].grade(Prompt("t/1", PROMPT.messages, long), long).reward == 1.0


def test_no_process_outlives_the_pool(grader):
    verifier, _ = grader
    verifier.grade(PROMPT, "fork by C")
    verifier.grade(PROMPT, "7")
    children = [child.pid for pid in verifier.pool.pids for child in psutil.Process(pid).children(recursive=True)]
    pids = [*verifier.pool.pids, *children]
    verifier.pool.close()
    assert verifier.pool.pids == ()
    assert gone(pids)
    assert verifier.grade(PROMPT, "7").reward == 1.0  # closed is not broken


def test_calls_run_side_by_side(grader):
    verifier, _ = grader
    verifier.grade(PROMPT, "7")
    with ThreadPoolExecutor(4) as threads:
        replies = ["7", "hang", "8", "throw"] * 2
        rewards = list(threads.map(lambda reply: verifier.grade(PROMPT, reply).reward, replies))
    assert rewards == [1.0, None, 0.0, None] * 2


def test_memory_is_charged_to_the_call_that_took_it(tmp_path):
    (tmp_path / "grader.py").write_text(
        "kept = []\ndef grade(prompt, reply):\n    kept.append(bytearray(300 * 2**20))\n    return len(kept)\n"
    )
    verifier = build_verifier(schema.PythonVerifier(path=f"{tmp_path}/grader.py:grade", memory_gib=0.5, workers=1))
    # Each call leaves 300 MiB behind: its process is replaced, so the next starts from nothing.
    assert [verifier.grade(PROMPT, "").reward for _ in range(3)] == [1.0, 1.0, 1.0]


def test_the_processor_limit_counts_processor_time():
    pool = WorkerPool(
        Work("lockstep.verifiers.symbolic", {}, "math", wall_seconds=20, cpu_seconds=0.2, memory=2**29), 1
    )
    start = time.process_time()
    outcome = pool.call({"answer": "9^{9^{9}}", "reference": "1"})
    assert outcome == Exceeded("cpu", "more than 0.2 s of processor time")
    assert pool.call({"answer": "x+1", "reference": "1+x"}) == Answered("equal")
    assert time.process_time() - start < 1
    pool.close()


OWNER = """
import sys, time
from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers.build import build_verifier
verifier = build_verifier(schema.PythonVerifier(path=sys.argv[1], seconds=100))
from concurrent.futures import ThreadPoolExecutor
threads = ThreadPoolExecutor(2)
prompt = Prompt("t/1", (), "7")
threads.submit(verifier.grade, prompt, "hang")
threads.submit(verifier.grade, prompt, sys.argv[2])
deadline = time.monotonic() + 20
while len(verifier.pool.pids) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.5)
print(*verifier.pool.pids, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("reply", ["hang", "7", "stuck"])
def test_workers_end_when_their_owner_is_killed(grader, reply):
    """Also one whose work keeps Python's lock, so that no thread of it runs."""
    command = [sys.executable, "-c", OWNER, f"{grader[1]}:grade", reply]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            pids = [int(word) for word in owner.stdout.readline().split()]
        finally:
            owner.kill()
    assert len(pids) == 2
    assert gone(pids)


FORKED = """
import os, signal, sys
from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers.build import build_verifier

def reward():
    made = build_verifier(schema.PythonVerifier(path=sys.argv[1], seconds=20, workers=1))
    found = made.grade(Prompt("t/1", (), "7"), "7").reward
    made.pool.close()
    return found

assert reward() == 1.0
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
os._exit(0 if reward() == 1.0 else 1)
"""


def test_a_fork_of_an_owner_can_have_workers_of_its_own(grader):
    assert subprocess.run([sys.executable, "-c", FORKED, f"{grader[1]}:grade"]).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every answer waits for its turn of a loaded machine
def test_killing_workers_at_random_changes_no_verdict():
    """10,000 answers by two workers. Every few hundred, one of them or the template that they are copies of is killed,
    and every other time the next template while it loads. By answers, not by the clock: a template that is killed more
    often than it takes to load is never there, and how long that is depends on the machine."""
    others = {child.pid for child in psutil.Process().children()}  # of other tests' pools
    verifier = build_verifier(schema.MathVerifier(workers=2, cpu_seconds=10))
    draw, lock, killed = random.Random(0), threading.Lock(), [0]
    due = {at + draw.randrange(300): at // 600 % 2 for at in range(400, 10_000, 600)}

    def kill(pids: list[int]) -> None:
        with suppress(ProcessLookupError):  # it may have been replaced since
            os.kill(draw.choice(pids), signal.SIGKILL)
            killed[0] += 1

    def templates() -> list[int]:
        return sorted({child.pid for child in psutil.Process().children()} - others)

    def grade(at: int) -> Grade:
        if at in due:
            with lock:
                kill([*verifier.pool.pids, *templates()])
                if due[at] and (loading := templates()):
                    kill(loading)
        number = numbers[at]
        return verifier.grade(Prompt("t/1", (), f"x+{number}"), f"\\boxed{{{number + at % 2}+x}}")

    numbers = [draw.randrange(10_000) for _ in range(10_000)]
    with ThreadPoolExecutor(2) as threads:
        grades = list(threads.map(grade, range(10_000)))
    assert [grade.reward for grade in grades] == [1.0 - at % 2 for at in range(10_000)]
    assert killed[0] >= 10
    assert verifier.pool.replaced >= 10


def test_a_copy_does_not_hold_the_templates_socket():
    """Else the owner waits two minutes for a template that is killed while it makes a copy."""
    verifier = build_verifier(schema.MathVerifier(workers=1))
    verifier.grade(Prompt("t/1", (), "x+1"), "\\boxed{1+x}")
    (pid,) = verifier.pool.pids
    held = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert sum(one.startswith("pipe:") for one in held) == 2
    assert not [one for one in held if one.startswith("socket:")]


def test_a_worker_imports_nothing_heavy(grader):
    verifier, _ = grader
    verifier.grade(PROMPT, "7")
    process = psutil.Process(verifier.pool.pids[0])
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    deadline = time.monotonic() + 10
    while process.num_threads() < 2 and time.monotonic() < deadline:  # it may be starting
        time.sleep(0.01)
    assert process.num_threads() == 2  # the work, and who watches the owner
