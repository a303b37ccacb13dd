# ruff: noqa: E501
"""The sandbox: what tries to get out stays in, is not paid, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.types import Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code, find_code
from lockstep.verifiers.mutations import wrong_replies
from lockstep.verifiers.selftest import self_test
from tests.verifiers.escapes import ASSERTED, CHEATS, ESCAPES, Escape

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
    found: list[psutil.Process] = []
    for pid in verifier.pool.pids:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).children(recursive=True)
    return found


def folders_of(pids: Iterable[int]) -> list[Path]:
    """Folders of these zygotes' programs. Others on this machine may have some, too."""
    return [path for pid in pids for path in Path(tempfile.gettempdir()).glob(f"lockstep-sandbox-{pid}-*")]


def nothing_left(verifier: Code) -> bool:
    """Within a second: no process but the one that forks, no file, no mount."""
    deadline = time.monotonic() + 1
    while len(processes_of(verifier)) > len(verifier.pool.pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    users = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real >= 1_700_000_000]
    places = (
        Path("/"),
        Path("/root"),
        Path(tempfile.gettempdir()),
        Path("/dev/shm"),
        Path.cwd(),
        Path(os.__file__).parent,
    )
    files = [path for place in places if place.is_dir() for path in place.glob(f"*{MARK}*")]
    files += folders_of(process.pid for process in processes_of(verifier))
    own = {p.pid for p in processes_of(verifier)} | set(verifier.pool.pids)
    return (
        len(processes_of(verifier)) == len(verifier.pool.pids) and not files and not [p for p in users if p.pid in own]
    )


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
    right, wrong = block("def attempt(n): return n * n"), block("def attempt(n): return 9")
    due, rng = [1.0, 0.0] * 40, random.Random(0)
    with ThreadPoolExecutor(1) as pool:
        grades = [pool.submit(code.grade, prompt(ASSERTED), right if paid else wrong) for paid in due]
        kills = 0
        while (done := sum(grade.done() for grade in grades)) < len(due) and kills < 12:
            time.sleep(rng.uniform(0.02, 0.1))
            if kills > 2 * done + 3:  # one call may be cut a few times, not for ever, however slow the machine
                continue
            alive = [psutil.Process(pid) for pid in code.pool.pids if psutil.pid_exists(pid)] + processes_of(code)
            with suppress(psutil.NoSuchProcess, IndexError):
                rng.choice(alive).kill()
                kills += 1
        assert [grade.result().reward for grade in grades] == due
    assert kills >= 4
    assert code.grade(prompt(ESCAPED), block("def attempt(): return 'escaped'")).reward == 1
    assert nothing_left(code)


def test_the_measures_in_force_are_said_and_closing_ends_everything() -> None:
    verifier = build_verifier(schema.CodeVerifier(workers=2))
    assert isinstance(verifier, Code)
    assert verifier.notes[0].startswith(
        "programs run in a sandbox: own user, own file system, no network, own process table"
    )
    assert not verifier.missing
    assert nothing_left(verifier)
    pids = [*verifier.pool.pids, *(process.pid for process in processes_of(verifier))]
    assert len(pids) == 2
    verifier.pool.close()
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


def as_nobody() -> None:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


ORDINARY = """
import json, sys, time
sys.path.insert(0, ROOT)
from lockstep.verifiers.sandbox.host import Sandbox
from lockstep.verifiers.sandbox.isolation import Limits
sandbox = Sandbox(Limits(1, 64 << 20, 16 << 20, 8))
said = [sandbox.pid, sandbox.in_force, sandbox.missing]
for program in json.loads(sys.stdin.read()):
    with sandbox.spawn("calls", (), time.monotonic() + 10) as run:
        run.start()
        run.ask({"code": program})
        said.append(run.ask({"op": "call", "name": "attempt", "args": [], "kwargs": {"!": "dict", "v": []}}).get("ok"))
sandbox.close()
print(json.dumps(said))
"""


def as_ordinary_user(names: Sequence[str], options: str = "") -> list[Any]:
    """List what is in force, what is missing, and what the escapes with these names (or the code itself) answer."""
    python, root = "/usr/bin/python3", Path(__file__).parents[2]
    check = "import sys; sys.exit(sys.version_info < (3, 11) or not __import__('os').access(sys.argv[1], 4))"
    if not Path(python).exists() or subprocess.run([python, "-c", check, str(root)], preexec_fn=as_nobody).returncode:
        pytest.skip("no Python that an ordinary user can start")
    by_name = {e.name: e.code.replace("MARK", MARK).replace("PORT", "80").replace("PID", "1") for e in ESCAPES}
    programs = json.dumps([by_name.get(name, name) for name in names])
    script = ORDINARY.replace("ROOT", repr(str(root))).replace("8)", f"8), {options}")
    done = subprocess.run(
        [python, "-c", script], input=programs, capture_output=True, text=True, preexec_fn=as_nobody, timeout=60
    )
    pid, *said = json.loads(done.stdout)
    assert not folders_of([pid])
    return list(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_an_ordinary_user_has_the_same_isolation_by_a_user_namespace() -> None:
    text = (
        "fork bomb|write to /|connect|abstract socket|the parent's environment|become root|huge file|thread bomb|mount"
    )
    names = f"{text}|symlink out|exec|memory in a file of memory|its own /proc|up and out".split("|")
    in_force, missing, *answers, last = as_ordinary_user([*names, "def attempt(): return 'escaped'"])
    assert (len(in_force), missing, last) == (6, [], "escaped")
    assert dict(zip(names, answers, strict=True)) == dict.fromkeys(names, "contained")


def test_where_a_measure_is_not_to_be_had_strict_refuses_and_best_effort_says_so() -> None:
    """A filter of system calls that denies unshare stands for a container: the worker inherits it."""
    script = (
        "import ctypes, errno, struct, platform\n"
        "from lockstep.verifiers.sandbox import seccomp\n"
        "number = seccomp.DENIED['unshare'][0 if platform.machine() == 'x86_64' else 1]\n"
        "parts = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7FFF0000)]\n"
        "seccomp.install(ctypes.CDLL(None, use_errno=True), b''.join(struct.pack('<HBBI', *p) for p in parts))\n"
        "from lockstep.config import schema\n"
        "from lockstep.errors import TaskError\n"
        "from lockstep.types import Prompt\n"
        "from lockstep.verifiers.build import build_verifier\n"
        "try:\n"
        "    build_verifier(schema.CodeVerifier(workers=1))\n"
        "except TaskError as error:\n"
        "    print('REFUSED', error.what)\n"
        "v = build_verifier(schema.CodeVerifier(workers=1, isolation='best_effort', cpu_seconds=1, wall_seconds=5))\n"
        "print('NOTE', *v.notes)\n"
        "tests = [{'function': 'attempt', 'args': [], 'expected': 'escaped'}]\n"
        "def paid(code): return v.grade(Prompt('a', (), '', data={'tests': tests}), f'```python\\n{code}\\n```').reward\n"
        "print('PAID', paid('def attempt(): return chr(101) + \"scaped\"'), paid('import os\\ndef attempt(): os.fork()'),\n"
        '      paid(\'import os\\ndef attempt():\\n    open("x", "w").close()\\n    while True: pass\'))\n'
        "import psutil\n"
        "print('ZYGOTES', *[child.pid for pid in v.pool.pids for child in psutil.Process(pid).children()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    if os.geteuid() == 0 and not library_is_open():  # then even best_effort is not possible
        assert (
            "REFUSED the sandbox did not start: a program cannot load Python's library as another user" in done.stdout
        ), done.stderr
        return
    refused, noted = (
        next(line for line in done.stdout.splitlines() if line.startswith(s)) for s in ("REFUSED", "NOTE")
    )
    assert "this machine cannot isolate programs: " in refused
    assert "own file system: " in refused
    assert "not isolated in full: " in noted
    assert "own file system: " in noted
    assert "it sees /proc" in done.stdout
    assert "PAID 1.0 0.0 0.0" in done.stdout
    zygotes = [int(pid) for pid in done.stdout.rpartition("ZYGOTES")[2].split()]
    assert zygotes
    assert not folders_of(zygotes)


def library_is_open() -> bool:
    """Whether any user can read the standard library."""
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in Path(os.__file__).parents)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_without_the_measures_escapes_do_escape() -> None:
    """The programs are no straw men: these get out where only limits hold them."""
    names = ("its own /proc", "unshare", "bind", "abstract socket", "up and out", "a shell")
    names += ("raw socket call", "symlink out", "hard link", "secrets in the environment", "daemon", "fork by C")
    said = as_ordinary_user(names, "apart=False, filter=False")
    assert dict(zip(names, said[2:], strict=True)) == dict.fromkeys(names, "escaped") | {
        "secrets in the environment": "contained",  # it has none in any case
        "hard link": "contained",  # the interpreter is another user's
    }


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (None, "there are none"),
        ([], "there are none"),
        ("x = 1", "assert nothing"),
        (["assert 1 == 1"], "use nothing that the program defines"),
        (["assert f("], "not Python"),
        ('{"inputs": [', "look like JSON"),
        ([{"input": 3, "output": "3"}], "as text"),
        ([{"function": "f"}], "expected"),
    ],
)
def test_bad_tests_leave_the_reply_unscored(code: Code, tests: object, why: str) -> None:
    grade = code.grade(prompt(tests), block("def f(): return 1"))
    assert grade.reward is None
    assert why in (grade.error or "")


STACK = "class Stack:\n    def __init__(s): s.i = []\n    def push(s, x): s.i.append(x)\n    def pop(s): return s.i.pop()\n    size = 0"


@pytest.mark.parametrize(
    ("tests", "data", "program", "reward"),
    [
        ("assert f(1) == 2\nassert f(3) == 4", {}, "def f(n): return n + 1", 1),
        ("assert f(1) == 2\nassert f(3) == 4", {}, "def f(n): return 2", 0),
        (["import math", "assert math.isclose(f(2), 2 ** 0.5)"], {}, "def f(n): return n ** .5", 1),
        (["assert set(f(3)) == {0, 1, 2}"], {}, "def f(n): return range(n)", 1),
        (["assert f((1, 2)) == {'a': (1, 2)}"], {}, "def f(t): return {'a': t}", 1),
        (["assert f([1]) != 3"], {}, "def f(t): return object()", 0),
        (["assert f()"], {}, "def f(): return object()", 0),
        (
            ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"],
            {},
            "def f(n): raise ValueError('no')",
            1,
        ),
        (["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"], {}, "def f(n): raise KeyError('no')", 0),
        (
            ["s = Stack()\ns.push(4)\ns.push([5])", "assert s.pop() == [5] and s.pop() == 4 and s.size == 0"],
            {},
            STACK,
            1,
        ),
        (
            "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i * i\n",
            {"entry_point": "sq"},
            "def sq(n): return n * n",
            1,
        ),
        (
            "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i * i\n",
            {"entry_point": "sq"},
            "def sq(n): return 0",
            0,
        ),
        ('{"inputs": ["1\\n"], "outputs": ["1"]}', {}, "print(input())", 1),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, {}, "def add(a, b): return a + b", 1),
        (
            [{"function": "f", "args": [], "kwargs": {"n": 2}, "expected": [1, 2.5]}],
            {},
            "def f(n): return (1, 2.5000001)",
            1,
        ),
        ([{"function": "f", "args": [], "expected": 1}], {}, "def f(): return True", 0),
        ([{"function": "f", "args": [], "expected": {"a": 1}}], {}, "def f(): return {'a': 2}", 0),
    ],
)
def test_forms_of_tests(code: Code, tests: object, data: dict[str, object], program: str, reward: float) -> None:
    assert code.grade(prompt(tests, **data), block(program)).reward == reward


def test_which_block_is_the_program() -> None:
    assert find_code("```python\nx = 1\n```\nor\n```py\nx = 2\n```").text == "x = 2\n"
    assert find_code("```python\nx = 1\n```\n```text\n3\n```").text == "x = 1\n"
    assert find_code("```\nx = 1\n```").text == "x = 1\n"
    assert find_code("```python\nx = 1").text is None
    assert find_code("<think>```python\nx = 1\n```").text is None
    assert find_code("x = 1").text is None


def test_the_recipe_builds_and_its_solutions_pass_and_its_mutations_do_not() -> None:
    recipe = load([str(Path(__file__).parents[2] / "recipes" / "code.yaml")])
    assert isinstance(recipe.task, schema.FileTask)
    rows = [json.loads(line) for line in Path("recipes/data/code_tasks.jsonl").read_text().splitlines()]
    verifier = build_verifier(recipe.task.verifier)
    for number, row in enumerate(rows):
        asked = Prompt(f"code/{number}", ({"role": "user", "content": row["prompt"]},), row["answer"], data=row)
        assert len(wrong_replies(verifier, asked)) >= 15
        assert self_test(verifier, asked, mutations=number % 5 == 0) == []
