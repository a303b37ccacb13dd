"""Agents in the sandbox: what a model could make them do stays in, as root and as an ordinary user, and what they need works."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import schema
from lockstep.envs.cells import Cells
from lockstep.envs.programs import CommandPrograms
from lockstep.errors import TaskError
from lockstep.verifiers.sandbox.isolation import Limits
from tests.envs.sandboxed import require_sandbox
from tests.verifiers.test_sandbox import as_nobody

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEMORY, FILE, PROCESSES = 2**29, 2**22, 24
MARK = f"lockstep-left-behind-{os.getpid()}"
REFUSED = {"PermissionError", "OSError", "FileNotFoundError", "ConnectionRefusedError"}


@pytest.fixture(scope="module")
def facts() -> Iterator[dict[str, Any]]:
    """Things of the machine that a program must not reach."""
    with (
        tempfile.NamedTemporaryFile("w", dir="/tmp", prefix="lockstep-secret-") as secret,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        Path(secret.name).chmod(0o644)
        secret.write("the key")
        secret.flush()
        abstract.bind(f"\0{MARK}")
        abstract.listen()
        yield {
            "secret": secret.name, "neighbour": str(HERE / "test_cells.py"), "home": str(Path("~").expanduser()),
            "other": other.getsockname()[1], "abstract": MARK, "mark": MARK, "port": free.getsockname()[1],
            "address": "127.0.0.2", "memory": MEMORY, "file": FILE, "processes": PROCESSES,
        }  # fmt: skip


@pytest.fixture(params=["this user", "an ordinary user"])
def user(request: pytest.FixtureRequest) -> str:
    """Who runs the sandbox: an ordinary user has to make a user namespace."""
    require_sandbox()
    if request.param != "this user":
        if os.geteuid() != 0:
            pytest.skip("this user is an ordinary one")
        check = "import sys; sys.exit(sys.version_info < (3, 11) or not __import__('os').access(sys.argv[1], 4))"
        python = Path("/usr/bin/python3")
        if not python.exists() or subprocess.run([python, "-c", check, str(ROOT)], preexec_fn=as_nobody).returncode:
            pytest.skip("no Python that an ordinary user can start")
    return str(request.param)


def driver(user: str, facts: dict[str, Any], names: tuple[str, ...], seconds: float = 60) -> subprocess.Popen[str]:
    python, become = (sys.executable, None) if user == "this user" else ("/usr/bin/python3", as_nobody)
    command = [python, HERE / "cell_driver.py", json.dumps(facts), json.dumps(names), str(seconds)]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "SECRET": "of the run", "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=become, env=env, cwd="/")


def attacked(user: str, facts: dict[str, Any], *names: str, seconds: float = 60) -> tuple[Any, ...]:
    """Status, seconds, what it found, and its standard error."""
    output, errors = (process := driver(user, facts, names, seconds)).communicate(timeout=120)
    assert process.returncode == 0, errors
    status, took, said, errors, left = json.loads(output)
    assert left == [], "its root is not on the machine's disk"
    return status, took, json.loads(said) if said else {}, errors


def processes_with(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]


def appears(what: Callable[[], bool]) -> bool:
    """Whether it is so within some seconds."""
    until = time.monotonic() + 20
    while not (so := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return so


def test_it_reaches_nothing_of_the_machine_but_the_endpoint(user: str, facts: dict[str, Any]) -> None:
    names = (
        "secret in /tmp", "neighbour", "home", "first's environment", "first's memory", "write /", "write readable",
        "write itself", "write python",
        "write beside", "other port", "outside", "outside by its address", "vsock", "abstract socket", "root",
    )  # fmt: skip
    numbers = ("unshare", "clone apart", "mount")
    status, _, found, errors = attacked(
        user, facts, *names, *numbers, "shadow", "environment", "processes", "endpoint", "read readable"
    )
    assert status == 0, errors
    assert found.pop("endpoint") == "from the endpoint"
    assert found.pop("read readable") == "to be read"
    assert found.pop("shadow") is False
    assert set(found.pop("environment")) <= {"PATH", "TMPDIR", "TOKEN", "LC_CTYPE"}
    assert found.pop("processes") == 2
    assert [found.pop(name) for name in numbers] == [-1, -1, -1]
    if isinstance(found["home"], list):  # a part of this Python, or this file, lies there
        shown = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, HERE)]
        tops = {path.relative_to(facts["home"]).parts[0] for path in shown if path.is_relative_to(facts["home"])}
        assert set(found.pop("home")) <= tops
    if Path("/tmp") in HERE.parents:  # this checkout lies there: the program wrote into the /tmp that it has for itself
        assert found.pop("write beside") in {"written", *REFUSED}
    assert set(found.values()) <= REFUSED, found


def test_the_same_program_without_the_sandbox_reaches_it_all(facts: dict[str, Any]) -> None:
    """A control: the attacks above are no straw men."""
    names = ["secret in /tmp", "neighbour", "shadow", "write itself", "write beside", "abstract socket"]
    command = [sys.executable, HERE / "attacks.py", json.dumps(facts), *names]
    found = json.loads(subprocess.check_output(command, text=True, timeout=60))
    assert found["secret in /tmp"] == "the key"
    assert not set(map(str, found.values())) & REFUSED, found


def test_what_a_program_needs_is_there(user: str, facts: dict[str, Any]) -> None:
    names = ("shell", "user", "terminal", "own folder", "lock", "stdout")
    status, _, found, errors = attacked(user, facts, *names)
    assert status == 0, errors
    wanted = {"shell": ["agent", "23"], "user": "agent", "terminal": True, "own folder": ["written"] * 3, "lock": True}
    assert found == {**wanted, "stdout": "written"}


def test_it_is_held_by_its_limits_and_leaves_nothing_running(user: str, facts: dict[str, Any]) -> None:
    status, _, found, errors = attacked(user, facts, "memory", "kill first", "left behind", "forks")
    assert status == 0, errors
    assert (found["memory"], found["left behind"]) == ("MemoryError", "started")
    assert found["kill first"] in ("still here", "PermissionError")
    assert PROCESSES - 8 <= found["forks"] < PROCESSES
    assert processes_with(MARK) == []
    assert attacked(user, facts, "files")[2] == {"files": "OSError"}


def test_a_hang_is_ended_in_time_with_what_it_started(user: str, facts: dict[str, Any]) -> None:
    status, took, found, _ = attacked(user, facts, "left behind", "hang", seconds=3)
    assert (status, found) == (None, {})
    assert 3 <= took < 10
    assert processes_with(MARK) == []


def test_it_ends_when_its_owner_is_killed(user: str, facts: dict[str, Any]) -> None:
    with driver(user, facts, ("left behind", "hang")) as process:
        assert appears(lambda: processes_with(MARK) != [])
        process.kill()
    assert appears(lambda: processes_with(MARK) == [])


def test_mistakes_in_its_settings_are_refused_before_the_run(tmp_path: Path) -> None:
    require_sandbox()
    limits = Limits(60, 2**30, 2**24, 63)
    with pytest.raises(TaskError, match=r"the path .*/gone does not exist"):
        Cells([sys.executable], [str(tmp_path / "gone")], limits)
    with pytest.raises(TaskError, match="/etc cannot be shown to programs: the sandbox makes"):
        Cells([sys.executable], ["/etc/"], limits)
    with pytest.raises(ValueError, match="readable applies to isolation=strict only"):
        schema.AgentTask(command="true", readable=["/usr"])
    if os.geteuid() == 0:
        (tmp_path / "agent.py").touch(0o600)
        with pytest.raises(TaskError, match=r"the program cannot read .*agent\.py"):
            Cells([sys.executable, str(tmp_path / "agent.py")], [], limits)


DENIED = """
import ctypes, errno, struct, platform, sys
from lockstep.verifiers.sandbox import seccomp
number = seccomp.DENIED['unshare'][0 if platform.machine() == 'x86_64' else 1]
parts = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7FFF0000)]
seccomp.install(ctypes.CDLL(None, use_errno=True), b''.join(struct.pack('<HBBI', *p) for p in parts))
"""
"""A filter of system calls that denies unshare stands for a container: the sandbox's process inherits it."""
REASON = f"{'no network' if os.geteuid() == 0 else 'own user'}: unshare: Operation not permitted"


def test_where_namespaces_are_forbidden_it_is_refused_with_the_reason() -> None:
    build = "from lockstep.config.schema import AgentTask; from lockstep.envs.programs import CommandPrograms"
    script = f"{DENIED}{build}; CommandPrograms(AgentTask(command='true', isolation='strict'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert f"the sandbox did not start: {REASON}" in done.stderr
    assert "set task.isolation=none" in done.stderr


@pytest.mark.slow
def test_doctor_says_so_before_the_run(tmp_path: Path) -> None:
    recipe = tmp_path / "agent.yaml"
    recipe.write_text("model: {path: smollm2-135m-instruct}\ntask: {kind: agent, command: 'true', isolation: strict}\n")
    script = f"{DENIED}from lockstep.cli import main; sys.exit(main(['doctor', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", script, recipe], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1
    assert f"the sandbox did not start: {REASON}" in done.stdout


def test_an_agent_sees_the_folders_that_it_names_and_those_that_are_readable(tmp_path: Path) -> None:
    require_sandbox()
    for name in ("agent", "data", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").write_text(name)
    (tmp_path / "link").symlink_to("data")
    task = schema.AgentTask(command=f"ls {tmp_path}/agent", isolation="strict", readable=[str(tmp_path / "link")])
    assert CommandPrograms(task)._cells is not None
    shown = CommandPrograms(task)._cells._shown  # type: ignore[union-attr]
    assert {path for path in shown if path.startswith(str(tmp_path))} == {
        f"{tmp_path}/{n}" for n in ("agent", "link", "data")
    }
