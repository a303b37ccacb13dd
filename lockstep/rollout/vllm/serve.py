"""The server of an engine in a separate process: it runs a RolloutEngine and answers the messages of a channel."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, assert_never

import numpy as np
import torch

from lockstep.errors import DEFECT, EngineError, LockstepError
from lockstep.rollout.vllm import wire
from lockstep.rollout.vllm.bucket import mapped, view
from lockstep.rollout.vllm.wire import Channel
from lockstep.sync.fingerprint import fingerprint
from lockstep.sync.proof import Sleeper
from lockstep.types import Completion, Request, RolloutEngine, WeightStream

FLUSH_SECONDS = 0.05
"""Longest delay of finished completions, in seconds; they are sent then, at the latest when the next one finishes."""


class Closed(Exception):
    """The owner sent Close or is gone."""


class Server:
    """Answers the owner's messages until it closes."""

    def __init__(self, engine: RolloutEngine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._memory: torch.Tensor | None = None
        self._keys: dict[str, int] = {}
        self._unsent: list[tuple[int, Completion]] = []
        self._flushed = 0.0
        self._work = False
        if hasattr(engine, "between"):
            engine.between = self._between

    def run(self, started: float) -> None:
        """Send Ready and answer until the owner closes or is gone. `started` is the start time of the process (time.time())."""
        self._channel.send(wire.Ready(time.time() - started))
        try:
            while True:
                self._answer()
                while self._work:
                    self._work = False
                    self._drive()
        except Closed:
            return

    def _drive(self) -> None:
        """Let the engine work until nothing is left; send completions and receive messages in between."""
        try:
            for completion in self._engine.completed():
                self._unsent.append((self._keys.pop(completion.request.id), completion))
                self._between()
        except Closed:
            raise
        except Exception as error:  # running requests are lost, and the engine with them
            self._channel.send(_failure(error))
            raise Closed from error
        self._flush()

    def _between(self) -> None:
        """Work between two steps, or two completions: send finished completions, and answer messages."""
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()
        while self._channel.waiting():
            self._answer()

    def _answer(self) -> None:
        """Take one message and execute it."""
        message, payload = self._receive()
        try:
            self._do(message, payload)
        except Closed:
            raise
        except Exception as error:
            self._channel.send(_failure(error))

    def _receive(self) -> tuple[wire.Message, memoryview]:
        try:
            return self._channel.receive()
        except EngineError as error:
            raise Closed from error

    def _do(self, message: wire.Message, payload: memoryview) -> None:
        match message:
            case wire.Submit():
                self._submit(message, payload)
            case wire.Score():
                rows = self._engine.score(wire.unpacked(payload, message.lengths))
                values = np.asarray([value for row in rows for value in row], np.float64)
                self._channel.send(wire.Scores(tuple(map(len, rows))), values.tobytes())
            case wire.Load():
                self._engine.load(self._arriving(), message.version)
                self._channel.send(wire.Done())
            case wire.Open():
                self._memory = mapped(message)
                self._channel.send(wire.Done())
            case wire.Fingerprint():
                self._channel.send(wire.Prints(_prints(self._engine.weights())))
            case wire.Send():
                self._send(frozenset(message.names))
            case wire.Sleep() | wire.Wake():
                if isinstance(self._engine, Sleeper):
                    (self._engine.sleep if isinstance(message, wire.Sleep) else self._engine.wake)()
                self._channel.send(wire.Done())
            case wire.Compute():
                self._channel.send(wire.Computing(self._engine.set_forward(message.forward)))
            case wire.Close():
                raise Closed
            case (
                wire.Take() | wire.Loaded() | wire.Ready() | wire.Done() | wire.Completions() | wire.Scores()
                | wire.Prints() | wire.Tensor() | wire.Computing() | wire.Failed()
            ):  # fmt: skip
                raise EngineError(
                    f"the engine process received an unexpected {type(message).__name__} message",
                    where="engine process",
                    fix=DEFECT,
                )
            case other:
                assert_never(other)

    def _submit(self, message: wire.Submit, payload: memoryview) -> None:
        prompts = wire.unpacked(payload, message.lengths)
        requests = [
            Request(r.id, prompts[r.prompt], r.group, r.seed, message.samplings[r.sampling], r.version, r.prefix)
            for r in message.rows
        ]
        self._engine.submit(requests)
        self._keys |= {row.id: row.key for row in message.rows}
        self._work = True
        self._channel.send(wire.Done())

    def _arriving(self) -> WeightStream:
        """Yield the tensors of one Load, bucket by bucket; each is valid until the next is requested."""
        self._channel.send(wire.Done())
        while True:
            message, _ = self._receive()
            match message:
                case wire.Open():
                    self._memory = mapped(message)
                case wire.Take() if self._memory is not None:
                    for part in message.parts:
                        yield part.name, view(self._memory, part)
                    if self._memory.is_cuda:
                        torch.cuda.synchronize()
                case wire.Loaded():
                    return
                case _:
                    raise EngineError(
                        f"a transfer of weights was interrupted by a {type(message).__name__} message",
                        where="engine process",
                        fix=DEFECT,
                    )
            self._channel.send(wire.Done())

    def _send(self, names: frozenset[str]) -> None:
        for name, tensor in self._engine.weights():
            if not names or name in names:
                part = wire.Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0)
                flat = tensor.detach().contiguous().cpu().reshape(-1)
                self._channel.send(wire.Tensor(part), flat.view(torch.uint8).numpy().data)
        self._channel.send(wire.Done())

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if not self._unsent:
            return
        entries = tuple(wire.Finished(key, len(c.ids), c.finish.value, c.version) for key, c in self._unsent)
        ids = np.asarray([token for _, c in self._unsent for token in c.ids], np.int64)
        logprobs = np.asarray([value for _, c in self._unsent for value in c.logprobs], np.float64)
        self._unsent.clear()
        self._channel.send(wire.Completions(entries), ids.tobytes() + logprobs.tobytes())


def _prints(stream: WeightStream) -> tuple[wire.Print, ...]:
    return tuple(
        wire.Print(name, f"{found.value:016x}", found.dtype, found.shape, found.bytes)
        for name, found in fingerprint(stream).tensors.items()
    )


def _failure(error: Exception) -> wire.Failed:
    if isinstance(error, LockstepError):
        return wire.Failed(type(error).__name__, error.what, error.where, error.fix)
    text = "".join(traceback.format_exception(error))
    return wire.Failed("", f"{type(error).__name__}: {error}\n{text[-3000:]}", "", "")


def serve(channel: Channel, build: Callable[[], RolloutEngine], started: float) -> None:
    """Build an engine and serve it; errors that prevent its start are sent to the owner."""
    try:
        engine: Any = build()
    except Exception as error:
        channel.send(_failure(error))
        return
    try:
        Server(engine, channel).run(started)
    finally:
        engine.close()
        channel.close()
