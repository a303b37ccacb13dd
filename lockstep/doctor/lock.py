"""Compares the versions of the installed packages with the tested ones in the repository's lock file, if that file is here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lockstep.doctor.check import Check
from lockstep.doctor.imports import PIP

FOLDER = Path(__file__).parents[2] / "requirements"
PINNED = re.compile(r"^([A-Za-z0-9._-]+(?:\[[^]]*\])?==[^\\]+?) *\\?$", re.MULTILINE)
HEAVY = frozenset({"torch", "transformers", "vllm", "peft", "triton", "numpy", "tokenizers", "safetensors"})
"""Packages that can change a number or break a run; a difference in another one is no warning."""


def check_lock(folder: Path = FOLDER) -> list[Check]:
    """Compare with the lock file for this torch; nothing without the repository."""
    installed = {str(canonicalize_name(one.name)): one.version for one in metadata.distributions() if one.name}
    path = folder / f"{lock_name(installed)}.lock"
    return [judge_lock(path, path.read_text(), installed)] if path.is_file() else []


def lock_name(installed: Mapping[str, str]) -> str:
    """Return the name of the lock file that is for these packages."""
    if installed.get("torch", "+cpu").endswith("+cpu"):
        return "cpu"
    return "cuda-vllm" if "vllm" in installed else "cuda"


def judge_lock(path: Path, text: str, installed: Mapping[str, str]) -> Check:
    """Compare the versions of what is installed; what is not installed may be of an extra that is not wanted."""
    pins = [Requirement(line) for line in PINNED.findall(text)]
    there = {canonicalize_name(one.name): one for one in pins if one.marker is None or one.marker.evaluate()}
    common = sorted(there.keys() & installed.keys())
    differ = {
        name: f"{name} {installed[name]}, not {there[name].specifier}"
        for name in common
        if not there[name].specifier.contains(Version(installed[name]), prereleases=True)
    }
    found = f"{len(common) - len(differ)} of {len(common)} packages are as in {path.name}"
    if not differ:
        return Check("lock", "ok", found)
    heavy = [differ[name] for name in differ if name in HEAVY]
    found += f": {', '.join((heavy + [differ[name] for name in differ if name not in HEAVY])[:5])}"
    return Check("lock", "warn" if heavy else "ok", found, f"{PIP} install --require-hashes -r {path}" if heavy else "")
