"""Asks pip (`pip install --dry-run`) which packages an install would change. Installs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lockstep.doctor.check import Check
from lockstep.doctor.imports import PIP
from lockstep.doctor.machine import PACKAGE
from lockstep.errors import ConfigError

GUARDED = ("torch", "transformers", "tokenizers", "numpy", "triton", "safetensors", "huggingface-hub", "pyarrow")
"""Packages that no install may take to an older version or another build."""


@dataclass(frozen=True, slots=True)
class Change:
    """A package that pip would install. Example: Change("torch", "2.13.0", "2.9.0", ("vllm 0.11.2 wants torch==2.9.0",))"""

    name: str
    before: str | None
    after: str
    because: tuple[str, ...] = ()
    """Requirements that the present version does not meet."""

    @property
    def worse(self) -> bool:
        """True for an older version, or another build of the same one."""
        if self.before is None:
            return False
        before, after = Version(self.before), Version(self.after)
        return (after.public != before.public and after < before) or (after.public == before.public and after != before)


def would_install(words: Sequence[str]) -> list[Check]:
    """Ask pip what an install of extras or requirements would change; one that takes a guarded package back fails.

    Raises ConfigError if pip has no solution.
    """
    wanted = [line for word in words for line in _requirements(word)]
    changes, why = _asked(wanted)
    if why:
        raise ConfigError([f"pip cannot install {' '.join(words)}: {why}"], fix="change the requested versions")
    checks = [judge(change) for change in changes]
    bad = [change.name for change in changes if change.worse and change.name in GUARDED]
    if bad:
        checks.append(_way_out(wanted, changes))
    return checks or [Check("install", "ok", "nothing would change")]


def judge(change: Change) -> Check:
    because = f": {'; '.join(change.because)}" if change.because else ""
    if change.before is None:
        return Check(change.name, "ok", f"{change.after}, new")
    found = f"{change.before} → {change.after}{because}"
    if change.worse and change.name in GUARDED:
        return Check(change.name, "fail", found, "do not install it here; see the last line")
    return Check(change.name, "warn" if change.worse else "ok", found, "see who asks for it" if change.worse else "")


def _way_out(wanted: Sequence[str], changes: Sequence[Change]) -> Check:
    """Ask pip again with the present versions held: say the command that works, or that none does."""
    held = [f"{change.name}=={change.before}" for change in changes if change.worse and change.name in GUARDED]
    _, why = _asked([*wanted, *held])
    if not why:
        fix = f"{PIP} install {' '.join(repr(line) for line in [*wanted, *held])}"
        return Check("install", "fail", f"with {', '.join(held)} held, pip takes other versions of the rest", fix)
    fix = f"{sys.executable} -m venv other && other/bin/pip install {' '.join(repr(line) for line in wanted)}"
    return Check("install", "fail", f"there is no version that goes with {', '.join(held)}", fix)


def _requirements(word: str) -> list[str]:
    """Return the requirements of an extra of Lockstep; any other word is a requirement itself."""
    declared = metadata.requires(PACKAGE) or []
    return [line.partition(";")[0].strip() for line in declared if _of_extra(Requirement(line), word)] or [word]


def _of_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _asked(wanted: Sequence[str]) -> tuple[list[Change], str]:
    """Return what pip would install, and why it cannot ("" if it can)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--no-input",
            "--report",
            str(report),
            "-qq",
            "--",
            *wanted,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            return [], " ".join(said[-2:]) or f"pip ended with {done.returncode}"
        planned = json.loads(report.read_text())["install"]
    before = {str(canonicalize_name(one.name)): one.version for one in metadata.distributions() if one.name}
    return changes(planned, before, wanted), ""


def changes(planned: Sequence[Mapping[str, Any]], before: Mapping[str, str], wanted: Sequence[str]) -> list[Change]:
    """Read pip's report. `before`: installed versions by name; `wanted`: what was asked for."""
    asked = [("you ask for", Requirement(line)) for line in wanted if not line.startswith((".", "/"))]
    for one in planned:
        data = one["metadata"]
        for line in data.get("requires_dist", []):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                asked.append((f"{data['name']} {data['version']} wants", requirement))
    found = []
    for one in planned:
        name, old = canonicalize_name(one["metadata"]["name"]), before.get(canonicalize_name(one["metadata"]["name"]))
        culprits = [
            f"{who} {requirement.name}{requirement.specifier}"
            for who, requirement in asked
            if canonicalize_name(requirement.name) == name
            and old
            and not requirement.specifier.contains(old, prereleases=True)
        ]
        found.append(Change(name, old, one["metadata"]["version"], tuple(dict.fromkeys(culprits))))
    return sorted(found, key=lambda change: (not change.worse, change.before is None, change.name))
