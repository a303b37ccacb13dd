"""Runs a user's agent program for each episode, in its own process; it gets replies from the run's HTTP endpoint."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from lockstep.config import schema
from lockstep.config.section import command_words
from lockstep.envs.cells import Cells, Files
from lockstep.envs.runners import Fault
from lockstep.errors import TaskError
from lockstep.text import reason_of
from lockstep.types import Prompt
from lockstep.verifiers.sandbox import cell
from lockstep.verifiers.sandbox.isolation import Limits

MODEL = "policy"
"""Name of the model at the endpoint."""
MOST_OUTPUT = 1 << 20
"""Most bytes that are read of a program's output, its end."""
_MOST_OPEN = 1024
"""Files that each process of a program in the sandbox may have open."""
_CONFINED = (
    "import ctypes, os, resource, sys; ctypes.CDLL(None).prctl(1, 9); "
    "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2); "
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Program that runs another within limits; the kernel kills it when its owner ends (PR_SET_PDEATHSIG, SIGKILL)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode for a program."""

    key: str
    prompt: Prompt
    sample: int
    seed: int
    address: str
    """Base of the endpoint's addresses."""
    token: str
    take: Callable[[socket.socket], None]
    """Serves a connection as one to the endpoint."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a program's episode."""

    text: str = ""
    """Its final answer."""
    reward: float | None = None
    """Reward that it gives itself; None leaves it to the verifier."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    """Reason why it cannot be scored."""


Ended = Callable[[str, Outcome], None]


class Programs(Protocol):
    """Plays episodes."""

    def start(self, job: Job, ended: Ended) -> None:
        """Play an episode in the background; `ended` is called once, from any thread, with its key and outcome."""

    def stop(self, key: str) -> None:
        """End an episode's process, if it still runs."""


class CommandPrograms:
    """Runs a command for each episode, at most `running` at a time, in a folder of its own."""

    def __init__(self, settings: schema.AgentTask) -> None:
        """Raises TaskError if the command is not there, or the sandbox that is asked for is not to be had."""
        self._settings = settings
        self._command = _whole(command_words(settings.command))
        self._pool = ThreadPoolExecutor(settings.running, "lockstep-agent")
        self._cells = None if settings.isolation == "none" else Cells(self._command, settings.readable, self._limits())
        self._ends: dict[str, Callable[[], None]] = {}
        """Each ends a program that runs."""
        self._stopped: set[str] = set()
        self.logs: Path | None = None
        """Folder for what the programs write to standard error."""

    def start(self, job: Job, ended: Ended) -> None:
        self._stopped.discard(job.key)
        self._pool.submit(self._play, job, ended)

    def stop(self, key: str) -> None:
        self._stopped.add(key)
        if (end := self._ends.get(key)) is not None:
            end()

    def _play(self, job: Job, ended: Ended) -> None:
        try:
            outcome = self._run(job)
        except Exception as error:  # the episode must end whatever happens to its program
            outcome = Outcome(fault=Fault("error", f"it cannot be started: {reason_of(error)}"))
        ended(job.key, outcome)

    def _run(self, job: Job) -> Outcome:
        if job.key in self._stopped:
            return Outcome(fault=Fault("error", "it was stopped"))
        limit = self._settings.seconds
        with tempfile.TemporaryDirectory(prefix="lockstep-agent-") as folder:
            given, said, log = (Path(folder) / name for name in ("task.json", "output", "log"))
            given.write_text(json.dumps(task_of(job)), encoding="utf-8")
            home = Path(folder) / "work"
            home.mkdir()
            with given.open("rb") as stdin, said.open("wb") as stdout, log.open("wb") as stderr:
                files = Files(stdin, stdout, stderr)
                status = self._here(job, home, files) if self._cells is None else self._apart(job, home, files)
            errors = _tail(log)
            self._keep(job, errors)
            if status is None:
                return Outcome(fault=Fault("timeout", f"it took longer than {limit:g} s"))
            if status:
                last = (errors.strip().splitlines() or ["it wrote nothing to standard error"])[-1]
                return Outcome(fault=Fault("error", f"it ended with status {status}: {last[:300]}"))
            return outcome_of(_tail(said), self._settings.result)

    def _here(self, job: Job, home: Path, files: Files) -> int | None:
        """Run the command with the user's rights. Returns its status, None if it takes too long."""
        limits = self._limits()
        confined = [sys.executable, "-I", "-S", "-c", _CONFINED, str(limits.memory), str(limits.file_bytes)]
        process = subprocess.Popen(
            [*confined, *self._line(job)], stdin=files.stdin, stdout=files.stdout, stderr=files.stderr, cwd=home,
            env=self._environment(job, str(home), str(files.stdin.name)), start_new_session=True,
        )  # fmt: skip
        self._runs(job, lambda: _kill(process))
        try:
            return process.wait(self._settings.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)
            process.wait()
            self._ends.pop(job.key, None)

    def _apart(self, job: Job, root: Path, files: Files) -> int | None:
        """Run it in the sandbox, where the endpoint has the same address."""
        assert self._cells is not None
        env, port = self._environment(job, cell.HOME, cell.TASK), urlsplit(job.address).port or 0
        running = self._cells.start(self._line(job), env, port, files, root)
        self._runs(job, running.end)
        try:
            return running.wait(self._settings.seconds, job.take)
        finally:
            self._ends.pop(job.key, None)
            running.close()

    def _runs(self, job: Job, end: Callable[[], None]) -> None:
        self._ends[job.key] = end
        if job.key in self._stopped:  # while it was being started
            end()

    def _limits(self) -> Limits:
        s = self._settings
        seconds = math.ceil(s.seconds) * (os.cpu_count() or 1)
        return Limits(seconds, int(s.memory_gib * 2**30), s.file_mib * 2**20, s.processes - 1, _MOST_OPEN)

    def _line(self, job: Job) -> list[str]:
        question = job.prompt.messages[-1]["content"] if job.prompt.messages else ""
        return [part.replace("{question}", question) for part in self._command]

    def _environment(self, job: Job, home: str, given: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
        own = {"HOME": home, "TMPDIR": home, "LOCKSTEP_TASK": given, "NO_PROXY": "127.0.0.1,localhost"}
        return kept | own | addresses(job) | self._settings.env

    def _keep(self, job: Job, errors: str) -> None:
        if self.logs is not None and errors:
            self.logs.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", job.key)[:120]
            (self.logs / f"{name}.log").write_text(errors, encoding="utf-8")


def task_of(job: Job) -> dict[str, object]:
    """Return what a program is told on standard input, and in the file that LOCKSTEP_TASK names."""
    return {
        "id": job.prompt.id,
        "messages": list(job.prompt.messages),
        "sample": job.sample,
        "seed": job.seed,
        "model": MODEL,
        "base_url": f"{job.address}/v1",
        "api_key": job.token,
    }


def addresses(job: Job) -> dict[str, str]:
    """Return the environment variables by which the clients of OpenAI and Anthropic find the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{job.address}/v1",
        "OPENAI_API_BASE": f"{job.address}/v1",
        "OPENAI_API_KEY": job.token,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": job.address,
        "ANTHROPIC_API_KEY": job.token,
        "ANTHROPIC_AUTH_TOKEN": job.token,
        "ANTHROPIC_MODEL": MODEL,
    }


def outcome_of(output: str, result: str) -> Outcome:
    """Read a program's output: all of it is the answer, or its last line is a JSON object with reward, answer and metrics."""
    if result == "answer":
        return Outcome(output.strip())
    last = re.split(r"[\r\n]", output.strip())[-1]  # splitlines would cut inside of JSON, at U+2028 for example
    try:
        found = json.loads(last)
        reward = float(found["reward"])
        metrics = {str(name): float(value) for name, value in found.get("metrics", {}).items()}
        if not all(map(math.isfinite, (reward, *metrics.values()))):
            raise ValueError("a number is not finite")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f'its last line is not {{"reward": number, …}}: {last[:100]!r} ({type(error).__name__})'
        return Outcome(fault=Fault("error", why))
    answer = found.get("answer")
    return Outcome("" if answer is None else str(answer), reward, metrics)


def _whole(command: Sequence[str]) -> list[str]:
    """Return a command that works in any folder: names of files that are here become whole paths. Raises TaskError."""
    if shutil.which(command[0]) is None:
        raise TaskError(
            f"there is no program {command[0]}", where="task.command", fix="correct the command, or install the program"
        )
    scripts = [part for part in command[1:] if part.endswith((".py", ".sh", ".js")) and not re.search(r"\s", part)]
    if missing := [part for part in scripts if not Path(part).exists()]:
        raise TaskError(f"there is no file {missing[0]}", where="task.command", fix="correct this path in the command")
    return [
        str(Path(part).absolute())
        if Path(part).exists() and ("/" in part or (place and Path(part).is_file()))
        else part
        for place, part in enumerate(command)
    ]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_OUTPUT))
        return file.read().decode("utf-8", "replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
