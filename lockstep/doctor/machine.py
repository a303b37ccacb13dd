"""Checks that need no torch and no recipe: processor, memory, disk, limits, clock, network, packages.

Each check is two functions: one measures, the other judges the result, so that the second can be tested on any machine.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import lockstep
from lockstep.doctor.check import Check, Checking
from lockstep.doctor.imports import PIP, version_of
from lockstep.memory import main_memory, read_group
from lockstep.models.cache import cache_root
from lockstep.track.files import existing

GIB = 2**30
OLDEST, NEWEST = (3, 11), (3, 13)
"""Versions of Python that Lockstep is tested with."""
LEAST_FILES, FEW_FILES = 256, 1024
LARGE_FILE = 64 * GIB
"""A limit on the size of files above this is none in practice."""
SLOW_DISK = 100e6
"""Bytes a second; below, saving is felt: 1.5 billion parameters with AdamW are 21 GB."""
PROBE_BYTES, PROBE_SECONDS, CHUNK = 64 * 2**20, 1.5, 4 * 2**20
SKEW_S = 2.0
SHARED = Path("/dev/shm")
PACKAGE = "lockstep-rl"
LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "size": resource.RLIMIT_FSIZE,
    "memory": resource.RLIMIT_AS,
    "processes": resource.RLIMIT_NPROC,
}


def machine_checks(
    folder: Path = Path("runs"), extras: tuple[str, ...] = (), threads: int | None = None, shared: bool = False
) -> list[tuple[str, Checking]]:
    """Return the checks by name, for runs in `folder`. `shared`: weights pass through /dev/shm."""
    return [
        ("python", check_python),
        ("packages", lambda: check_packages(extras)),
        ("compiler", check_compiler),
        ("threads", lambda: check_threads(threads)),
        ("load", check_load),
        ("memory", check_memory),
        ("shared memory", lambda: check_shared_memory(shared)),
        ("disk", lambda: check_disk(folder)),
        ("cache", check_cache),
        ("limits", check_limits),
        ("clock", lambda: check_clock(folder)),
        ("loopback", check_loopback),
    ]


# --- Python and packages --------------------------------------------------------------------------------------------
def check_python() -> Check:
    return judge_python(sys.version_info[:2], sys.version.split()[0])


def judge_python(version: tuple[int, int], text: str) -> Check:
    if version < OLDEST:
        return Check("python", "fail", text, f"use Python {OLDEST[0]}.{OLDEST[1]} or newer")
    if version > NEWEST:
        return Check(
            "python", "warn", f"{text}, newer than tested", f"Python {NEWEST[0]}.{NEWEST[1]} is the newest tested"
        )
    return Check("python", "ok", text)


def check_packages(extras: tuple[str, ...] = ()) -> Check:
    """Check the installed packages against the ranges that Lockstep declares, those of the named extras included."""
    try:
        declared = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return Check(
            "packages", "warn", f"{PACKAGE} is not installed, so its ranges are not known", f"{PIP} install -e ."
        )
    installed = {name: version_of(name) for name in {Requirement(line).name for line in declared}}
    return judge_packages(declared, installed, extras)


def judge_packages(declared: list[str], installed: Mapping[str, str | None], extras: tuple[str, ...] = ()) -> Check:
    """`declared`: lines as in a package's metadata; `installed`: versions by name, None for what is not there."""
    wrong: list[str] = []
    pins: list[str] = []
    count = 0
    for requirement in map(Requirement, declared):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        count += 1
        found = installed.get(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            have = "not installed" if found is None else f"{found}, not {requirement.specifier}"
            wrong.append(f"{requirement.name} ({have})")
            requirement.marker = None  # pip is given the package and its versions alone
            pins.append(f"'{requirement}'")
    if wrong:
        return Check("packages", "fail", ", ".join(wrong), f"{PIP} install {' '.join(pins)}")
    return Check("packages", "ok", f"all {count} within their ranges")


def check_compiler() -> Check:
    """Check that the compiler named by CC is there: Triton and packages that come as sources take it."""
    named = os.environ.get("CC", "").split()[:1]
    if named and shutil.which(named[0]) is None:
        return Check("compiler", "warn", f"CC = {named[0]}, which is not there", "unset CC")
    return Check("compiler", "ok", f"CC = {named[0]}" if named else "CC is not set")


# --- processor ------------------------------------------------------------------------------------------------------
def check_threads(wanted: int | None = None) -> Check:
    """`wanted`: threads that a recipe names."""
    return judge_threads(os.cpu_count() or 1, usable_cores(), os.environ.get("OMP_NUM_THREADS"), wanted)


def judge_threads(visible: int, usable: int, omp: str | None, wanted: int | None = None) -> Check:
    """`visible` cores are those that a library counts, `usable` those that this process may use at a time."""
    cores = f"{usable} cores" if usable == visible else f"{usable} of {visible} cores may be used"
    fix = f"export OMP_NUM_THREADS={usable}"
    if wanted is not None:
        if wanted > usable:
            return Check("threads", "warn", f"{cores}, and the recipe takes {wanted} threads", f"set threads={usable}")
        return Check("threads", "ok", f"{cores}, {wanted} threads by the recipe")
    if omp:
        first = omp.split(",")[0].strip()
        if not first.isdecimal() or not int(first):
            return Check("threads", "warn", f"OMP_NUM_THREADS = {omp!r} is not a number of threads", fix)
        if int(first) > usable:
            return Check("threads", "warn", f"{cores}, and OMP_NUM_THREADS = {omp}: threads wait for each other", fix)
        return Check("threads", "ok", f"{cores}, {first} threads by OMP_NUM_THREADS")
    if visible > usable:
        return Check("threads", "warn", f"{cores}, but libraries start a thread for each that they see", fix)
    return Check("threads", "ok", cores)


def check_load() -> Check:
    return judge_load(os.getloadavg()[0], usable_cores())


def judge_load(load: float, usable: int) -> Check:
    found = f"{load:.1f} processes computing on {usable} cores in the last minute"
    if load > 1.5 * usable:
        return Check("load", "warn", found, "something else uses this machine: `top` shows what")
    return Check("load", "ok", found)


def usable_cores() -> int:
    """Cores that this process may run on, and no more than its control group gives it time for."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that a control group allows, by version 2 or 1; None if it sets no limit."""
    words = read_group(root / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = read_group(root / "cpu/cpu.cfs_quota_us"), read_group(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


# --- memory ---------------------------------------------------------------------------------------------------------
def check_memory() -> Check:
    return judge_memory(*main_memory())


def judge_memory(total: float, free: float) -> Check:
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    fix = "end other processes, or give this one more memory"
    if free < GIB:
        return Check("memory", "fail", found, fix)
    return Check("memory", "warn" if free < 4 * GIB else "ok", found, fix if free < 4 * GIB else "")


def check_shared_memory(needed: bool = False) -> Check:
    """`needed`: a process of its own serves rollouts, to which weights pass through it."""
    free = float(shutil.disk_usage(SHARED).free) if SHARED.is_dir() else 0.0
    return judge_shared_memory(free, needed)


def judge_shared_memory(free: float, needed: bool) -> Check:
    found = f"/dev/shm has {free / GIB:.2f} GiB free"
    if free >= GIB:
        return Check("shared memory", "ok", found)
    fix = (
        "mount -o remount,size=8g /dev/shm  # as root; a container takes --shm-size=8g, or an emptyDir of medium Memory"
    )
    return Check("shared memory", "fail" if needed else "warn", found, fix)


# --- disk -----------------------------------------------------------------------------------------------------------
def check_disk(folder: Path) -> Check:
    """Room, and speed of a file of 64 MiB that is written through to the disk and removed."""
    place = existing(folder)
    free = float(shutil.disk_usage(place).free)
    if free < 4 * PROBE_BYTES:
        return judge_disk(folder, free, None)
    try:
        return judge_disk(folder, free, write_speed(place))
    except OSError as error:
        return Check("disk", "fail", f"{folder} cannot be written: {error.strerror}", "choose another runs_dir")


def judge_disk(folder: Path, free: float, speed: float | None) -> Check:
    """`speed` in bytes a second; None if there was no room to measure it."""
    found = f"{folder}: {free / 1e9:.1f} GB free" + (f", writes {speed / 1e6:.0f} MB/s" if speed is not None else "")
    if free < 1e9:
        return Check("disk", "fail", found, "free space, or put runs_dir on a larger disk")
    if free < 10e9:
        return Check(
            "disk", "warn", found, "free space, or put runs_dir on a larger disk; `lockstep plan` says what a run needs"
        )
    if speed is not None and speed < SLOW_DISK:
        return Check(
            "disk", "warn", f"{found}: checkpoints take long", "put runs_dir on a local disk, or raise save.every"
        )
    return Check("disk", "ok", found)


def write_speed(folder: Path) -> float:
    """Bytes a second. Raises OSError."""
    block, written = os.urandom(CHUNK), 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-doctor-") as file:
        start = time.perf_counter()
        while written < PROBE_BYTES and time.perf_counter() - start < PROBE_SECONDS:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - start)


def check_cache() -> Check:
    """Check the folders of converted models and of models of a hub, and that they are where the user thinks."""
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    folders = {"LOCKSTEP_CACHE": cache_root(), "HF_HOME": hub}
    wrong = {name: folder for name, folder in folders.items() if not writable(existing(folder))}
    if wrong:
        found = ", ".join(f"{folder} ({name}) cannot be written" for name, folder in wrong.items())
        name = next(iter(wrong))
        place = next(one for one in (Path.home() / ".cache", Path("/var/tmp")) if writable(existing(one)))
        return Check(
            "cache", "warn", found, f"export {name}={place}/{'lockstep' if name == 'LOCKSTEP_CACHE' else 'huggingface'}"
        )
    old = os.environ.get("TRANSFORMERS_CACHE")
    if old and not os.environ.get("HF_HOME") and not os.environ.get("HF_HUB_CACHE"):
        found = f"transformers 5 does not read TRANSFORMERS_CACHE ({old}); models are fetched into {hub}"
        return Check("cache", "warn", found, f"export HF_HUB_CACHE={old}")
    return Check("cache", "ok", ", ".join(map(str, folders.values())))


def writable(folder: Path) -> bool:
    """Return whether a file can be made there, tried and not asked: permissions alone do not know of read-only disks."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-doctor-"):
            return True
    except OSError:
        return False


# --- the rest -------------------------------------------------------------------------------------------------------
def check_clock(folder: Path) -> Check:
    """This machine's clock against that of the disk, and against the age of Lockstep's own files."""
    newest = max(path.stat().st_mtime for path in Path(lockstep.__file__).parent.glob("*.py"))
    place = existing(folder)
    if not writable(place):
        return judge_clock(time.time(), None, newest)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".lockstep-doctor-") as file:
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())
        now = time.time()
        return judge_clock(now, Path(file.name).stat().st_mtime, newest)


def judge_clock(now: float, of_disk: float | None, newest: float) -> Check:
    """Seconds since 1970: this machine's, a file's that was just written, and the newest file's of the program."""
    found = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if now < newest - 86400:
        return Check(
            "clock", "warn", f"{found}, before Lockstep itself was written", "set the clock: records would lie"
        )
    if of_disk is not None and abs(now - of_disk) > SKEW_S:
        skew = f"{found}, {abs(now - of_disk):.0f} s {'ahead of' if now > of_disk else 'behind'} the disk's"
        return Check("clock", "warn", skew, "synchronise the clocks (NTP): times in records would not agree")
    return Check("clock", "ok", found)


def check_limits() -> Check:
    both = {name: resource.getrlimit(number) for name, number in LIMITS.items()}
    soft, hard = ({name: math.inf if one[i] == -1 else one[i] for name, one in both.items()} for i in (0, 1))
    return judge_limits(soft, hard)


def judge_limits(soft: Mapping[str, float], hard: Mapping[str, float] | None = None) -> Check:
    """`soft` limits: open files, bytes of a file, bytes of address space, processes of this user; `hard`: the most for them."""
    fixes = {name: _raise(name, soft[name], (hard or {}).get(name, math.inf)) for name in ("files", "processes")}
    files = soft["files"]
    if files < LEAST_FILES:
        return Check("limits", "fail", f"{files:g} open files are allowed", fixes["files"])
    if soft["size"] < LARGE_FILE:
        found = f"a file may have {soft['size'] / GIB:.2f} GiB: a larger checkpoint ends the run"
        return Check("limits", "fail" if soft["size"] < GIB else "warn", found, "ulimit -f unlimited")
    if soft["memory"] < math.inf:
        found = f"{soft['memory'] / GIB:.1f} GiB of address space are allowed; CUDA and memory maps need far more than they use"
        return Check("limits", "warn", found, "ulimit -v unlimited")
    if files < FEW_FILES:
        return Check("limits", "warn", f"{files:g} open files are allowed", fixes["files"])
    if soft["processes"] < FEW_FILES:
        return Check("limits", "warn", f"{soft['processes']:g} processes are allowed", fixes["processes"])
    return Check("limits", "ok", f"{files:g} open files, {soft['processes']:g} processes, files of any size")


def _raise(name: str, soft: float, hard: float) -> str:
    if hard <= soft:
        word = "nofile" if name == "files" else "nproc"
        return f"ask for a higher hard limit: docker run --ulimit {word}=65536, or limits.conf"
    return f"ulimit -S{'n' if name == 'files' else 'u'} {min(65536, hard):.0f}"


def check_loopback() -> Check:
    """Check a connection of this machine to itself, by which processes of a run talk."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"?")
                    other.settimeout(2)
                    answered = other.recv(1) == b"?"
    except OSError as error:
        return Check(
            "loopback",
            "fail",
            f"127.0.0.1: {error}",
            "ip link set lo up  # as root; or correct the firewall",
        )
    verdict = "ok" if answered else "fail"
    return Check("loopback", verdict, "127.0.0.1 answers" if answered else "127.0.0.1 loses bytes")  # type: ignore[arg-type]
