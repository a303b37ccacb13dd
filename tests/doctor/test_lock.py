"""S1-3: what is installed is held against the lock file whose versions were tested."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.doctor.lock import FOLDER, check_lock, judge_lock, lock_name
from lockstep.doctor.run import doctor

LOCK = """# Made by requirements/lock.py
numpy==2.4.6 ; python_full_version < '3.11' \\
    --hash=sha256:00
numpy==2.5.1 ; python_full_version >= '3.11' \\
    --hash=sha256:00
rich==15.0.0 \\
    --hash=sha256:00
torch==2.11.0 \\
    --hash=sha256:00
uvicorn[standard]==0.30.0 \\
    --hash=sha256:00
"""


def test_a_version_that_was_not_tested_is_named_with_the_line_that_installs_it() -> None:
    path = Path("requirements/cuda.lock")
    same = {"numpy": "2.5.1", "torch": "2.11.0+cu130", "uvicorn": "0.30.0", "mine": "1"}
    check = judge_lock(path, LOCK, same)
    assert (check.verdict, check.found) == ("ok", "3 of 3 packages are as in cuda.lock")
    check = judge_lock(path, LOCK, same | {"torch": "2.9.0", "rich": "14.0"})
    assert check.verdict == "warn"
    assert check.found == "2 of 4 packages are as in cuda.lock: torch 2.9.0, not ==2.11.0, rich 14.0, not ==15.0.0"
    assert check.fix.endswith(f"install --require-hashes -r {path}")
    check = judge_lock(path, LOCK, same | {"rich": "14.0"})  # changes no number
    assert (check.verdict, check.fix) == ("ok", "")


def test_the_lock_is_that_of_the_installed_torch(tmp_path: Path) -> None:
    names = [
        lock_name(found)
        for found in ({}, {"torch": "2.13.0+cpu"}, {"torch": "2.11.0"}, {"torch": "2.11.0", "vllm": "1"})
    ]
    assert names == ["cpu", "cpu", "cuda", "cuda-vllm"]
    assert check_lock(tmp_path) == []  # installed without the repository


def test_doctor_compares_this_environment_with_its_lock() -> None:
    (found,) = check_lock()
    assert re.fullmatch(r"\d+ of \d+ packages are as in (cpu|cuda|cuda-vllm).lock.*", found.found)
    assert (FOLDER / "cpu.lock").is_file()
    assert next(check for check in doctor() if check.name == "lock") == found
