"""Starts and stops programs in sandboxes: the folders that a program sees, and the one port through which it reaches the run."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import lockstep
from lockstep.errors import TaskError
from lockstep.verifiers.sandbox import cell
from lockstep.verifiers.sandbox.isolation import Limits, outermost

START_SECONDS = 60.0
MOST_CONNECTIONS = 64
"""Connections that a program may have open at once."""
_ROOT = Path(lockstep.__file__).parents[1]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "alternatives bash.bashrc ca-certificates debian_version fonts inputrc ld.so.cache ld.so.conf ld.so.conf.d locale.alias "
    "localtime magic mime.types nsswitch.conf os-release pki/tls/certs profile protocols services shells ssl/certs "
    "ssl/openssl.cnf terminfo timezone"
)
"""Those of /etc that hold nothing secret."""


@dataclass(frozen=True, slots=True)
class Files:
    """Open files for a program's input, output and errors."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


class Running:
    """A program in a sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, listener: socket.socket) -> None:
        self._process, self._control, self._listener = process, control, listener

    def wait(self, seconds: float, take: Callable[[socket.socket], None]) -> int | None:
        """Give its connections to `take` until it ends. Returns its status; None if it still runs after this time."""
        until = time.monotonic() + seconds
        held: list[socket.socket] = []
        with ExitStack() as opened:
            ended = os.pidfd_open(self._process.pid)
            opened.callback(os.close, ended)
            poll = select.poll()
            for descriptor in (ended, self._listener.fileno()):
                poll.register(descriptor, select.POLLIN)
            while (left := until - time.monotonic()) > 0:
                ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
                if ended in ready:
                    return self._process.wait()
                if ready:
                    connection, _ = self._listener.accept()
                    held = [*(one for one in held if one.fileno() >= 0), connection]
                    if len(held) > MOST_CONNECTIONS:
                        held.pop().close()
                    else:
                        take(connection)
        return None

    def end(self) -> None:
        """End it with all that it started, from any thread; `close` waits for that."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and wait until nothing of it runs."""
        self.end()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._listener.close()


class Cells:
    """Starts a command in sandboxes, each with a root, a process table and a loopback of its own."""

    def __init__(self, command: Sequence[str], readable: Sequence[str], limits: Limits) -> None:
        """Try a sandbox. Raises TaskError if it lacks a measure here, or if the command or a path cannot be read in it."""
        self._limits = limits
        self._wanted = [str(Path(path).expanduser().absolute()) for path in readable]
        if missing := [path for path in self._wanted if not Path(path).exists()]:
            raise TaskError(f"the path {missing[0]} does not exist", where="task.readable", fix="correct the path")
        program = str(Path(shutil.which(command[0]) or command[0]).absolute())
        self._wanted += [
            program,
            *(part for part in command[1:] if part.startswith("/") and part not in cell.OWN and Path(part).exists()),
        ]
        system = [path for path in (*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS.split())) if Path(path).exists()]
        own = [hop for path in (*self._wanted, *_pythons(program)) for hop in _links(path)]
        if taken := [path for path in own if path in cell.OWN]:
            raise TaskError(
                f"{taken[0]} cannot be shown to programs: the sandbox makes a folder of this name itself",
                where="task.readable",
                fix="list the files and folders inside it that programs need",
            )
        self._shown = outermost((*system, *own))
        self._try()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], port: int, files: Files, folder: Path, other_port: int = 0
    ) -> Running:
        """Start it; its loopback has this port. `folder`: one that is empty, for the making of its root. Raises OSError."""
        hello = {
            "command": command,
            "env": env,
            "port": port,
            "root": str(folder.resolve()),
            "shown": self._shown,
            "wanted": self._wanted,
            "other_port": other_port,
            "limits": asdict(self._limits),
        }
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                cell.command(_ROOT, theirs.fileno()), stdin=files.stdin, stdout=files.stdout, stderr=files.stderr,
                env={}, cwd="/", pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        said = b""
        passed: list[int] = []
        ours.settimeout(START_SECONDS)
        with suppress(OSError):
            ours.sendall(json.dumps(hello).encode() + b"\n")
            said, passed, _, _ = socket.recv_fds(ours, 1 << 16, 1)
        if not passed:
            ours.close()
            process.kill()
            process.wait()
            why = json.loads(said)["error"] if said else "it ended while it was prepared"
            raise OSError(f"the sandbox did not start: {why}")
        return Running(process, ours, socket.socket(fileno=passed[0]))

    def _try(self) -> None:
        with ExitStack() as opened:
            other = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-agent-")))
            stdin, stdout, stderr = (
                opened.enter_context((folder / name).open("w+b")) for name in ("input", "output", "log")
            )
            (folder / "root").mkdir()
            try:
                running = self.start(
                    (), {}, 0, Files(stdin, stdout, stderr), folder / "root", other.getsockname()[1]
                )  # fmt: skip
            except OSError as error:
                raise _refused(str(error)) from error
            opened.callback(running.close)
            status = running.wait(START_SECONDS, socket.socket.close)
            log = (folder / "log").read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
            if status != 0:
                raise _refused(f"a trial of the sandbox ended with status {status}: {log[-1][:300]}")
            wrong = json.loads((folder / "output").read_text())
        if wrong:
            fix = "let every user read the path (chmod a+rX): if root starts the run, programs run as another user"
            raise TaskError(f"the sandbox failed a check: {wrong[0]}", where="task.isolation", fix=fix)


def _refused(what: str) -> TaskError:
    fix = (
        "run as root or where user namespaces are allowed (docs/agents.md, Sandbox), or set task.isolation=none and run Lockstep "
        "in a container"
    )
    return TaskError(what, where="task.isolation", fix=fix)


def _links(path: str) -> Iterator[str]:
    """Yield a path, and what it links to as long as that is a link."""
    for _ in range(40):
        yield path
        if not Path(path).is_symlink():
            return
        path = os.path.normpath(Path(path).parent / Path(path).readlink())


def _pythons(program: str) -> Iterator[str]:
    """Yield the folders of the Python environment or installation that a program belongs to."""
    for top in {Path(hop).parents[1] for hop in _links(program)} - {Path("/")}:
        marker = top / "pyvenv.cfg"
        if marker.is_file():
            yield str(top)
            settings = dict(line.partition("=")[::2] for line in marker.read_text().splitlines())
            home = next((value.strip() for name, value in settings.items() if name.strip() == "home"), "")
            if home:
                yield str(Path(home).parent)
        elif any(top.glob("lib/python3*/os.py")):
            yield str(top)
