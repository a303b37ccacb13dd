# ruff: noqa: E501
"""The verifier `code`: what a program can cause itself is scored 0, what it cannot cause is not, and values are compared as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import schema
from lockstep.types import Grade, Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code, read_tests
from lockstep.verifiers.code_worker import same_value


@contextmanager
def built(**settings: Any) -> Iterator[Code]:
    limits: dict[str, Any] = {"cpu_seconds": 1, "wall_seconds": 2, "memory_mib": 128, "threads": 20, "workers": 1}
    verifier = build_verifier(schema.CodeVerifier(**(limits | settings)))
    assert isinstance(verifier, Code)
    yield verifier
    verifier.pool.close()


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    with built() as verifier:
        yield verifier


def graded(verifier: Code, tests: object, program: str) -> Grade:
    prompt = Prompt("code/1", ({"role": "user", "content": "write it"},), "", data={"tests": tests})
    return verifier.grade(prompt, f"```python\n{program}\n```")


LIMIT = "import resource\ndef limit(name, most):\n    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (most, most))\n"
SPIN = "    while True: pass\n"
TIMER = """
import ctypes, signal, struct, time
C = ctypes.CDLL(None)
def f():
    event, timer = ctypes.create_string_buffer(struct.pack('=Qii48x', 0, SIGNAL, 0)), ctypes.create_string_buffer(8)
    C.timer_create(1, event, timer)
    C.timer_settime(ctypes.c_void_p.from_buffer(timer), 0, ctypes.create_string_buffer(struct.pack('=qqqq', 0, 0, 0, 10**7)), None)
    time.sleep(600)
"""
ENDS = {
    "no processor time left": LIMIT + "def f():\n    limit('CPU', 0)\n" + SPIN,
    "no processor time left at import": LIMIT + "limit('CPU', 0)\nwhile True: pass\n",
    "a second of processor time left": LIMIT + "def f():\n    limit('CPU', 1)\n" + SPIN,
    "sleeps, then has no processor time left": LIMIT
    + "import time\ndef f():\n    time.sleep(1)\n    limit('CPU', 0)\n"
    + SPIN,
    "no memory left": LIMIT + "def f():\n    limit('AS', 0)\n    return [bytes(9999) for _ in range(9999)]\n",
    "no stack left": LIMIT + "def f():\n    limit('STACK', 0)\n    return f()\n",
    "no files left": LIMIT
    + "import os\nlimit('NOFILE', 0)\nlimit('FSIZE', 0)\ndef f():\n    open('x', 'w').write('x' * 9999)\n",
    "no threads left": LIMIT + "import threading\nlimit('NPROC', 0)\ndef f(): threading.Thread(target=print).start()\n",
    "kills itself": "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "stops itself": "import os, signal\ndef f():\n    signal.raise_signal(signal.SIGSTOP)\n",
    "is killed by its timer": TIMER.replace("SIGNAL", "9"),
    "is stopped by its timer": TIMER.replace("SIGNAL", "19"),
    "is ended by its timer": TIMER.replace("SIGNAL", "15"),
    "forbids itself all": "import ctypes, struct\ndef f():\n    C = ctypes.CDLL(None)\n    rule = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x80000000))\n"
    "    C.prctl(22, 2, ctypes.create_string_buffer(struct.pack('=H6xQ', 1, ctypes.addressof(rule))), 0, 0)\n    C.getppid()\n",
    "exits": "import os\ndef f(): os._exit(0)\n",
    "exits in a thread": "import os, threading\ndef f():\n    threading.Thread(target=os._exit, args=(0,)).start()\n"
    + SPIN,
    "aborts": "import os\ndef f(): os.abort()\n",
    "faults": "import ctypes\ndef f(): ctypes.string_at(0)\n",
    "closes everything": "import os\ndef f():\n    os.closerange(0, 64)\n" + SPIN,
    "sleeps": "import time\ndef f(): time.sleep(600)\n",
    "sleeps until a next sandbox starts": "import time\ndef f(): time.sleep(1.95)\n",
    "makes its own threads wait, then sleeps": "import hashlib, threading, time\ndata = bytes(1 << 24)\ndef f():\n    ts = [threading.Thread(target=hashlib.sha256, args=(data,)) for _ in range(16)]\n"
    "    [t.start() for t in ts]\n    [t.join() for t in ts]\n    time.sleep(600)\n",
    "daemonises": "import os\ndef f():\n    if os.fork(): os._exit(0)\n",
    "writes garbage": "import os\nfor n in range(3, 12):\n    try: os.write(n, b'{\"up\": false}\\n\\xff{[\\n' * 9)\n    except OSError: pass\ndef f(): return 2\n",
    "nests its error": "import os\ntext = b'{\"error\": ' + b'[' * 700 + b']' * 700 + b'}\\n'\nfor n in range(3, 12):\n    try: os.write(n, text * 3)\n    except OSError: pass\ndef f(): return 2\n",
    "nests its answer": "import os\ntext = b'{\"ok\": ' + b'[' * 900 + b']' * 900 + b'}\\n'\nfor n in range(3, 12):\n    try: os.write(n, text * 3)\n    except OSError: pass\ndef f(): return 2\n",
    "writes without end": "import os\ndef f():\n    while True:\n        for n in range(1, 12):\n            try: os.write(n, b'x' * 4096)\n            except OSError: pass\n",
    "quits": "def f(): raise SystemExit(0)\n",
}
FORMS = {
    "calls": ([{"function": "f", "args": [], "expected": 1}], ""),
    "asserts": (["assert f() == 1", "assert f() == 1"], ""),
    "an expected exception": (["try:\n    f()\n    assert False\nexcept Exception: pass", "assert f() == 1"], ""),
    "scripts": ([{"input": "", "output": "1"}] * 2, "\nprint(f())"),
}


WAITS = {
    "a second of processor time left": "calls",
    "sleeps, then has no processor time left": "scripts",
    "is killed by its timer": "an expected exception",
    "is stopped by its timer": "",
    "is ended by its timer": "",
    "closes everything": "calls",
    "sleeps": "an expected exception",
    "sleeps until a next sandbox starts": "calls",
    "writes without end": "scripts",
}
"""Ends that take all the time there is, each with the form in which it is tried by the fast tests."""


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[pytest.mark.slow] if WAITS.get(name, form) != form else [])
        for name in ENDS
        for form in ("calls", "an expected exception", "scripts")
    ],
)
def test_however_a_program_ends_it_is_wrong_and_scored(code: Code, name: str, form: str) -> None:
    tests, last = FORMS[form]
    grade = graded(code, tests, ENDS[name] + last)
    assert grade.reward == 0, grade


@pytest.mark.parametrize(
    ("call", "expected", "program", "reward"),
    [
        (["f", [{"a": [1]}, [{"b": {}}]]], [1, {}], "def f(d, e): return d['a'] + [e[0]['b']]", 1),
        (["f", [{"!": "set", "v": [1]}]], "set", "def f(d): return d['!']", 1),
        (["f", [2000]], [2**20000], "def f(n): return [2 ** (10 * n)]", 1),
        (["f", [2000]], [2**20000], "def f(n): return [2 ** (10 * n) + 1]", 0),
        (["f", []], list(range(150_000)), "def f(): return range(150_000)", 1),
        (["f", []], list(range(100_000)), "def f(): return range(150_000)", 0),
        (["f", []], "x" * 2_000_000, "def f(): return 'x' * 2_000_000", 1),
        (["f", []], 1, "def f(): return 'x' * 20_000_000", 0),
        (["f", []], {"1": "a", "true": 2, "null": 3}, "def f(): return {1: 'a', True: 'b', None: 3} | {'true': 2, 1: 'a'}", 1),
        (["f", []], {"1": "a"}, "def f(): return {1: 'a', '1': 'a'}", 0),
        (["f", []], [1, 2], "import itertools\ndef f(): return itertools.chain([1], iter((2,)))", 1),
        (["f", []], 5, "class I(int):\n    __eq__ = __ge__ = lambda s, o: True\n    __hash__ = None\ndef f(): return I(4)", 0),
        (["f", []], "a", "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(): return S('b')", 0),
        (["f", []], [1], "class L(list):\n    __eq__ = lambda s, o: True\n    __iter__ = lambda s: iter([2])\n    __len__ = lambda s: 1\ndef f(): return L()", 0),
    ],
)  # fmt: skip
def test_calls_compare_whole_values(code: Code, call: Any, expected: Any, program: str, reward: float) -> None:
    tests = [{"function": call[0], "args": call[1], "expected": expected}]
    assert graded(code, tests, program).reward == reward


NODE = 'from dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n    left: "Node" = None\n'
THREAD = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(3))).start()"


@pytest.mark.parametrize(
    "program",
    [
        "print(3)\nexit()",
        "print(3)\nquit(0)",
        THREAD,
        "import atexit\n@atexit.register\ndef said(): print(3)",
        "import sys\nsys.__stdout__.write('3')",
        "import sys\nprint(3)\nsys.stdout.close()",
        "import __main__\nprint(__main__.__name__ == '__main__' and 3)",
        NODE + "print(Node(3).value)",
        "import pickle\nclass A: v = 3\nprint(pickle.loads(pickle.dumps(A())).v)",
    ],
)
def test_a_script_runs_and_ends_as_under_python(code: Code, program: str) -> None:
    assert graded(code, [{"input": "", "output": "3"}], program).reward == 1


@pytest.mark.parametrize("end", ["exit(1)", "import atexit, sys\natexit.register(sys.stdout.close)\nquit('no')", "1/0"])
def test_a_script_that_ends_with_an_error_is_wrong(code: Code, end: str) -> None:
    assert graded(code, [{"input": "", "output": "3"}], f"print(3)\n{end}").reward == 0


def test_functions_may_need_the_module_that_they_are_in(code: Code) -> None:
    program = f"from __future__ import annotations\nimport pickle\n{NODE}def f(): return pickle.loads(pickle.dumps(Node(3))).value"
    assert graded(code, [{"function": "f", "args": [], "expected": 3}], program).reward == 1


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1.0, float("inf"), False), (float("inf"), float("inf"), True), (float("-inf"), float("inf"), False), (float("inf"), 1.0, False),
        (float("nan"), float("nan"), True), (1.0, float("nan"), False), (float("nan"), 1.0, False), (10**400, 1.0, False), (10**400, float("inf"), False),
        (1000000.5, 1000001, False), (1000000, 1000001.0, False), (123456700000.5, 123456789012, False), (3.0000000001, 3, True), (1000001.0, 1000001, True),
        (1000000.5, 1000000.9, True), (2.5, 2.6, False), (True, 1, False), (1, True, False), ((1, [2]), [1, (2,)], True), ({1: 2}, {"1": 2}, True), ("1", 1, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected, 1e-6) is same


LIAR = """
class Liar:
    def __init__(s, *items): s.items, s.asked = list(items), 0
    def __contains__(s, x): return True
    def __len__(s):
        s.asked += 1
        return 3 if s.asked < 2 else 0
    def __iter__(s): return iter(s.items)
    def __getitem__(s, i): return i if i < len(s.items) else s.nothing()
    def nothing(s): raise IndexError
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__
    __bool__ = lambda s: True
    __hash__ = lambda s: 1
"""
STACK = "class Stack:\n    def __init__(s): s.i = []\n    def push(s, x): s.i.append(x)\n    def __len__(s): return len(s.i)\n    def __iter__(s): return iter(s.i)\n"


@pytest.mark.parametrize(
    ("tests", "program", "reward"),
    [
        ("assert f(100001) == list(range(100000))", "def f(n): return list(range(n))", 0),
        ("assert f(200000) == list(range(200000))", "def f(n): return range(n)", 1),
        ("import math\nassert f(2000) == math.factorial(2000)", "import math\ndef f(n): return math.factorial(n)", 1),
        ("import math\nassert f(2000) == math.factorial(2000)", "import math\ndef f(n): return math.factorial(n) + 1", 0),
        ("assert f(3 ** 9999) == 3 ** 10000", "def f(n): return n * 3", 1),
        ("assert len(f(6_000_000)) == 6_000_000", "def f(n): return 'x' * n", 1),
        ("from decimal import Decimal\nassert f() == Decimal('1e30')", "from decimal import Decimal\ndef f(): return Decimal('1e30')", 1),
        ("assert 7 in f()", LIAR + "def f(): return Liar(1, 2)", 0),
        ("assert 2 in f()", LIAR + "def f(): return Liar(1, 2)", 1),
        ("r = f()\nassert len(r) == 3\nassert all(x > 9 for x in r)", LIAR + "def f(): return Liar(1, 2, 3)", 0),
        ("r = f()\nassert len(r) == 3\nassert all(r[i] > 9 for i in range(len(r)))", LIAR + "def f(): return Liar(1, 2, 3)", 0),
        ("assert f()", LIAR + "def f(): return Liar()", 0),
        ("assert f() == 1", LIAR + "def f(): return Liar()", 0),
        ("assert f() >= 1", LIAR + "def f(): return Liar()", 0),
        ("assert f() in {1: 2}", LIAR + "def f(): return Liar()", 0),
        ("assert sorted(f()) == [1, 2]", LIAR + "def f(): return [Liar(), Liar()]", 0),
        ("s = Stack()\nassert len(s) == 0\ns.push(4)\nassert len(s) == 1 and 4 in s and list(s) == [4] and s[0] == 4", STACK, 1),
        ("assert f(FIVE) == FIVE + 1 and NAMES == ['a']", "FIVE, NAMES = 5, ['a']\ndef f(n): return n + 1", 1),
        ("assert all(map(f, [1, 2]))", "def f(n): raise StopIteration", 0),
        ("assert list(map(f, [1, 2])) == []", "def f(n): raise StopIteration", 0),
        ("assert list(map(f, [1, 2])) == []", "class S(StopIteration): pass\ndef f(n): raise S", 0),
        ("def g():\n    yield f(1)\nassert list(g()) == []", "def f(n): raise GeneratorExit", 0),
        ("try:\n    f()\n    assert False\nexcept Exception:\n    pass", "def f(): raise KeyboardInterrupt", 0),
        ("try:\n    f()\n    assert False\nexcept Exception:\n    pass", "class B(BaseException): pass\ndef f(): raise B", 0),
        ("try:\n    f()\n    assert False\nexcept Exception:\n    pass", "import os\ndef f(): os._exit(0)", 0),
        ("try:\n    f()\nexcept:\n    pass\nassert 1 == 1", "import os\ndef f(): os._exit(0)", 0),
        ("try:\n    f()\n    assert False\nexcept SystemExit:\n    pass", "def f(): raise SystemExit(2)", 1),
        ("try:\n    f()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no' and e.args == ('no',)", "class E(ValueError): pass\ndef f(): raise E('no')", 1),
        ("try:\n    f()\n    assert False\nexcept UnicodeError:\n    pass", "def f(): '\\ud800'.encode()", 1),
        ("try:\n    f()\n    assert False\nexcept ValueError:\n    pass", "def f(): raise type('ValueError', (Exception,), {})", 0),
        ("import sys\nprint(f())\nprint('{\"passed\": 1, \"lost\": false}', file=sys.stderr)\nassert f() == 1", "def f(): return 1", 1),
        ("import sys\nif f() != 1: sys.exit(0)\nassert f() == 1", "def f(): return 2", 0),
        ("assert len(str(f())) == 1", "import builtins\nbuiltins.len = builtins.str = lambda x: 1\ndef f(): return 22", 0),
        ("assert g() == 1\nassert f() == 1", "def f(): return 1", 0),
    ],
)  # fmt: skip
def test_tests_as_code_see_plain_values_alone(code: Code, tests: str, program: str, reward: float) -> None:
    grade = graded(code, tests, program)
    assert grade.reward == reward, grade


def test_a_script_may_print_as_much_as_is_expected() -> None:
    with built(output_kib=1) as verifier:
        tests = [{"input": "", "output": "x" * 5000}]
        assert graded(verifier, tests, "print('x' * 5000)").reward == 1
        assert graded(verifier, tests, "print('x' * 50000)").metrics["hit_limit"] == 1


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([{"function": "f", "args": [object()], "expected": 1}], "cannot be sent"),
        ([{"function": "f", "args": [], "expected": "x" * (1 << 23)}], "the most are"),
        ([{"function": "f", "args": [], "kwargs": [1], "expected": 1}], "a test needs function"),
        ({"inputs": [], "outputs": []}, "there are none"),
        ({"inputs": [], "outputs": [], "fn_name": "f"}, "there are none"),
        ("[" * 100_000, "they look like JSON and are not"),
        ("assert " + "-" * 100_000 + "x", "they are not Python"),
    ],
)
def test_values_that_no_test_can_have_are_refused(tests: object, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        read_tests(tests)
    assert len(str(error.value)) < 1000


def test_long_whole_numbers_in_json() -> None:
    value = 3**20_000
    sys.set_int_max_str_digits(0)
    try:
        text = f'[{{"function": "f", "args": null, "kwargs": null, "expected": -{value}}}]'
    finally:
        sys.set_int_max_str_digits(4300)
    assert read_tests(text) == read_tests([{"function": "f", "expected": -value}])


def test_installed_packages_cannot_be_imported() -> None:
    """Neither those of this environment nor those of the interpreter that it was made from, nor the system's or the user's.

    The program reads every folder of the machine that it may see, which takes long where their names are not in memory.
    """
    program = """
import os, sys
def f():
    found = [path for top in ('/lib', '/usr', '/opt', '/home', '/root', sys.base_prefix) for path, _, names in os.walk(top)
             if path.endswith(('site-packages', 'dist-packages')) and os.listdir(path)]
    sys.path += found
    try:
        import pip
    except ImportError:
        return found
"""
    with built(cpu_seconds=120, wall_seconds=240) as code:
        grade = graded(code, [{"function": "f", "args": [], "expected": []}], program)
    assert grade.reward == 1, grade


WORK = "def f():\n    end = time.thread_time() + SECONDS\n    while time.thread_time() < end: pass\n    return 1\n"


def worker_and_zygote(verifier: Code) -> list[int]:
    return [p.pid for pid in verifier.pool.pids for p in (psutil.Process(pid), *psutil.Process(pid).children())]


@contextmanager
def crowded(verifier: Code, rivals: int = 8) -> Iterator[None]:
    """Let all that the verifier starts share one processor with processes that never rest."""
    place = min(os.sched_getaffinity(0))
    for pid in worker_and_zygote(verifier):
        os.sched_setaffinity(pid, {place})
    loop = f"import os\nos.sched_setaffinity(0, {{{place}}})\nwhile os.getppid() == {os.getpid()}: sum(range(99999))"
    started = [subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in range(rivals)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a processor"
)
@pytest.mark.parametrize(("form", "seconds"), [("calls", 0.3), ("asserts", 0.15), ("scripts", 0.15)])
def test_a_busy_machine_makes_no_right_program_wrong_and_no_sleeping_one_unscored(form: str, seconds: float) -> None:
    tests, last = FORMS[form]
    right = "import time\n" + WORK.replace("SECONDS", str(seconds)) + last
    with built() as verifier:
        assert graded(verifier, tests, right).reward == 1
        with crowded(verifier):
            assert graded(verifier, tests, right).reward == 1
            assert graded(verifier, tests, "import time\ndef f(): time.sleep(600)" + last).reward == 0


def test_an_endless_loop_on_a_busy_machine_is_wrong() -> None:
    with built(cpu_seconds=2, wall_seconds=4) as verifier, crowded(verifier, 1):
        grade = graded(verifier, FORMS["calls"][0], "def f():\n" + SPIN)
        assert (grade.reward, grade.metrics["hit_limit"]) == (0, 1)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with little memory, where one may be made."""
    for top in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        folder, names = top / f"lockstep-test-{uuid.uuid4().hex}", ("memory.limit_in_bytes", "memory.max")
        try:
            folder.mkdir()
            limit = next(folder / name for name in names if (folder / name).exists())
            limit.write_text(str(192 << 20))
        except (OSError, StopIteration):
            with suppress(OSError):
                folder.rmdir()
            continue
        yield folder
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)  # they have been killed
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_program_that_is_killed_because_the_machine_has_no_memory_is_unscored(small_memory: Path) -> None:
    with built(memory_mib=2048, wall_seconds=20, cpu_seconds=20) as verifier:
        for pid in worker_and_zygote(verifier):
            (small_memory / "cgroup.procs").write_text(str(pid))
        grade = graded(verifier, FORMS["calls"][0], "def f(): return len(bytearray(b'x') * (1 << 30)) >> 30")
        assert grade.reward is None, grade
        assert "the machine has too little memory" in (grade.error or "")
