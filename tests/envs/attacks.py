"""A program that does what a model could tell it to do, and prints what came of it. It knows only the standard library.

Arguments: facts of the machine as JSON, and names of what to try.
"""

import ctypes
import json
import multiprocessing
import os
import pathlib
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Callable

facts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)


def read(path: str) -> str:
    return pathlib.Path(path).read_text()


def write(path: str) -> str:
    with pathlib.Path(path).open("a") as file:
        file.write("")
    return "written"


def connect(port: int, host: str = "127.0.0.1") -> str:
    with socket.create_connection((host, port), 5) as connection:
        return connection.recv(99).decode()


def abstract() -> str:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"\0{facts['abstract']}")
    return "connected"


def forks() -> int:
    """Start processes that stay until there can be no more."""
    made = 0
    try:
        while made < 2000:
            if os.fork() == 0:
                time.sleep(1000)
            made += 1
    except BlockingIOError:
        pass
    return made


def left_behind() -> str:
    """Start a process in a session of its own that outlives this one, and holds its output."""
    code = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code, facts["mark"]], check=True)
    return "started"


def memory() -> int:
    return len(bytearray(facts["memory"] * 4))


def files() -> int:
    """Write many files, each smaller than the limit."""
    written = 0
    for number in range(8):
        written += pathlib.Path(f"part{number}").write_bytes(bytes(facts["file"] // 4))
    return written


def number(name: str, *arguments: object) -> int:
    return int(getattr(libc, name)(*arguments))


def kill_first() -> str:
    os.kill(1, 9)
    time.sleep(0.2)
    return "still here"


def lock() -> bool:
    """Use a semaphore of /dev/shm, from two processes."""
    one = multiprocessing.get_context("fork").Lock()
    process = multiprocessing.get_context("fork").Process(target=one.acquire)
    process.start()
    process.join()
    return not one.acquire(block=False)


ATTACKS: dict[str, Callable[[], object]] = {
    "secret in /tmp": lambda: read(facts["secret"]),
    "neighbour": lambda: read(facts["neighbour"]),
    "home": lambda: sorted(path.name for path in pathlib.Path(facts["home"]).iterdir()),
    "shadow": lambda: pathlib.Path("/etc/shadow").exists(),
    "environment": lambda: sorted(os.environ),
    "first's environment": lambda: read("/proc/1/environ"),
    "first's memory": lambda: write("/proc/1/mem"),
    "processes": lambda: sum(path.name.isdecimal() for path in pathlib.Path("/proc").iterdir()),
    "write /": lambda: write("/escaped"),
    "write itself": lambda: write(__file__),
    "write readable": lambda: write(facts["readable"] + "/mine"),
    "read readable": lambda: read(facts["readable"] + "/mine"),
    "write python": lambda: write(os.path.realpath(sys.executable)),
    "write beside": lambda: write(facts["neighbour"]),
    "other port": lambda: connect(facts["other"]),
    "outside": lambda: connect(53, "8.8.8.8"),
    "outside by its address": lambda: connect(facts["other"], facts["address"]),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM).fileno(),
    "abstract socket": abstract,
    "unshare": lambda: number("unshare", 0x10000000),
    "clone apart": lambda: number(
        "syscall", 56 if os.uname().machine == "x86_64" else 220, 0x10000000 | 17, 0, 0, 0, 0
    ),
    "mount": lambda: number("mount", b"none", b"/", None, 32 | 4096, None),
    "root": lambda: os.setuid(0),
    "endpoint": lambda: connect(facts["port"]),
    "shell": lambda: subprocess.check_output(
        "id -un; hostname >/dev/null; echo $((20 + 3))", shell=True, text=True
    ).split(),
    "user": lambda: pwd.getpwuid(os.getuid()).pw_name,
    "terminal": lambda: os.ttyname(os.openpty()[1]).startswith("/dev/pts/"),
    "own folder": lambda: [write("a.txt"), write(os.environ["TMPDIR"] + "/b.txt"), write("/tmp/c.txt")],
    "lock": lock,
    "stdout": lambda: write("/dev/stdout"),
    "memory": memory,
    "files": files,
    "kill first": kill_first,
    "left behind": left_behind,
    "forks": forks,
    "hang": lambda: time.sleep(1000),
}

found: dict[str, object] = {}
for name in sys.argv[2:]:
    try:
        found[name] = ATTACKS[name]()
    except (OSError, MemoryError, KeyError) as error:
        found[name] = f"{type(error).__name__}"
print(json.dumps(found), flush=True)
