"""The run's side of an engine in a separate process: a RolloutEngine that forwards each call to the engine process."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import IO, TypeVar

import numpy as np
import torch

from lockstep import errors
from lockstep.device import make_room
from lockstep.errors import DEFECT, EngineError, LockstepError
from lockstep.rollout.requests import check_clean, check_idle, check_settled, check_version
from lockstep.rollout.vllm import bucket, wire
from lockstep.rollout.vllm.environment import prepare
from lockstep.rollout.vllm.settings import VllmSettings
from lockstep.sync.fingerprint import Fingerprints, TensorPrint
from lockstep.types import Completion, FinishReason, Forward, ForwardReport, Request, Sampling, TokenIds, WeightStream

Answer = TypeVar("Answer", bound=wire.Message)
POLL_SECONDS = 0.01
"""Seconds to wait for messages between two calls of `between`."""
TAIL = 2000
"""Number of characters of the process's output that an error shows."""


class EngineProcess:
    """Implements types.RolloutEngine over an engine in a separate process, with sleep(), wake() and fingerprints()."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], device: torch.device, *, woken: int = 0
    ) -> None:
        """Start `command`, with the number of the channel's file descriptor as last argument, and wait until it is ready.

        Weights pass through memory of `device`, a CUDA device, or of the host. `woken`: bytes of a GPU that the engine takes when
        it wakes. Raises EngineError with the end of the process's output if it does not start.
        """
        self.version = -1
        self.forward = Forward()
        self.seconds = 0.0
        """Seconds that the start took."""
        self._device, self._woken = device, woken
        self._bucket: bucket.Bucket | None = None
        self._running: dict[int, Request] = {}
        self._keys = itertools.count()
        self._done: deque[Completion] = deque()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(number)],
                env=dict(environment),
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt is handled by the owner, who ends this process when it is done
            )
        self._channel = wire.Channel(ours)
        try:
            self.seconds = self._answer_of(wire.Ready).seconds
        except BaseException:
            self.close()
            raise

    # --- RolloutEngine --------------------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """Pass requests on. Raises the engine's error for an invalid one."""
        if not requests:
            return
        for request in requests:
            check_version(request, self.version)
        self._make_room()
        prompts: dict[TokenIds, int] = {}
        samplings: dict[Sampling, int] = {}
        keys = [next(self._keys) for _ in requests]
        rows = tuple(
            wire.Row(
                key,
                f"{key}:{r.id}",
                r.group,
                prompts.setdefault(r.prompt_ids, len(prompts)),
                samplings.setdefault(r.sampling, len(samplings)),
                r.seed,
                r.version,
                r.prefix,
            )
            for key, r in zip(keys, requests, strict=True)
        )
        message = wire.Submit(rows, tuple(samplings), tuple(map(len, prompts)))
        self._ask(message, wire.packed(list(prompts)))
        self._running |= dict(zip(keys, requests, strict=True))

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they arrive, until nothing runs."""
        while self._running or self._done:
            while self._done:
                yield self._done.popleft()
            while between is not None and not self._done and self._running and not self._channel.waiting(POLL_SECONDS):
                between()
            if self._running and not self._done:  # otherwise they came with the answer to a submit
                message, payload = self._receive()
                match message:
                    case wire.Completions(entries):
                        self._take(entries, payload)
                    case wire.Failed():
                        self._running.clear()
                        raise self._error(message)
                    case other:
                        raise self._unexpected(other)

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return the log-probability of every token but the first, at temperature 1."""
        rows = [tuple(ids) for ids in sequences]
        self._make_room()
        self._channel.send(wire.Score(tuple(map(len, rows))), wire.packed(rows))
        lengths = self._answer_of(wire.Scores).lengths
        return wire.unpacked_floats(self._payload, lengths)

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Make the engine compute in this way from now on. Nothing may be running. Raises the engine's error; it then computes
        in the precision of its weights.
        """
        check_settled(len(self._running))
        self.forward = Forward()
        self._channel.send(wire.Compute(forward))
        report = self._answer_of(wire.Computing).report
        self.forward = forward
        return report

    def load(self, weights: WeightStream, version: int) -> None:
        """Send weights through the bucket and make the engine `version`. Nothing may be running."""
        check_idle(len(self._running), version)
        check_clean(self.forward, f"weights {version} arrived")
        self.version = -1
        self._ask(wire.Load(version))
        for load in bucket.loads(weights, bucket.SIZE):
            self._fill(load)
            self._ask(wire.Take(tuple(part for part, _ in load)))
        self._ask(wire.Loaded())
        self.version = version

    def weights(self, only: Collection[str] = ()) -> WeightStream:
        """Yield the engine's weights, copied here one tensor at a time: for close inspection, not for each proof."""
        for name in only or self.fingerprints().tensors:
            yield name, self._fetch(name)

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of all the engine's weights, computed in its process; only the numbers come here."""
        self._channel.send(wire.Fingerprint())
        entries = self._answer_of(wire.Prints).entries
        return Fingerprints({e.name: TensorPrint(int(e.value, 16), e.dtype, e.shape, e.bytes) for e in entries})

    def _make_room(self) -> None:
        """Leave the engine room on the GPU: its first request takes the memory of keys and values."""
        if not self._running:
            make_room(self._woken)

    def sleep(self) -> None:
        """Free the memory of keys and values."""
        self._ask(wire.Sleep())

    def wake(self) -> None:
        self._ask(wire.Wake())

    def close(self) -> None:
        """End the process, which frees all its memory."""
        if self._process.poll() is None:
            try:
                self._channel.send(wire.Close())
                self._process.wait(timeout=30)
            except (EngineError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._channel.close()
        self._output.close()
        self._bucket = None
        self._running.clear()
        self._done.clear()

    # --- channel --------------------------------------------------------------------------------------------------
    def _ask(self, message: wire.Message, payload: bytes = b"") -> None:
        """Send a message that is answered by Done."""
        self._channel.send(message, payload)
        self._answer_of(wire.Done)

    def _answer_of(self, kind: type[Answer]) -> Answer:
        """Return the next answer. Raises EngineError for one of another kind, and the engine's own error."""
        message = self._answer()
        if not isinstance(message, kind):
            raise self._unexpected(message)
        return message

    def _answer(self) -> wire.Message:
        """Return the next message that is not a completion; its bytes are in `_payload`. Raises the engine's error."""
        while True:
            message, self._payload = self._receive()
            match message:
                case wire.Completions(entries):
                    self._take(entries, self._payload)
                case wire.Failed():
                    raise self._error(message)
                case _:
                    return message

    def _receive(self) -> tuple[wire.Message, memoryview]:
        try:
            return self._channel.receive()
        except EngineError as error:
            code = self._process.wait()
            raise EngineError(
                f"the engine's process ended with code {code}; the end of its output:\n{self._tail()}",
                where="rollout.vllm",
                fix="look for the cause in this output, or set rollout.vllm.process=in to run vLLM in the run's own process",
            ) from error

    def _take(self, entries: tuple[wire.Finished, ...], payload: memoryview) -> None:
        tokens = sum(entry.tokens for entry in entries)
        ids: list[int] = np.frombuffer(payload[: 8 * tokens], np.int64).tolist()
        logprobs: list[float] = np.frombuffer(payload[8 * tokens :], np.float64).tolist()
        start = 0
        for entry in entries:
            span = slice(start, start + entry.tokens)
            start += entry.tokens
            request, finish = self._running.pop(entry.key), FinishReason(entry.finish)
            self._done.append(Completion(request, tuple(ids[span]), tuple(logprobs[span]), finish, entry.version))

    def _fetch(self, name: str) -> torch.Tensor:
        """Return one of the engine's tensors, copied here."""
        self._channel.send(wire.Send((name,)))
        message, payload = self._answer(), self._payload
        if not isinstance(message, wire.Tensor):
            raise EngineError(
                "the engine has no tensor of this name",
                where=name,
                fix="give learner and engine the same model and adapter",
            )
        self._answer_of(wire.Done)
        dtype: torch.dtype = getattr(torch, message.part.dtype)
        return torch.frombuffer(payload, dtype=torch.uint8).view(dtype).view(message.part.shape)

    def _fill(self, load: list[tuple[wire.Part, torch.Tensor]]) -> None:
        size = max(bucket.SIZE, bucket.needed(load))
        if self._bucket is None or self._bucket.size < size:
            larger = bucket.Bucket(size, self._device)
            try:
                self._ask(larger.description())
            finally:
                larger.opened()
            self._bucket = larger
        for part, tensor in load:
            self._bucket.put(part, tensor.detach())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _error(self, failure: wire.Failed) -> LockstepError:
        kind = getattr(errors, failure.kind, None) if failure.kind else None
        if isinstance(kind, type) and issubclass(kind, LockstepError) and kind is not errors.ConfigError:
            return kind(failure.what, where=failure.where, fix=failure.fix)
        return EngineError(failure.what, where=failure.where or "engine process", fix=failure.fix or DEFECT)

    def _unexpected(self, message: wire.Message) -> EngineError:
        return EngineError(
            f"the engine process answered with a {type(message).__name__} message",
            where="engine process",
            fix=DEFECT,
        )

    def _tail(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-TAIL:]


def vllm_process(settings: VllmSettings, device: torch.device, *, through_host: bool) -> EngineProcess:
    """Start vLLM in a separate process on the GPU `device`; weights pass through its memory, or `through_host`."""
    import json

    if device.type != "cuda":
        raise EngineError("vLLM needs a CUDA GPU", where="rollout.engine=vllm", fix="set rollout.engine=native")
    if not through_host:  # memory of expandable segments has no handle that another process could open
        prepare(dict(os.environ), cuda_started=True)
    environment = dict(os.environ)
    prepare(environment, cuda_started=False)
    visible = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    index = device.index or 0
    environment["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)  # uses this process's import path
    command = [sys.executable, "-m", "lockstep.rollout.vllm.child", json.dumps(asdict(settings))]
    woken = settings.kv_cache_bytes if settings.sleep else 0
    return EngineProcess(command, environment, torch.device("cpu") if through_host else device, woken=woken)
