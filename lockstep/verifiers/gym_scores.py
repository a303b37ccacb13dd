"""Grades by a reasoning-gym data set's own score function: for questions with several right answers, or answers of many lines.

Some of these functions evaluate the answer as Python. An answer to these must fit a small grammar; any other is wrong, and
reaches no score function. Every score is then computed in a sandbox, in a fresh process that can run no code made from text
(gym_worker.py).
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers import gym_worker, no_eval
from lockstep.verifiers.base import shown, unscored
from lockstep.verifiers.extract import final_span, read_answer
from lockstep.verifiers.sandbox.host import Flood, Run, Sandbox, SandboxError, TimeOut, ZygoteGone
from lockstep.verifiers.sandbox.isolation import Limits
from lockstep.verifiers.sandbox.plain import NotPlainError
from lockstep.workers import wire

FULL = 1.0 - 1e-9
ATTEMPT = 0.011
"""Most data sets score any text at all 0.01: so little counts as 0."""
QUESTION = "question"
ANSWER = "answer"
METADATA = "metadata"
"""Keys of a prompt's data: its item as the data set made it. The prompt's own answer may be an example from the metadata."""

WALL_SECONDS = 40.0
"""Longer than the processor time by far, so that it rarely depends on what else the machine does."""
START_SECONDS = 100.0
"""Longest time until a process is ready; the first one waits until reasoning-gym is imported and the data set made."""
LIMITS = Limits(cpu_seconds=5, memory=2 << 30, file_bytes=1 << 20, threads=4)
ATTEMPTS = 8
"""Attempts to score a reply whose process is killed from outside."""

MAX_LENGTH = 2000
"""Characters of an answer to a data set that evaluates it."""
_LIST = re.compile(r"[A-Za-z0-9_\s,\[\]'\"-]*", re.ASCII)
_ARITHMETIC = re.compile(r"[0-9\s+*/()-]*", re.ASCII)
_ALGEBRA = re.compile(r"[A-Za-z0-9\s+*/().,-]*", re.ASCII)
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
EVALUATED = {
    "binary_matrix": _LIST,
    "n_queens": _LIST,
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "intermediate_integration": _ALGEBRA,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
}
"""Data sets of reasoning-gym 0.1.25 whose score functions evaluate the answer, and what it may be written with."""
_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)(?![a-z])", re.IGNORECASE)
"""These compare as equal to any number in some score functions."""


def admitted(dataset: str, text: str, reference: str) -> bool:
    """Return whether an answer may be given to the data set's score function; it is wrong otherwise. Linear."""
    if _NOT_FINITE.search(text) and re.search("[0-9]", reference) and not _NOT_FINITE.search(reference):
        return False
    written = EVALUATED.get(dataset)
    if written is None:
        return True
    if len(text) > MAX_LENGTH or not written.fullmatch(text):
        return False
    if written is not _ALGEBRA:
        return True
    known = no_eval.FUNCTIONS | no_eval.CONSTANTS | {"C"} | set(_NAME.findall(reference))
    return not _ATTRIBUTE.search(text) and known.issuperset(_NAME.findall(text))


class Scorer:
    """A sandbox that has reasoning-gym loaded, started when first needed and again when it has ended. Used by several threads."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def missing(self) -> tuple[str, ...]:
        """Measures that the isolation lacks on this machine, with the reasons."""
        return self._running().missing

    def score(self, dataset: str, settings: str, answer: str, item: Mapping[str, Any]) -> float | str:
        """Return the data set's score; or why the answer made its score function fail or exceed a limit.

        Raises SandboxError if no score can be had, through no fault of the answer; TaskError if no sandbox starts.
        """
        call = {"call": wire.dumps({"answer": answer, "item": item}).decode()}
        for attempt in range(ATTEMPTS):
            sandbox = self._running()
            try:
                with sandbox.spawn(json.dumps([dataset, settings]), (), time.monotonic() + START_SECONDS) as run:
                    _ready(run)
                    run.deadline = time.monotonic() + WALL_SECONDS
                    return _ask(run, call)
            except ZygoteGone:
                self._drop(sandbox)
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def close(self) -> None:
        """End the sandbox; a copy of this process, made by fork, leaves it to its owner."""
        if self._sandbox is not None and os.getpid() == self._owner:
            self._drop(self._sandbox)

    def _running(self) -> Sandbox:
        with self._lock:
            if self._sandbox is None:
                try:
                    self._sandbox = Sandbox(LIMITS, paths=package_folders(), module=gym_worker.__name__)
                except SandboxError as error:
                    raise TaskError(
                        f"the sandbox for reasoning-gym's score functions did not start: {error}",
                        where="task.scoring",
                        fix="follow docs/verifiers.md, section Sandbox",
                    ) from error
            return self._sandbox

    def _drop(self, sandbox: Sandbox) -> None:
        with self._lock:
            if self._sandbox is sandbox:
                self._sandbox = None
                sandbox.close()


def _ready(run: Run) -> None:
    try:
        run.start()
    except TimeOut:
        raise SandboxError(f"no process was ready in {START_SECONDS:g} s: the machine is too busy") from None


def _ask(run: Run, call: Mapping[str, Any]) -> float | str:
    try:
        said = run.ask(call)
    except TimeOut:
        if run.starved(WALL_SECONDS):
            raise SandboxError(f"the machine was too busy: no processor for most of {WALL_SECONDS:g} s") from None
        return f"no score after {WALL_SECONDS:g} s"
    except (Flood, NotPlainError) as error:
        return f"no score: {error}"
    except EOFError:
        ended = run.by_itself()
        cpu = ended is not None and ended.cpu_seconds > 0.75 * LIMITS.cpu_seconds  # two clocks: they differ by a tenth
        if ended is not None and ended.status == -signal.SIGKILL and not cpu:
            raise ZygoteGone("the process that scores was killed") from None
        return f"more than {LIMITS.cpu_seconds} s of processor time" if cpu else f"its process ended ({ended})"
    score = said.get("score")
    if type(score) is float and 0 <= score <= 1:  # nan is not
        return score
    return str(said.get("error", f"the score {score!r}"))[:300]


def package_folders() -> list[str]:
    """Return the folders of reasoning-gym and the packages that it needs."""
    spec = importlib.util.find_spec("reasoning_gym")
    found = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parents[1])]
    found += [
        path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()
    ]
    return list(dict.fromkeys(found))


@cache
def scorer() -> Scorer:
    """Return the scorer of this process, one for all data sets."""
    return Scorer()


class GymScores:
    """The boxed answer, else the text between <answer> tags, as the data set scores it.

    Without `partial` only full marks count, so that no data set rewards an attempt. An answer that its score function
    cannot stand (it raises, or takes too long) is wrong; the metric score_errors counts them.
    """

    workers = min(4, os.cpu_count() or 1)

    def __init__(self, dataset: str, settings: str, *, partial: bool) -> None:
        self._dataset, self._settings, self._partial = dataset, settings, partial

    @property
    def notes(self) -> tuple[str, ...]:
        missing = scorer().missing
        return (f"warning: score functions are not isolated in full: {'; '.join(missing)}",) if missing else ()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        answer = read_answer(reply, "none")
        text = answer.text if answer.text is not None else _tagged(reply[slice(*final_span(reply))])
        found = {"has_answer": float(bool(text)), "boxed": float(answer.method == "boxed")}
        if not text or not admitted(self._dataset, text, prompt.answer):
            return Grade(0.0, {"correct": 0.0, **found}, None if text is None else shown(text), answer.method)
        item = {key: prompt.data.get(key) for key in (QUESTION, ANSWER, METADATA)}
        try:
            score = scorer().score(self._dataset, self._settings, text, item)
        except SandboxError as error:
            return unscored(f"reasoning-gym's score function could not be asked: {error}")
        if isinstance(score, str):
            return Grade(0.0, {"correct": 0.0, "score_errors": 1.0, **found}, shown(text), answer.method)
        correct = float(score >= FULL)
        reward = score if self._partial and score > ATTEMPT else correct
        return Grade(reward, {"correct": correct, **found}, shown(text), answer.method)


def _tagged(reply: str) -> str | None:
    """Return the text between the last <answer> and </answer>, as reasoning-gym's own prompts ask for."""
    _, opened, rest = reply.rpartition("<answer>")
    body, closed, _ = rest.partition("</answer>")
    return body.strip() if opened and closed and len(body) <= 1 << 16 else None
