"""Each check of the machine on numbers of machines that are not here, and on this one."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from lockstep.doctor import machine
from lockstep.doctor.check import Check, lines, perform, worst
from lockstep.doctor.imports import PIP

GIB = 2**30
LIMITS = {"files": 65536.0, "size": math.inf, "memory": math.inf, "processes": math.inf}


@pytest.mark.parametrize(
    ("check", "verdict", "found", "fix"),
    [
        (machine.judge_python((3, 10), "3.10.2"), "fail", "3.10.2", "use Python 3.11 or newer"),
        (machine.judge_python((3, 14), "3.14.0"), "warn", "newer than tested", "3.13"),
        (machine.judge_python((3, 12), "3.12.3"), "ok", "3.12.3", ""),
        # visible cores, usable cores, OMP_NUM_THREADS, threads of the recipe
        (machine.judge_threads(16, 16, None), "ok", "16 cores", ""),
        (machine.judge_threads(64, 4, None), "warn", "4 of 64 cores may be used, but libraries start", "OMP_NUM_THREADS=4"),
        (machine.judge_threads(64, 4, "4"), "ok", "4 threads by OMP_NUM_THREADS", ""),
        (machine.judge_threads(8, 8, "64"), "warn", "OMP_NUM_THREADS = 64: threads wait", "export OMP_NUM_THREADS=8"),
        (machine.judge_threads(8, 8, "many"), "warn", "not a number of threads", "export OMP_NUM_THREADS=8"),
        (machine.judge_threads(8, 8, "0"), "warn", "not a number of threads", "export OMP_NUM_THREADS=8"),
        (machine.judge_threads(8, 8, "4,2"), "ok", "4 threads", ""),
        (machine.judge_threads(8, 8, "64", 12), "warn", "the recipe takes 12 threads", "set threads=8"),
        (machine.judge_threads(64, 8, None, 8), "ok", "8 threads by the recipe", ""),
        (machine.judge_load(3.0, 2), "ok", "3.0 processes computing on 2 cores", ""),
        (machine.judge_load(3.1, 2), "warn", "3.1 processes computing on 2 cores", "top"),
        (machine.judge_memory(64 * GIB, 0.9 * GIB), "fail", "0.9 of 64.0 GiB", "more memory"),
        (machine.judge_memory(64 * GIB, 3.9 * GIB), "warn", "3.9 of 64.0 GiB", "more memory"),
        (machine.judge_memory(64 * GIB, 4 * GIB), "ok", "4.0 of 64.0 GiB", ""),
        (machine.judge_shared_memory(2**26, False), "warn", "0.06 GiB", "--shm-size"),
        (machine.judge_shared_memory(2**26, True), "fail", "0.06 GiB", "--shm-size"),
        (machine.judge_shared_memory(GIB, True), "ok", "1.00 GiB", ""),
        (machine.judge_disk(Path("runs"), 0.9e9, None), "fail", "runs: 0.9 GB free", "larger disk"),
        (machine.judge_disk(Path("runs"), 9e9, 2e9), "warn", "9.0 GB free, writes 2000 MB/s", "lockstep plan"),
        (machine.judge_disk(Path("runs"), 90e9, 40e6), "warn", "writes 40 MB/s: checkpoints take long", "local disk"),
        (machine.judge_disk(Path("runs"), 90e9, 400e6), "ok", "writes 400 MB/s", ""),
        (machine.judge_limits(LIMITS | {"files": 128.0}), "fail", "128 open files", "ulimit -Sn 65536"),
        (machine.judge_limits(LIMITS | {"files": 512.0}), "warn", "512 open files", "ulimit -Sn 65536"),
        (machine.judge_limits(LIMITS | {"size": 1e6}), "fail", "a larger checkpoint ends the run", "ulimit -f unlimited"),
        (machine.judge_limits(LIMITS | {"size": 8.0 * GIB}), "warn", "8.00 GiB", "ulimit -f unlimited"),
        (machine.judge_limits(LIMITS | {"memory": 16.0 * GIB}), "warn", "16.0 GiB of address space", "ulimit -v"),
        (machine.judge_limits(LIMITS | {"processes": 100.0}), "warn", "100 processes", "ulimit -Su 65536"),
        (machine.judge_limits(LIMITS), "ok", "65536 open files, inf processes", ""),
        # now, the disk's clock, the newest file of the program: seconds
        (machine.judge_clock(2e9, 2e9 - 1, 1.9e9), "ok", "2033-05-18 03:33:20 UTC", ""),
        (machine.judge_clock(2e9, 2e9 - 300, 1.9e9), "warn", "300 s ahead of the disk's", "NTP"),
        (machine.judge_clock(2e9, 2e9 + 60, 1.9e9), "warn", "60 s behind the disk's", "NTP"),
        (machine.judge_clock(0.0, 0.0, 1.9e9), "warn", "before Lockstep itself was written", "set the clock"),
    ],
)  # fmt: skip
def test_judgements(check: Check, verdict: str, found: str, fix: str) -> None:
    assert check.verdict == verdict
    assert found in check.found
    assert fix in check.fix
    assert bool(check.fix) == (verdict != "ok")  # whatever is not well has something to do about it


DECLARED = [
    "torch>=2.11",
    "numpy>=2.0",
    'vllm>=0.24; sys_platform == "linux" and extra == "vllm"',
    'math-verify[antlr4_13_2]<1,>=0.9; extra == "math"',
    'tomli>=2; python_version < "3.0"',
]


def test_packages_are_held_against_the_declared_ranges_all_at_once() -> None:
    bad = machine.judge_packages(DECLARED, {"torch": "2.9.0", "numpy": None, "vllm": None, "tomli": None})
    assert bad == Check(
        "packages",
        "fail",
        "torch (2.9.0, not >=2.11), numpy (not installed)",
        f"{PIP} install 'torch>=2.11' 'numpy>=2.0'",
    )
    good = {"torch": "2.11.0+cu130", "numpy": "2.4.1", "vllm": None, "math-verify": "1.1"}
    assert machine.judge_packages(DECLARED, good) == Check("packages", "ok", "all 2 within their ranges")
    extras = machine.judge_packages(DECLARED, good, ("vllm", "math"))
    assert extras.found == "vllm (not installed), math-verify (1.1, not <1,>=0.9)"
    assert "'vllm>=0.24' 'math-verify[antlr4_13_2]<1,>=0.9'" in extras.fix


def test_a_control_group_counts_for_cores(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cpu_quota(tmp_path) == 2.5
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(old) is None
    (old / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    assert machine.cpu_quota(old) == 4


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert machine.check_python().verdict == "ok"
    assert machine.check_packages().verdict == "ok", machine.check_packages()
    assert machine.check_loopback() == Check("loopback", "ok", "127.0.0.1 answers")
    assert machine.check_memory().verdict in ("ok", "warn")
    assert machine.check_clock(tmp_path).verdict == "ok"
    assert machine.check_limits().verdict in ("ok", "warn")
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert machine.check_threads().verdict == "warn"
    assert machine.check_threads(1).verdict == "ok"


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    start = time.perf_counter()
    check = machine.check_disk(tmp_path / "runs" / "not-yet")
    assert "MB/s" in check.found or check.verdict == "fail"
    assert time.perf_counter() - start < 10
    assert list(tmp_path.iterdir()) == []
    assert machine.write_speed(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert machine.check_disk(tmp_path).verdict == "fail"


def test_a_cache_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "/proc/nowhere")  # where nobody can make a file
    check = machine.check_cache()
    assert check.verdict == "warn"
    assert "/proc/nowhere (LOCKSTEP_CACHE) cannot be written" in check.found
    assert check.fix.startswith("export LOCKSTEP_CACHE=")
    assert machine.check_disk(Path("/proc/runs")).verdict == "fail"


def test_the_cache_of_older_versions_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_CACHE", str(tmp_path))
    check = machine.check_cache()
    assert (check.verdict, check.fix) == ("warn", f"export HF_HUB_CACHE={tmp_path}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert machine.check_cache().verdict == "ok"


def test_a_check_that_raises_is_a_failed_one_and_hides_no_other() -> None:
    def broken() -> Check:
        raise KeyError("cpu.max")

    found = list(perform([("threads", broken), ("python", lambda: Check("python", "ok", "3.12.3")), ("none", list)]))
    assert [(check.name, check.verdict) for check in found] == [("threads", "fail"), ("python", "ok")]
    assert found[0].found == "the check itself failed: KeyError: 'cpu.max'"
    assert worst(found) == "fail"
    assert worst(found[1:]) == "ok"
    assert worst([]) == "ok"


def test_a_fix_has_a_line_of_its_own() -> None:
    assert lines(Check("limits", "fail", "128 open files are allowed", "ulimit -n 65536")) == [
        "fail  limits         128 open files are allowed",
        "                     to fix: ulimit -n 65536",
    ]
    assert lines(Check("python", "ok", "3.12.3")) == ["ok    python         3.12.3"]
