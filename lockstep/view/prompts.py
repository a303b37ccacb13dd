"""The prompt box of the page: replies of any checkpoint, sampled in a process that starts on demand and ends when it is idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field

from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, LockstepError
from lockstep.track.rundir import RunDirectory
from lockstep.view.runs import ViewedRun

IDLE_S = 180.0
"""Seconds without a prompt after which the process is ended, so that its memory is free."""
MAX_CHARACTERS = 200_000
"""Longest prompt."""


class PromptRequest(BaseModel):
    """A prompt that the user typed, the checkpoint that replies, and the sampling settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run: int = Field(default=0, ge=0)
    step: int = Field(default=0, ge=0)
    text: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    raw: bool = False
    """True to continue the text itself, without the chat template."""
    count: int = Field(default=1, ge=1, le=32)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    tokens: int = Field(default=256, ge=1, le=32_768)
    seed: int = Field(default=0, ge=0, lt=2**31)


@dataclass(frozen=True, slots=True)
class _Engine:
    """A process with the weights of one checkpoint."""

    place: tuple[str, int]
    process: subprocess.Popen[str]
    log: IO[bytes]
    ready: dict[str, Any]

    def ask(self, question: object) -> dict[str, Any]:
        """Return its answer to a question. Raises EngineError if it ended, or what it says."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise _ended(self.process, self.log) from error
        return _answer(self.process, self.log)


class Prompter:
    """Samples replies for the page: one process at a time, one prompt at a time."""

    def __init__(self) -> None:
        self._engine: _Engine | None = None
        self._process: subprocess.Popen[str] | None = None
        self._busy = threading.Lock()
        self._idle: threading.Timer | None = None

    def sample(self, one: ViewedRun, ask: PromptRequest) -> dict[str, Any]:
        """Return replies with the log-probability of each token, and the weights and precision that gave them.

        Raises EngineError if another prompt is being answered, or with the reason why there is no reply.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineError("another prompt is being answered", where="prompt", fix="wait for its reply, or stop it")
        try:
            self._keep()
            place = (str(one.run.path), ask.step)
            engine = self._engine  # a stop from another thread takes it from here, and ends its process
            if engine is None or engine.place != place or engine.process.poll() is not None:
                self.stop()
                self._engine = engine = self._start(place, live=one.live)
            return engine.ready | engine.ask(ask.model_dump(exclude={"run", "step"}))
        finally:
            self._busy.release()
            self._idle = threading.Timer(IDLE_S, self._rest)
            self._idle.daemon = True
            self._idle.start()

    def stop(self) -> None:
        """End the process, whatever it does."""
        process, self._process, self._engine = self._process, None, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self._keep()
        self.stop()

    def _keep(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _rest(self) -> None:
        if self._busy.acquire(blocking=False):
            try:
                self.stop()
            finally:
                self._busy.release()

    def _start(self, place: tuple[str, int], *, live: bool) -> _Engine:
        # A run that trains keeps its GPU for itself: a second model beside it could end it for lack of memory.
        aside = ["device=cpu"] if live else []
        command = [sys.executable, "-m", "lockstep.view.sampler", place[0], str(place[1]), *aside]
        log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8",
            start_new_session=True,
        )  # fmt: skip
        return _Engine(place, process, log, _answer(process, log))


def prompt_places(one: ViewedRun) -> list[int]:
    """Return the steps that have weights to sample with; step 0, the base, comes first."""
    saved = [info.step for info in list_checkpoints(Path(one.run.path)) if info.complete]
    return [0, *(step for step in saved if step)]


def sampling_of(run: RunDirectory) -> dict[str, Any]:
    """Return a run's sampling settings and the texts that its recipe puts around a prompt, or the error of a wrong recipe."""
    try:
        recipe, problem = load([str(run.recipe_path)]), ""
    except LockstepError as error:
        recipe, problem = Recipe(), str(error)
    around = [recipe.chat.system, *(f"{len(recipe.chat.examples)} examples" for _ in recipe.chat.examples[:1])]
    return {
        "temperature": recipe.rollout.temperature,
        "top_p": recipe.rollout.top_p,
        "tokens": recipe.rollout.max_tokens,
        "around": [text for text in (*around, recipe.chat.suffix) if text],
        "problem": problem,
    }


def _answer(process: subprocess.Popen[str], log: IO[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise _ended(process, log)
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise EngineError(str(found["error"]))
    return found


def _ended(process: subprocess.Popen[str], log: IO[bytes]) -> EngineError:
    code = process.wait()
    log.seek(0)
    last = log.read()[-2000:].decode(errors="replace").strip().splitlines()[-1:]
    why = "it was stopped" if code == -signal.SIGKILL else f"exit code {code}: {' '.join(last) or 'no message'}"
    return EngineError(
        f"the sampling process ended ({why})", where="prompt", fix="send it again, or use `lockstep sample`"
    )
