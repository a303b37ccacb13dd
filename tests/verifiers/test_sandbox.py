"""The sandbox: what tries to get out stays in, is not paid, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code
from tests.verifiers.escapes import ESCAPES, Escape

MARK = f"lockstep-escaped-{os.getpid()}"
MOST = 12.0
"""Seconds that one may take on a busy machine: its limits are 1 s of processor time and 5 s."""
ESCAPED = ({"function": "attempt", "args": [], "expected": "escaped"},)


def prompt(tests: object, **data: object) -> Prompt:
    return Prompt("code/1", ({"role": "user", "content": "write it"},), "", data={"tests": tests, **data})


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    settings = schema.CodeVerifier(cpu_seconds=1, wall_seconds=5, memory_mib=64, output_kib=64, threads=8, workers=1)
    verifier = build_verifier(settings)
    assert isinstance(verifier, Code)
    yield verifier
    verifier.pool.close()


@pytest.fixture(scope="module")
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


def processes_of(verifier: Code) -> list[psutil.Process]:
    """What its workers have started; each has one process that forks the others."""
    return [child for pid in verifier.pool.pids for child in psutil.Process(pid).children(recursive=True)]


def nothing_left(verifier: Code) -> bool:
    """Within a second: no process but the one that forks, no file, no mount."""
    deadline = time.monotonic() + 1
    while len(processes_of(verifier)) > len(verifier.pool.pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    users = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real >= 1_700_000_000]
    places = (Path("/"), Path("/root"), Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd(), Path(os.__file__).parent)
    files = [path for place in places if place.is_dir() for path in place.glob(f"*{MARK}*")]
    files += list(Path(tempfile.gettempdir()).glob("lockstep-sandbox-*"))
    own = {p.pid for p in processes_of(verifier)} | set(verifier.pool.pids)
    return len(processes_of(verifier)) == len(verifier.pool.pids) and not files and not [p for p in users if p.pid in own]


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name)
def test_escapes_and_bombs_are_contained_and_not_paid(code: Code, listening: socket.socket, escape: Escape) -> None:
    port = listening.getsockname()[1]
    program = escape.code.replace("MARK", MARK).replace("PORT", str(port)).replace("PID", str(os.getpid()))
    start = time.monotonic()
    grade = code.grade(prompt(ESCAPED), block(program))
    assert time.monotonic() - start < MOST
    assert grade.reward == 0, grade
    assert grade.metrics["hit_limit"] == escape.limit
    with pytest.raises(BlockingIOError):
        listening.accept()
    assert nothing_left(code)
    assert code.grade(prompt(ESCAPED), block("def attempt(): return 'escaped'")).reward == 1


def test_there_are_more_than_thirty() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 30


ASSERTED = ("assert attempt(3) == 9", "assert abs(attempt(4) - 16) < 1e-6", "assert attempt(5)")
E_TRUE = "class E:\n    def __eq__(s, o): return True\n    def __bool__(s): return True\n    def __sub__(s, o): return 0\n"
CHEATS = {
    "equals everything": E_TRUE + "    __ne__ = __lt__ = __gt__ = __abs__ = __eq__\ndef attempt(n): return E()",
    "a number that equals everything": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef attempt(n): return I(3)",
    "patched abs": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = Warning\ndef attempt(n): return 9",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"ok\": 9}'\ndef attempt(n): return 0",
    "says that it passed": "import os\ndef attempt(n):\n    for f in range(1, 12):\n        try: os.write(f, b'{\"passed\": 3, \"first\": \"\"}\\n')\n"
    "        except OSError: pass\n    return 9",
    "raises what ends tests": "def attempt(n): raise SystemExit(0)",
    "raises what tests raise": "def attempt(n): raise AssertionError",
    "stops the tests' loop": "def attempt(n): raise StopIteration",
    "exits": "import os\ndef attempt(n): os._exit(0)",
    "returns itself": "def attempt(n): return attempt",
    "looks for the tests": "import sys, gc\ndef attempt(n):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, str) and 'assert attempt' in o: return n * n\n    return 0",
    "reads the descriptors": "import os\ndef attempt(n):\n    for f in range(0, 64):\n        try:\n            if b'assert' in os.read(f, 9): return n * n\n"
    "        except OSError: pass\n    return 0",
}
CHEATS["answers ahead"] = (
    "import os\nfor f in range(3, 12):\n    try: os.write(f, b'{\"ok\": true}\\n' * 9)\n    except OSError: pass\ndef attempt(n): return 9"
)


@pytest.mark.parametrize("name", CHEATS)
def test_tests_as_code_are_out_of_the_programs_reach(code: Code, name: str) -> None:
    assert code.grade(prompt(ASSERTED), block(CHEATS[name])).reward == 0
    assert code.grade(prompt(ASSERTED), block("def attempt(n): return n * n")).reward == 1
    assert nothing_left(code)


SCRIPTED = ({"input": "3 4\n", "output": "12\n"}, {"input": "", "output": "none\n"})
SCRIPT = "import sys\nwords = sys.stdin.read().split()\nprint(int(words[0]) * int(words[1]) if words else 'none')"


@pytest.mark.parametrize(
    ("program", "reward", "limit"),
    [
        (SCRIPT, 1, 0),
        (SCRIPT + "\nsys.exit(0)", 1, 0),
        (SCRIPT + "\nsys.exit(1)", 0, 0),
        (SCRIPT + "\nraise ValueError", 0, 0),
        ("print(12)", 0, 0),
        ("print('none')\nimport os\nos._exit(0)", 0, 0),
        ("while True: print('x' * 1000)", 0, 1),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", 0, 1),
        ("import time\ntime.sleep(600)", 0, 1),
        ("import os\nos.close(1)\nwhile True: pass", 0, 1),
    ],
)
def test_scripts_are_judged_by_what_they_print(code: Code, program: str, reward: float, limit: float) -> None:
    grade = code.grade(prompt(SCRIPTED), block(program))
    assert (grade.reward, grade.metrics["hit_limit"]) == (reward, limit)
    assert nothing_left(code)


def test_a_worker_or_what_forks_for_it_may_be_killed_at_any_time(code: Code) -> None:
    right, wrong = block("def attempt(): return 'escaped'"), block("def attempt(): return 'no'")
    with ThreadPoolExecutor(1) as pool:
        due = [1.0, 0.0] * 30
        grades = [pool.submit(code.grade, prompt(ESCAPED), right if paid else wrong) for paid in due]
        for turn in range(4):
            time.sleep(0.1)
            victims = [psutil.Process(pid) for pid in code.pool.pids] if turn % 2 else processes_of(code)[:1]
            for victim in victims:
                victim.send_signal(signal.SIGKILL)
        assert [grade.result().reward for grade in grades] == due
    assert nothing_left(code)


def test_the_measures_in_force_are_said_and_closing_ends_everything() -> None:
    verifier = build_verifier(schema.CodeVerifier(workers=2))
    assert isinstance(verifier, Code)
    assert verifier.notes[0].startswith("programs run in a sandbox: own user, own file system, no network, own process table")
    assert not verifier.missing
    pids = [*verifier.pool.pids, *(process.pid for process in processes_of(verifier))]
    assert len(pids) == 2
    verifier.pool.close()
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


