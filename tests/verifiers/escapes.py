# ruff: noqa: E501
"""Programs that try to get out of the sandbox, to bring it down, or to be paid without an answer.

Each defines attempt(), which says "escaped" if what it tries works; that is what its test asks for, so being paid is an escape.
MARK stands for a name that no file has, PORT for a port on which the tests listen, PID for the tests' process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Escape:
    name: str
    code: str
    limit: bool = False
    """It is stopped by a limit."""


def _try(body: str, imports: str = "os, sys, socket, ctypes, time, threading, signal, gc") -> str:
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    return f"import {imports}\ndef attempt():\n    try:\n{lines}\n    except OSError:\n        return 'contained'\n    return 'escaped'\n"


def _quiet(body: str) -> str:
    """For what raises other things than OSError."""
    return _try(body).replace("except OSError", "except BaseException")


ESCAPES = (
    # Processes.
    Escape("fork bomb", _try("for _ in range(10000): os.fork()")),
    Escape("fork by C", _try("if ctypes.CDLL(None).fork() < 0: raise OSError")),
    Escape(
        "vfork and clone by number",
        _try(
            "L = ctypes.CDLL(None)\nif all(L.syscall(n, 17, 0, 0, 0, 0) < 0 for n in (56, 57, 58, 435)): raise OSError"
        ),
    ),
    Escape("a shell", _try("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)")),
    Escape("exec", _try("os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])")),
    Escape(
        "daemon", _try("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)")
    ),
    Escape(
        "multiprocessing",
        _try("import multiprocessing\np = multiprocessing.Process(target=print)\np.start()\np.join()"),
    ),
    Escape(
        "thread bomb",
        _quiet("for _ in range(5000): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"),
    ),
    Escape("signal to the tests", _try("os.kill(PID, signal.SIGKILL)")),
    Escape("signal to all", _try("os.kill(-1, signal.SIGKILL)")),
    Escape("signal to the group", _try("os.killpg(0, signal.SIGTERM)")),
    Escape("ptrace", _try("if ctypes.CDLL(None).ptrace(16, PID, 0, 0) < 0: raise OSError")),
    Escape("another's memory", _try("open('/proc/PID/mem', 'rb').read(1)")),
    Escape("the parent's environment", _try("open('/proc/1/environ').read()\nopen('/proc/PID/environ').read()")),
    Escape("its own /proc", _try("open('/proc/self/mem', 'r+b')")),
    Escape("secrets in the environment", _try("if not [v for v in os.environ.values() if v]: raise OSError")),
    # Files.
    Escape("write to /", _try("open('/MARK', 'w').write('x')")),
    Escape("write to home", _try("open('/root/MARK', 'w').write('x')")),
    Escape("write beside the interpreter", _try("open(os.__file__ + '.MARK', 'w').write('x')")),
    Escape("symlink out", _try("os.symlink('/etc/passwd', 'MARK')\nopen('MARK').read()")),
    Escape("hard link", _try("os.link(os.__file__, 'MARK')")),
    Escape("up and out", _try("open('../' * 20 + 'etc/hostname').read()")),
    Escape("mount", _try("if ctypes.CDLL(None).mount(b'proc', b'/tmp', b'proc', 0, None) < 0: raise OSError")),
    Escape("chroot", _try("os.mkdir('x')\nos.chroot('x')")),
    Escape("unshare", _try("if ctypes.CDLL(None).unshare(0x10000000) < 0: raise OSError")),
    Escape("become root", _try("os.setuid(0)")),
    Escape(
        "raise a limit",
        _try(
            "import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU, (900, 900))\nexcept ValueError: raise OSError"
        ),
    ),
    Escape("huge file", _try("with open('big', 'wb') as f:\n    for _ in range(1000): f.write(bytes(1 << 20))")),
    Escape("many files", _try("for i in range(100000): open(f'f{i}', 'w').close()")),
    Escape("sparse file", _try("os.truncate(os.open('s', os.O_CREAT | os.O_RDWR), 1 << 40)")),
    Escape("descriptors", _try("kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(100000)]")),
    Escape(
        "zip bomb",
        _quiet(
            "import zlib\nzlib.decompress(zlib.compress(bytes(1 << 24)) and b'')\nx = [zlib.decompress(zlib.compress(bytes(1 << 24))) for _ in range(64)]"
        ),
    ),
    # Network.
    Escape("connect", _try("socket.create_connection(('127.0.0.1', PORT), 1)")),
    Escape("bind", _try("socket.socket().bind(('127.0.0.1', 0))")),
    Escape("abstract socket", _try("socket.socket(socket.AF_UNIX).bind(b'\\0MARK')")),
    Escape(
        "raw socket call",
        _try(
            "if ctypes.CDLL(None).syscall(41, 2, 1, 0) < 0 and ctypes.CDLL(None).syscall(425, 8, 0) < 0: raise OSError"
        ),
    ),
    # Bombs.
    Escape("memory", _quiet("x = bytearray(10 << 30)")),
    Escape("memory bit by bit", _quiet("x = []\nwhile True: x.append(bytearray(1 << 22))")),
    Escape("memory in a file of memory", _try("for _ in range(50): os.truncate(os.memfd_create('m'), 1 << 30)")),
    Escape("endless loop", "def attempt():\n    while True: pass\n", limit=True),
    Escape(
        "endless loop that catches",
        "def attempt():\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n",
        limit=True,
    ),
    Escape("endless loop at import", "while True: pass\n", limit=True),
    Escape(
        "endless loop in C",
        "import re\ndef attempt():\n    re.match('(a+)+$', 'a' * 64 + 'b')\n    return 'escaped'\n",
        limit=True,
    ),
    Escape("sleep", "import time\ndef attempt():\n    time.sleep(600)\n    return 'escaped'\n", limit=True),
    Escape("deadlock", "import threading\nl = threading.Lock()\nl.acquire()\ndef attempt(): l.acquire()\n", limit=True),
    Escape("large number", "def attempt(): return str(9 ** 9 ** 9)\n", limit=True),
    Escape("recursion", _quiet("f = lambda f: f(f)\nf(f)")),
    Escape(
        "recursion without a limit",
        "import sys\nsys.setrecursionlimit(10**9)\ndef attempt():\n    class A:\n        def __repr__(s): return repr([s])\n    return repr(A()) and 'escaped'\n",
    ),
    Escape("segmentation fault", "import ctypes\ndef attempt():\n    ctypes.string_at(0)\n    return 'escaped'\n"),
    Escape("abort", "import os\ndef attempt(): os.abort()\n"),
    Escape("deep nesting for the parser", "(" * 30000 + ")" * 30000),
    Escape("deep nesting for the compiler", "attempt = " + "-" * 100000 + "1"),
    Escape("a deep answer", "def attempt():\n    x = []\n    for _ in range(100000): x = [x]\n    return x\n"),
    Escape("a long answer", "def attempt(): return 'x' * (1 << 26)\n"),
    Escape(
        "an endless answer", "import itertools\ndef attempt(): return (str(i) * 100_000 for i in itertools.count(10))\n"
    ),
    Escape("keys with one hash", "def attempt(): return {n * (2**61 - 1): 0 for n in range(1, 3000)}\n"),
    Escape(
        "a pickle bomb", "class P:\n    def __reduce__(self): return (print, ('escaped',))\ndef attempt(): return P()\n"
    ),
    Escape("closes its pipes", "import os, time\ndef attempt():\n    os.closerange(3, 64)\n    time.sleep(600)\n"),
    Escape("stray surrogates and nulls", "def attempt(): return '\\ud800\\x00'\n"),
    Escape("a null in the source", "x = 1\x00\ndef attempt(): return 'escaped'\n"),
    # The way out by the front door.
    Escape("exit 0", "import sys\nsys.exit(0)\n"),
    Escape("_exit 0", "import os\nos._exit(0)\n"),
    Escape("exit when called", "import os\ndef attempt(): os._exit(0)\n"),
    Escape("a BaseException", "def attempt(): raise KeyboardInterrupt\n"),
    Escape(
        "an exception that raises",
        "class E(Exception):\n    def __str__(s): raise SystemExit\ndef attempt(): raise E\n",
    ),
    Escape("atexit", "import atexit, os\natexit.register(lambda: os._exit(0))\nraise ValueError\n"),
    Escape("import lockstep", _try("try: import lockstep, pydantic\nexcept ImportError: raise OSError")),
    Escape(
        "lockstep by gc",
        "import gc\ndef attempt():\n    text = [s for o in gc.get_objects() if isinstance(o, dict) for s in o.values() if isinstance(s, str)]\n    return next((s for s in text if 'esca' + 'ped' == s), 'none')\n",
    ),
    Escape(
        "lockstep by frames",
        "import sys\ndef attempt():\n    f = sys._getframe()\n    while f.f_back:\n        f = f.f_back\n        for v in list(f.f_locals.values()):\n            if isinstance(v, dict) and 'expected' in v: return v['expected']\n    return 'none'\n",
    ),
)

ASSERTED = ("assert attempt(3) == 9", "assert abs(attempt(4) - 16) < 1e-6", "assert attempt(5)")
E_TRUE = (
    "class E:\n    def __eq__(s, o): return True\n    def __bool__(s): return True\n    def __sub__(s, o): return 0\n"
)
CHEATS = {
    "closes its pipes": "import os, time\ndef attempt(n):\n    os.closerange(3, 64)\n    time.sleep(600)\n",
    "equals everything": E_TRUE + "    __ne__ = __lt__ = __gt__ = __abs__ = __eq__\ndef attempt(n): return E()",
    "a number that equals everything": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef attempt(n): return I(3)",
    "patched abs": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = Warning\ndef attempt(n): return 9",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"ok\": 9}'\ndef attempt(n): return 0",
    "says that it passed": 'import os\ndef attempt(n):\n    for f in range(1, 12):\n        try: os.write(f, b\'{"passed": 3, "first": ""}\\n\')\n'
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
