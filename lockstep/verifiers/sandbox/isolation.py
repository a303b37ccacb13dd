"""Isolates a process before it runs an untrusted program: Linux namespaces, its own root folder and user, and limits.

Two ways, chosen at run time. Root makes the namespaces as root and the program runs as a user number that no other process has;
any other user makes a user namespace first. Everything here is called in bare processes with one thread (see zygote.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.verifiers.sandbox import seccomp

_libc = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT = {8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags that a mount may be locked with, as statvfs gives them, and as mount takes them."""
_DETACH = 2
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(platform.machine(), (-1, -1))
_FIRST_UID = 1_700_000_000
"""User numbers from here on belong to no user; a sandbox takes this plus its process number."""
USERS, FILES, NETWORK, PROCESSES = "own user", "own file system", "no network", "own process table"
"""Measures that enter may put in force."""
WORK = "/tmp"
"""The program's folder, as a rule (see work)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program."""

    cpu_seconds: int
    memory: int
    """Bytes beyond what its process has at the start."""
    file_bytes: int
    """Most bytes in one file, and in all files together."""
    threads: int
    files: int = 64
    """Open at once."""


def call(name: str, *arguments: object) -> None:
    """Call a function of libc that returns 0. Raises OSError."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def syscall(number: int, *arguments: object) -> None:
    """Raises OSError."""
    if number < 0 or _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno() or errno.ENOSYS
        raise OSError(code, f"system call {number}: {os.strerror(code)}")


def enter(apart: bool) -> tuple[list[str], list[str]]:
    """Isolate this process and what it forks. Returns the measures in force, and those that are missing and why.

    With `apart` = False nothing is tried.
    """
    done, missing = [], []
    for measure, name in ((users, USERS), (_files, FILES), (network, NETWORK), (_processes, PROCESSES)):
        try:
            if not apart:
                raise OSError(errno.ENOTSUP, "switched off")
            measure()
            done.append(name)
        except OSError as error:
            missing.append(f"{name}: {error.strerror}")
    return done, missing


def users() -> None:
    """Make a user namespace, unless this is root. Raises OSError."""
    if os.geteuid() == 0:
        return  # each program changes its user
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", _NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def network() -> None:
    """Leave the machine's network, shared memory and host name. Raises OSError."""
    call("unshare", _NEWNET | _NEWIPC | _NEWUTS)


def _processes() -> None:
    """Try it in a copy of this process: each program's is made later."""
    child = os.fork()
    if child == 0:
        os._exit(_libc.unshare(NEWPID | _NEWNS) and ctypes.get_errno())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise OSError(status, os.strerror(status))


def _files() -> None:
    """Make a root that holds the Python library and what it links to, read-only, and a few devices: no /proc, /sys, /etc.

    Folders of installed packages and of other programs are empty there, but for those on this process's module path.
    """
    shown = _shown()
    places = [place for place in ("/mnt", "/media", "/srv", "/tmp", "/run") if not _holds(place, shown)]
    base = next(place for place in places if Path(place).is_dir())
    begin_root(base)
    for path in shown:
        show(path, base)
    for path in _hidden(shown):
        mount("tmpfs", base + path, "size=4k,nr_inodes=1,mode=0755", _RDONLY | _NOSUID | _NODEV)
    for device in ("/dev/null", "/dev/urandom"):
        show(device, base)
    Path(base + work()).mkdir(parents=True, exist_ok=True)
    enter_root(base)


@cache
def work() -> str:
    """Return the program's folder: memory that goes with it. It covers no folder from which Python is still loaded."""
    shown = _shown()
    return next(place for place in (WORK, "/var/tmp", "/run", "/srv") if not _holds(place, shown))


def begin_root(base: str) -> None:
    """Mount an empty root at `base`, in a mount tree that no other process sees. Raises OSError."""
    call("unshare", _NEWNS)
    call("mount", b"none", b"/", None, _REC | _PRIVATE, None)
    mount("tmpfs", base, "size=1m,nr_inodes=4096,mode=0755")


def enter_root(base: str) -> None:
    """Make `base` the root, read-only, and let go of the old one. Raises OSError."""
    Path(base, "old").mkdir()
    os.chdir(base)
    syscall(_PIVOT_ROOT, b".", b"old")
    os.chdir("/")
    call("umount2", b"/old", _DETACH)
    Path("/old").rmdir()
    call("mount", b"none", b"/", None, _REMOUNT | BIND | _RDONLY | _NOSUID | _NODEV, None)


def _shown() -> list[str]:
    """List the folders that Python needs, without those that lie in another one."""
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
    found = [*libraries, f"{sys.base_prefix}/lib", *(path for path in sys.path if path)]
    return outermost(path for path in found if Path(path).is_dir())


def outermost(paths: Iterable[str]) -> list[str]:
    """Leave out paths within others."""
    real = sorted(set(paths), key=len)
    return [p for i, p in enumerate(real) if not any(p.startswith(q + "/") for q in real[:i])]


def _hidden(shown: Sequence[str]) -> list[str]:
    """List the folders in `shown` that hold neither Python's library nor what it links to: installed packages, other programs."""
    kept = [path for path in sys.path if path]
    tops = [Path(path) for path in shown if path not in kept and not Path(path).is_symlink()]
    found = [folder for top in tops for folder in top.iterdir() if "-linux-" not in folder.name]  # those hold libraries
    found += [Path(path, name) for path in kept for name in ("site-packages", "dist-packages")]
    needed = {str(parent) for path in kept for parent in (Path(path), *Path(path).parents)}
    return [str(f) for f in found if f.is_dir() and not f.is_symlink() and str(f) not in needed]


def _holds(place: str, shown: Sequence[str]) -> bool:
    return any(path == place or path.startswith(place + "/") for path in shown)


def show(path: str, base: str) -> None:
    """Make a file or folder of the machine, or a link itself, appear under `base`, read-only. Raises OSError."""
    source, target = Path(path), Path(base + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    call("mount", path.encode(), str(target).encode(), None, BIND | _REC, None)
    if source.is_char_device():
        return
    for mounted in _mounts(target):
        flags = os.statvfs(mounted).f_flag
        kept = sum(flag for seen, flag in _KEPT.items() if flags & seen)
        call("mount", b"none", str(mounted).encode(), None, _REMOUNT | BIND | _RDONLY | _NOSUID | _NODEV | kept, None)


def _mounts(top: Path) -> list[Path]:
    """List what is mounted at a folder or file, and below it."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    names = (re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines)
    points = [Path(os.fsdecode(name)) for name in names]
    return [point for point in points if point.is_relative_to(top) and point.exists()]  # others are mounted over


def mount(kind: str, place: str, options: str = "", flags: int = _NOSUID | _NODEV) -> None:
    """Mount a file system of the kernel's. Raises OSError."""
    call("mount", kind.encode(), place.encode(), kind.encode(), flags, options.encode())


def before_fork(in_force: Sequence[str], limits: Limits) -> bool:
    """Make the next process that the program's parent forks the first of a PID namespace, with an empty folder of its own.

    As far as `in_force` (of enter) allows. Returns if there is such a folder.
    """
    files = FILES in in_force
    if flags := (_NEWNS if files else 0) | (NEWPID if PROCESSES in in_force else 0):
        call("unshare", flags)
    if files:
        mount("tmpfs", work(), f"size={limits.file_bytes},nr_inodes=1024,mode=1777")
    return files


def give_up(limits: Limits, memory: int, uid: int | None, filter: bytes | None, keep: Sequence[int]) -> None:
    """Give up all that the program's process does not need. Raises OSError.

    `memory`: bytes that its process has at the start; `uid`: the user to become (root alone can); `filter`: of system calls;
    `keep`: descriptors that stay open beside 0 to 2.
    """
    os.setsid()
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.umask(0o077)
    os.environ.clear()
    _limit(limits, memory)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if _CAPSET >= 0:
        header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
        syscall(_CAPSET, header, ctypes.create_string_buffer(24))
    if filter is not None:
        seccomp.install(_libc, filter)
    else:
        call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)


def own_uid() -> int | None:
    """Return a user number that only this process has, if it is root."""
    return _FIRST_UID + os.getpid() if os.geteuid() == 0 else None


def held() -> int:
    """Return the bytes of address space of this process."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(limits: Limits, memory: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, memory + limits.memory),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_NPROC, limits.threads + 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
