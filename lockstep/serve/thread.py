"""Runs a rollout engine in its own thread. Many other threads may send requests; new ones are admitted while others run."""

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import BusyError, EngineError, LockstepError
from lockstep.rollout.reply_progress import report_progress
from lockstep.seeds import seed_for
from lockstep.text import reason_of
from lockstep.types import ClientRequest, Completion, NativeRollouts, Request, RolloutEngine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request that has no answer yet."""

    ask: ClientRequest
    seed: int
    future: Future[Completion] = field(default_factory=Future)


class EngineThread:
    """Implements types.Sampler around an engine, which no other code may use until `close`.

    At most `running` requests are in the engine at once; at most `waiting` others wait here, those of different keys in turn, so
    that a key with many requests delays no other. A failure of the engine reaches all open requests; later ones are served again.
    """

    def __init__(
        self, engine: RolloutEngine, *, seed: tuple[int | str, ...] = ("serve",), running: int = 64, waiting: int = 1024
    ) -> None:
        self._engine, self._seed, self._most_running, self._most_waiting = engine, seed, running, waiting
        self._changed = threading.Condition()
        """Guards everything below."""
        self._waiting: OrderedDict[str, deque[_Open]] = OrderedDict()
        """By key; the first key is the next to be served."""
        self._running: dict[str, _Open] = {}
        self._open: dict[str, _Open] = {}
        """Waiting and running ones by id."""
        self._gone: list[str] = []
        """Ids of running ones that were cancelled."""
        self._unseeded: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._thread.start()

    # --- Sampler --------------------------------------------------------------------------------------------------
    def sample(self, ask: ClientRequest) -> Future[Completion]:
        """Queue a request. Raises BusyError if too many wait, EngineError if the thread is closed or the id is in use."""
        with self._changed:
            if self._closed:
                raise EngineError("the engine is closed", where=ask.id)
            if ask.id in self._open:
                raise EngineError(
                    "a request with this id is still running", where=ask.id, fix="give each request its own id"
                )
            if sum(map(len, self._waiting.values())) >= self._most_waiting:
                raise BusyError(
                    f"the queue is full: {self._most_waiting} requests are waiting",
                    where=ask.id,
                    fix="send it again later",
                )
            seed = ask.seed
            if seed is None:
                seed = seed_for(*self._seed, ask.key, self._unseeded[ask.key])
                self._unseeded[ask.key] += 1
            opened = self._open[ask.id] = _Open(ask, seed)
            self._waiting.setdefault(ask.key, deque()).append(opened)
            self._changed.notify()
            return opened.future

    def cancel(self, id: str) -> None:
        """Free what a request holds, within a few tokens."""
        with self._changed:
            opened = self._open.pop(id, None)
            if opened is None:
                return
            if id in self._running:
                self._gone.append(id)
            else:
                queue = self._waiting[opened.ask.key]
                queue.remove(opened)
                if not queue:
                    del self._waiting[opened.ask.key]
            self._changed.notify()
        if opened.future.cancel():
            opened.future.set_running_or_notify_cancel()  # wakes those who wait for it

    def counts(self) -> dict[str, int]:
        """Return the numbers of open requests, and of what the engine holds for them if it can tell."""
        with self._changed:
            waiting = sum(map(len, self._waiting.values()))
            held = self._engine.held if isinstance(self._engine, NativeRollouts) else len(self._running)
            return {"open": len(self._open), "waiting": waiting, "running": len(self._running), "held": held}

    def close(self) -> None:
        """End the thread; open requests fail. The engine is idle then, and belongs to the caller again."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                while not (self._waiting or self._gone or self._closed):
                    self._changed.wait()
            try:
                self._between()
                for completion in self._engine.completed(self._between):
                    with self._changed:
                        opened = self._running.pop(completion.request.id, None)
                    if opened is not None:
                        self._settle(opened, completion)
            except Exception as error:  # the engine has dropped all its requests
                if not self._closed:
                    log.exception("the engine failed")
                self._fail(error)
        self._fail(EngineError("the engine was closed before the reply was done"))
        if isinstance(self._engine, NativeRollouts):
            self._engine.forget()

    def _between(self) -> None:
        """Cancel and admit. Raises _Closed once the thread is closed, which makes a native engine drop its requests."""
        with self._changed:
            if self._closed and isinstance(self._engine, NativeRollouts):
                raise _Closed
            if self._closed:
                return
            gone, self._gone = self._gone, []
            for id in gone:
                if isinstance(self._engine, NativeRollouts):  # others run it to its end, which no client reads
                    self._engine.cancel(id)
                    self._running.pop(id, None)
            running = [opened.ask for opened in self._running.values()]
            room = self._most_running - len(self._running)
            admitted = [self._next() for _ in range(min(sum(map(len, self._waiting.values())), room))]
            for opened in admitted:
                self._running[opened.ask.id] = opened
        report_progress(self._engine, running)
        for opened in admitted:  # one by one: a request that is refused leaves the others alone
            try:
                self._engine.submit([self._request(opened)])
            except LockstepError as error:
                with self._changed:
                    self._running.pop(opened.ask.id)
                self._settle(opened, error)

    def _next(self) -> _Open:
        """Take the first request of the first key, which then comes last."""
        key, queue = self._waiting.popitem(last=False)
        opened = queue.popleft()
        if queue:
            self._waiting[key] = queue
        return opened

    def _request(self, opened: _Open) -> Request:
        ask = opened.ask
        group = hashlib.blake2b(
            array("q", ask.prompt_ids).tobytes(), digest_size=16
        ).hexdigest()  # same prompt, same group
        version = self._engine.version
        return Request(ask.id, ask.prompt_ids, group, opened.seed, ask.sampling, version, keep=True)

    def _fail(self, error: Exception) -> None:
        """Answer the running requests with an error, and the waiting ones too if the thread is closed."""
        with self._changed:
            failed = list(self._running.values())
            self._running.clear()
            self._gone.clear()
            if self._closed:
                failed += [opened for queue in self._waiting.values() for opened in queue]
                self._waiting.clear()
        for opened in failed:
            self._settle(opened, error)

    def _settle(self, opened: _Open, result: Completion | Exception) -> None:
        with self._changed:
            self._open.pop(opened.ask.id, None)
        with suppress(InvalidStateError):  # cancelled meanwhile
            if isinstance(result, Exception):
                opened.future.set_exception(_said(result))
            else:
                opened.future.set_result(result)


class _Closed(Exception):
    """The thread is closed while requests run."""


def _said(error: Exception) -> EngineError:
    """Return what a client is told."""
    if isinstance(error, EngineError):
        return EngineError(error.what, where=error.where, fix=error.fix)
    if isinstance(error, _Closed):
        return EngineError("the engine was closed before the reply was done")
    return EngineError(f"the engine failed: {reason_of(error)}")
