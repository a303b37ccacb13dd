"""Runs one agent's program in a sandbox with its own process table and its own loopback network. envs/cells.py starts it.

The program sees only the machine's folders that it is given (read-only), and one folder in memory. It reaches the
outside through one loopback port: before the program starts, this process sends that port's listening socket to envs/cells.py
over the control socket.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what is needed in the sandbox, where this Python may not be, is loaded before
import fcntl
import json
import os
import platform
import select
import signal
import socket
import struct
import sys
import warnings  # noqa: F401 - for os.execvpe
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep.verifiers.sandbox import isolation, seccomp

HOME, TASK = f"{isolation.WORK}/work", f"{isolation.WORK}/task.json"
"""The program's folder, and a file with what it has on standard input."""
OWN = ("/", "/dev", "/etc", "/proc", "/tmp")
"""Folders that are the sandbox's own."""
DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_SET_FLAGS, _UP = 0x8914, 0x41
_PDEATHSIG, _NOSUID, _NOEXEC = 1, 2, 8
_INODES = 65536
NOT_STARTED = 127


def main(root: str, number: int) -> NoReturn:
    """Run the program that the owner names on the socket with this number, until it ends or the owner closes the socket.

    Ends with the program's status, 128 and the number of the signal that ended it. `root`: as in zygote.main.
    """
    control = socket.socket(fileno=number)
    with control.makefile("rb") as said:
        hello = json.loads(said.readline())
    sys.path.remove(root)
    what = isolation.USERS
    try:
        isolation.users()
        what = isolation.NETWORK
        isolation.network()
        listener = _listen(hello["port"])
        what = isolation.PROCESSES
        isolation.call("unshare", isolation.NEWPID)
        uid, pid = isolation.own_uid(), os.fork()
    except OSError as error:
        _give_up(control, what, error)
    if pid == 0:
        _first(hello, control, listener, uid)
    listener.close()
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(control, select.POLLIN)
    poll.poll()
    os.kill(pid, signal.SIGKILL)  # and with it its whole process table
    os._exit(_status(os.waitpid(pid, 0)[1]))


def _listen(port: int) -> socket.socket:
    """Switch the loopback on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return socket.create_server(("127.0.0.1", port), backlog=128)


def _give_up(control: socket.socket, what: str, error: OSError) -> NoReturn:
    control.sendall(json.dumps({"error": f"{what}: {error.strerror or error}"}).encode())
    os._exit(NOT_STARTED)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _first(hello: dict[str, Any], control: socket.socket, listener: socket.socket, uid: int | None) -> NoReturn:
    """Be the first process of the table: make the root, start the program, and collect those that end."""
    isolation.call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    limits, what = isolation.Limits(**hello["limits"]), isolation.FILES
    try:
        _root(hello["root"], hello["shown"], limits, uid if uid is not None else os.getuid(), os.getgid())
        for standard in (0, 1, 2):
            if uid is not None:
                os.fchown(standard, uid, uid)  # so that it can open /dev/stdout
        what = "a filter of system calls"
        if not seccomp.supported():
            raise OSError(f"none for {platform.machine()}")
        filter = seccomp.program(platform.machine(), agent=True)
        socket.send_fds(control, [b'{"up": true}'], [listener.fileno()])
        what, program = isolation.PROCESSES, os.fork()
    except OSError as error:
        _give_up(control, what, error)
    if program == 0:
        _program(hello, limits, uid, filter)
    control.close()
    listener.close()
    while True:
        ended, status = os.wait()
        if ended == program:
            os._exit(_status(status))


def _root(base: str, shown: Sequence[str], limits: isolation.Limits, uid: int, gid: int) -> None:
    """Make a root of the machine's folders in `shown`, a few devices, a process table, and memory for what the program writes."""
    os.umask(0o022)
    isolation.begin_root(base)
    for folder in ("dev/pts", "dev/shm", "etc", "proc", "tmp"):
        Path(base, folder).mkdir(parents=True)
    isolation.mount("tmpfs", f"{base}/tmp", f"size={limits.file_bytes},nr_inodes={_INODES},mode=1777")
    isolation.call("mount", f"{base}/tmp".encode(), f"{base}/dev/shm".encode(), None, isolation.BIND, None)
    isolation.mount("proc", f"{base}/proc")
    isolation.mount("devpts", f"{base}/dev/pts", "newinstance,ptmxmode=0666,mode=0620", _NOSUID | _NOEXEC)
    names = {"passwd": f"agent:x:{uid}:{gid}:agent:{HOME}:/bin/sh\n", "group": f"agent:x:{gid}:\n"}
    for name, text in {**names, "hosts": "127.0.0.1 localhost\n::1 localhost\n"}.items():
        Path(base, "etc", name).write_text(text)
    for path in [*(f"/dev/{name}" for name in DEVICES), *shown]:
        isolation.show(path, base)
    for name, target in _LINKS.items():
        Path(base, "dev", name).symlink_to(target)
    isolation.enter_root(base)
    Path(HOME).mkdir()
    Path(TASK).write_bytes(os.pread(0, os.fstat(0).st_size, 0))
    if os.geteuid() == 0:
        os.chown(HOME, uid, uid)


def _program(hello: dict[str, Any], limits: isolation.Limits, uid: int | None, filter: bytes) -> NoReturn:
    """Become the program; without a command, try what it must not be able to do."""
    try:
        os.chdir(HOME)
        isolation.give_up(limits, 0, uid, filter, ())
        if hello["command"]:
            os.execvpe(hello["command"][0], hello["command"], hello["env"])
        os.write(1, json.dumps(tried(hello["wanted"], hello["other_port"])).encode())
        os._exit(0)
    except Exception as error:
        os.write(2, f"it cannot be started in the sandbox: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def tried(wanted: Sequence[str], port: int) -> list[str]:
    """Try the measures from within. Lists what does not hold, and which of the `wanted` paths cannot be read."""
    wrong = [f"the program cannot read {path}" for path in wanted if not os.access(path, os.R_OK)]
    if any(name.isdecimal() and int(name) > 2 for name in os.listdir("/proc")):  # noqa: PTH208
        wrong.append("the program sees other processes")
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        wrong.append("the program reaches a port of the machine")
    except OSError:
        pass
    try:
        os.close(os.open("/probe", os.O_CREAT | os.O_WRONLY))
        wrong.append("the program can write outside its folder")
    except OSError:
        pass
    return wrong


def command(root: Path, number: int) -> list[str]:
    """Start this with the package under `root`, as zygote.command does."""
    path = repr(str(root))
    code = f"import sys; sys.path.insert(0, {path}); from {__name__} import main; main({path}, {number})"
    return [sys.executable, "-I", "-S", "-c", code]
