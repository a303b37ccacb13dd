"""Sends code, environment and files to a host, checks that they are the same there, and starts commands."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import lockstep
from lockstep.config.load import BUILT_IN
from lockstep.errors import ConfigError, HostError
from lockstep.hosts.connection import Connection
from lockstep.hosts.inputs import Hashes, Inputs, inputs_of
from lockstep.track.facts import PACKAGES, mask
from lockstep.track.files import write_atomic

RECORDS = Path(".lockstep/hosts")
"""Folder with a record of every command that was sent, below the current one."""
SPARE = 64 << 20
"""Bytes that stay free on the other disk."""
OURS = "Lockstep's "
"""Beginning of the names of its own files."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Outcome of a sync."""

    files: dict[str, str]
    """SHA-256 by name, of the command's own files."""
    code: str
    environment: str | None
    lock: str
    """SHA-256 of the lock file; "" without one."""
    python: str
    sent: int
    """Bytes that went over the line."""
    there: int
    """Bytes that were there already."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Files here by their SHA-256, and the SHA-256 by name."""

    paths: dict[str, Path]
    names: dict[str, str]
    """Names in the command's folder there."""
    known: dict[str, str]
    """Names here."""
    code: dict[str, str]
    lock: str


def sync(link: Connection, inputs: Inputs, *, dry_run: bool = False) -> Sent:
    """Bring files, the installed Lockstep and the environment. What is there by its hash is not sent. Raises HostError."""
    with tempfile.TemporaryDirectory() as stage:
        found = _contents(link, inputs, Path(stage))
        sizes = {sha: path.stat().st_size for sha, path in found.paths.items()}
        state = link.call("missing", files=sizes)
        absent: list[str] = state["missing"]
        there = sum(size for sha, size in sizes.items() if sha not in absent) + sum(state["begun"].values())
        need = sum(sizes[sha] for sha in absent) - sum(state["begun"].values())
        if need + SPARE > state["free"]:
            free = f"{state['free'] / 1e6:,.1f} MB are free in {state['folder']}"
            what = f"No space left: {need / 1e6:,.1f} MB are to be sent, {free}"
            raise link.error("sync", what)
        code = _digest(found.code)
        environment = _digest([found.lock, link.host.torch, link.host.pip, link.host.python]) if found.lock else None
        python = f"{state['folder']}/env/{environment}/bin/python" if environment else link.host.python
        sent = Sent(found.names, code, environment, found.lock, python, need, there)
        if dry_run:
            return sent
        moved = _bring(link, {sha: found.paths[sha] for sha in absent}, found.known)
    link.call("code", digest=code, files=found.code)
    if environment:
        link.call("environment", digest=environment, lock=found.lock, torch=link.host.torch, pip=link.host.pip)
    return replace(sent, sent=moved)


def _bring(link: Connection, files: dict[str, Path], names: dict[str, str]) -> int:
    """Send files and let the other side check them; what arrived damaged is sent once more. Returns the bytes sent."""
    moved, waiting = 0, dict(files)
    for _ in range(2):
        moved += link.push(waiting) if waiting else 0
        answer = link.call("accept", files=[*waiting], names=names)
        waiting = {sha: files[sha] for sha in answer["missing"]}
        if not waiting:
            return moved
    raise link.error("sync", f"{', '.join(map(str, waiting.values()))}: other bytes arrived than were sent")


def _contents(link: Connection, inputs: Inputs, stage: Path) -> Contents:
    hashes, paths, names = Hashes(), {}, {}

    def add(path: Path) -> str:
        sha = hashes.of(path)
        paths[sha] = path
        return sha

    for number, (name, text) in enumerate(inputs.texts.items()):
        (stage / str(number)).write_text(text)
        names[name] = add(stage / str(number))
    for name, path in inputs.files.items():
        names.setdefault(name, add(path) if name not in inputs.texts else "")
    package = Path(lockstep.__file__).parent
    sources = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    code = {f"lockstep/{path.relative_to(package)}": add(path) for path in sources}
    code |= {f"recipes/{path.relative_to(BUILT_IN)}": add(path) for path in BUILT_IN.rglob("*.yaml")}
    lock = add(Path(link.host.lock).expanduser()) if link.host.lock else ""
    known = {str(inputs.files[name]): sha for name, sha in names.items()}
    known |= {f"{OURS}{name}": sha for name, sha in code.items()} | ({link.host.lock: lock} if link.host.lock else {})
    return Contents(paths, names, known, code, lock)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Difference:
    """One between this machine and the other."""

    what: str
    fix: str


def verify(link: Connection, inputs: Inputs) -> tuple[list[str], list[Difference]]:
    """Compare packages, Lockstep, data and weights there with those here, files by their bytes. Raises HostError."""
    with tempfile.TemporaryDirectory() as stage:
        found = _contents(link, inputs, Path(stage))
    planned = sync(link, inputs, dry_run=True)
    known, wrong = found.known, link.call("compare", names=found.known)["wrong"]
    sync_again = f"lockstep host sync {link.name}, with the same words"
    differ = [Difference(f"{name}: {why}", sync_again) for name, why in wrong.items() if not name.startswith(OURS)]
    if code := len(wrong) - len(differ):
        differ.append(Difference(f"Lockstep: {code} of {len(found.code)} files are absent or others there", sync_again))
    facts = [f"{len(known) - len(wrong)} of {len(known)} files are the same there, {planned.there / 1e6:,.1f} MB"]
    if planned.environment is None or not wrong:  # else it is not made yet
        there = link.call("facts", python=planned.python)
        differ += package_differences(there["packages"], link)
        facts += [
            f"Python {there['python']}; {', '.join(there['gpus']) or 'no GPU'}; {there['free'] / 1e9:,.1f} GB free"
        ]
        facts += [f"{name} = {value}" for name, value in there["env"].items()]
    return facts, differ


def package_differences(there: dict[str, str], link: Connection) -> list[Difference]:
    """Return the packages that can change a result and have another version there."""
    versions = {name.lower().replace("_", "-"): version for name, version in there.items()}
    differ = []
    for name in PACKAGES:
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if (other := versions.get(name)) != here:
            pip = shlex.join([link.host.python, "-m", "pip", "install", f"{name}=={here.partition('+')[0]}"])
            fix = (
                f"take a lock file with {name}=={here}" if link.host.lock else f"ssh {link.host.ssh} {shlex.quote(pip)}"
            )
            differ.append(Difference(f"{name}: {other or 'not installed'} there, {here} here", fix))
    return differ


def run(link: Connection, argv: Sequence[str], name: str, variables: Sequence[str], *, allow: bool) -> str:
    """Bring what the command needs and start it there; it lives on without the connection. Returns the job's name.

    Raises ConfigError for --resume, HostError; for `eval` also if packages differ, unless `allow`.
    """
    if "--resume" in argv:
        raise ConfigError(
            ["--resume cannot be used with a host, which trains only new runs"],
            fix="start a new run from the weights of the old one: warm_start=RUN name=NAME",
        )
    if unknown := [one for one in variables if one not in os.environ]:
        raise ConfigError(
            [f"--env {unknown[0]}: this environment variable is not set"], fix="export it, or leave --env out"
        )
    inputs = inputs_of(argv, project=link.host.project)
    sent = sync(link, inputs)
    differ = package_differences(link.call("facts", python=sent.python)["packages"], link)
    if differ and argv[0] == "eval" and not allow:
        fix = "install the same versions, or add --allow-mismatch before the command"
        raise HostError(
            f"packages there and here differ, so replies may differ: {'; '.join(one.what for one in differ)}",
            where=f"host {link.name}",
            fix=fix,
        )
    request: dict[str, Any] = {
        "token": uuid.uuid4().hex, "name": name, "argv": inputs.argv, "said": mask(argv), "files": sent.files,
        "code": sent.code, "env": sent.environment, "lock": sent.lock, "python": link.host.python, "paths": inputs.paths,
        "version": lockstep.__version__, "differ": [one.what for one in differ],
    }  # fmt: skip
    record = RECORDS / link.name / f"{request['token'][:8]}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(record, json.dumps(request, indent=1))
    secret = {one: os.environ[one] for one in variables}  # in no record here
    for attempt in (1, 2):  # a reply that was lost is asked for again: the token makes sure that one job is started
        try:
            job = link.call("start", variables=link.host.env | secret, **request)["job"]
            break
        except HostError:
            if attempt == 2:
                raise
    write_atomic(record.with_name(f"{job}.json"), json.dumps(request | {"job": job}, indent=1))
    record.unlink()
    for one in differ:
        print(f"warning: {one.what}", file=sys.stderr)
    return str(job)
