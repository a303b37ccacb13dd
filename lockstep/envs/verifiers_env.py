"""Environments of the package verifiers (https://github.com/primeintellect-ai/verifiers), each in a process with its own Python.

That process runs verifiers_driver.py. tasks/verifiers_env.py makes the task.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import schema
from lockstep.envs import verifiers_driver
from lockstep.envs.programs import MODEL, Ended, Job, Outcome
from lockstep.envs.runners import Fault
from lockstep.errors import TaskError
from lockstep.types import Message

INDEX = "task"
"""Key of a prompt's data that holds the task's index."""
START_SECONDS = 300.0
Rows = list[tuple[str, tuple[Message, ...]]]


class VerifiersPrograms:
    """One process that plays all episodes of an environment. If it ends, its episodes are unscored and a new process starts."""

    def __init__(self, settings: schema.VerifiersTask) -> None:
        """Start it and read the tasks. Raises TaskError if its Python, the package or the environment is missing."""
        self._settings = settings
        self._where = f"task.env={settings.env}"
        self.log: Path | None = None
        self._lock = threading.Lock()
        """Guards everything below."""
        self._open: dict[str, tuple[Ended, threading.Timer]] = {}
        self._process: subprocess.Popen[str] | None = None
        self.tasks: Rows = self._start()

    def start(self, job: Job, ended: Ended) -> None:
        timer = threading.Timer(self._settings.seconds, self._late, (job.key,))
        timer.daemon = True
        line = {"start": job.key, "task": job.prompt.data[INDEX], "base_url": f"{job.address}/v1"}
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._open[job.key] = (ended, timer)
        timer.start()
        self._tell(line | {"api_key": job.token, "model": MODEL})

    def stop(self, key: str) -> None:
        self._end(key, Outcome(fault=Fault("error", "it was stopped")))
        self._tell({"stop": key})

    def _late(self, key: str) -> None:
        self._end(key, Outcome(fault=Fault("timeout", f"it took longer than {self._settings.seconds:g} s")))
        self._tell({"stop": key})

    def _end(self, key: str, outcome: Outcome) -> None:
        with self._lock:
            ended, timer = self._open.pop(key, (None, None))
        if ended is not None and timer is not None:
            timer.cancel()
            ended(key, outcome)

    def _tell(self, line: Mapping[str, object]) -> None:
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has ended, which the reading thread sees

    # --- the process ----------------------------------------------------------------------------------------------
    def _start(self) -> Rows:
        python = shutil.which(str(Path(self._settings.python).expanduser()))
        if python is None:
            raise TaskError(
                f"there is no Python interpreter at {self._settings.python}",
                where="task.python",
                fix="correct task.python",
            )
        log = subprocess.DEVNULL if self.log is None else self.log.open("a")
        beside = os.pathsep.join((str(Path(python).absolute().parent), os.environ.get("PATH", os.defpath)))
        process = subprocess.Popen(
            [python, "-P", str(verifiers_driver.__file__), json.dumps(_driven(self._settings))],
            env={**os.environ, "PATH": beside},  # verifiers calls the `uv` of its own environment; else it fetches one
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        watch = threading.Timer(START_SECONDS, process.kill)
        watch.start()
        assert process.stdout is not None
        first = process.stdout.readline()
        watch.cancel()
        found: dict[str, Any] = {"refused": "its process ended while loading, or needed too long"}
        try:
            found = json.loads(first) if first else found
        except ValueError:
            found = {"refused": f"its process said {first[:200]!r} instead of its tasks"}
        if "refused" in found:
            process.kill()
            raise TaskError(
                f"the environment cannot be loaded: {found['refused']}"[:1000],
                where=self._where,
                fix=f"install the environment and the package `verifiers` in the Python of task.python={self._settings.python}",
            )
        self._process = process
        threading.Thread(target=self._read, args=(process,), name="lockstep-verifiers", daemon=True).start()
        return [(row["id"], tuple(row["messages"])) for row in found["tasks"]]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            self._end(answer["ended"], _outcome(answer))
        with self._lock:
            left = list(self._open) if process is self._process else []
        for key in left:
            self._end(key, Outcome(fault=Fault("error", "the environment's process ended")))


def _driven(settings: schema.VerifiersTask) -> dict[str, Any]:
    """Return the driver's settings: an environment in a file or folder is found by its path."""
    path = Path(settings.env).expanduser()
    own = path.exists() and (path.suffix == ".py" or path.is_dir())
    config: dict[str, Any] = dict(settings.config)
    agent = {"harness": {"id": settings.harness}, "runtime": {"type": "subprocess"}, "max_turns": settings.requests}
    config.setdefault("agent", agent)
    config["taskset"] = {"id": path.stem if own else settings.env, **settings.settings}
    return {"env": config, "paths": [str(path.absolute().parent)] if own else [], "size": settings.size}


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    if "error" in answer:
        return Outcome(fault=Fault("error", str(answer["error"])[:500]))
    reward = float(answer["reward"])
    if not math.isfinite(reward):
        return Outcome(fault=Fault("error", f"its reward is {reward}"))
    metrics = {name: value for name, value in answer["metrics"].items() if math.isfinite(value)}
    return Outcome(str(answer["answer"] or ""), reward, metrics)
