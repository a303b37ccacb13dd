"""The lock files are what pyproject.toml asks for. `make lock-check` resolves them again, which needs uv and the network."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements/lock.py")
assert spec is not None
assert spec.loader is not None
lock = importlib.util.module_from_spec(spec)
sys.modules["lock"] = lock  # dataclasses look there
spec.loader.exec_module(lock)
LINE = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)(?: ; (.+?))? \\$", re.MULTILINE)


@pytest.mark.parametrize("name", list(lock.LOCKS))
def test_a_lock_file_is_in_step_with_what_is_declared(name: str) -> None:
    text = (ROOT / f"requirements/{name}.lock").read_text()
    assert text.startswith(lock.head(name)), "pyproject.toml has changed since: make lock"
    pinned: dict[str, set[str]] = {}
    for package, version, _ in LINE.findall(text):
        pinned.setdefault(canonicalize_name(package), set()).add(version)
    for line in lock.LOCKS[name].inputs():
        requirement = Requirement(line)
        if requirement.name in lock.LOCKS[name].without:
            assert requirement.name not in pinned
            continue
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), line
    assert text.count("--hash=sha256:") >= len(LINE.findall(text)) > 50


def test_the_cpu_lock_has_the_versions_of_the_tests() -> None:
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    locked = LINE.findall((ROOT / "requirements/cpu.lock").read_text())
    differ = [
        f"{name} {version}"
        for name, version, marker in locked
        if not marker and version != tested.get(canonicalize_name(name), version)
    ]
    assert differ == []


def test_the_table_of_what_goes_together_has_the_versions_of_the_locks() -> None:
    """S1-24: torch, transformers and vLLM of each row; torch for a CPU is that of the tests."""
    page = (ROOT / "docs/install.md").read_text()
    rows = dict(re.findall(r"^\| `requirements/([a-z-]+)\.lock` \| [^|]* \| ([^|]*) \|", page, re.MULTILINE))
    assert list(rows) == list(lock.LOCKS)
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, said in rows.items():
        pinned = {
            package: version for package, version, _ in LINE.findall((ROOT / f"requirements/{name}.lock").read_text())
        }
        torch = pinned.get("torch") or tested["torch"].partition("+")[0]
        assert said == ", ".join([torch, pinned["transformers"], pinned.get("vllm", "none")])
