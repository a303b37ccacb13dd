"""Messages between a run and its engine in a separate process, over a private socket pair.

A frame is a JSON header, which is one of the records below, and numbers as raw bytes. Nothing is pickled, and no other process
can connect: the socket has no name. Weights are not sent this way but in a bucket (bucket.py) that both sides map; tensors are
sent only when a proof has failed and their elements must be compared.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, get_args

import numpy as np

from lockstep import codec
from lockstep.errors import DEFECT, EngineError
from lockstep.types import Forward, ForwardReport, Sampling

HEAD = struct.Struct("<IQ")
LONGEST_HEADER = 2**28
Number = TypeVar("Number", int, float)


# --- to the engine --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Row:
    """One request; its prompt and its sampling are given by their index in the message."""

    key: int
    id: str
    group: str
    prompt: int
    sampling: int
    seed: int
    version: int
    prefix: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue requests. The bytes are the different prompts, one after the other. Answered by Done."""

    rows: tuple[Row, ...]
    samplings: tuple[Sampling, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Score sequences; the bytes are their ids, one after the other. Answered by Scores."""

    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Announce weights: buckets (Open, Take) until Loaded. `version` is theirs. Answered by Done after Loaded."""

    version: int


@dataclass(frozen=True, slots=True)
class Open:
    """Map a bucket: a file on this host, or memory of the GPU by CUDA IPC. Answered by Done."""

    path: str
    """Path of the file; "" for memory of the GPU."""
    size: int
    handle: tuple[str, ...] = ()
    """Arguments of torch's rebuild_cuda_tensor that find the memory, as text: see bucket.py."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor in the bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Take:
    """Copy the tensors that are in the bucket now. Answered by Done, after which the bucket is filled again."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """All weights were sent. Answered by Done."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint all weights in the engine's process. Answered by Prints."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send these tensors, all if none is named. Answered by one Tensor each, then Done."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the memory of keys and values. Answered by Done."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Allocate it again. Answered by Done."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Set the engine's Forward. Answered by Computing."""

    forward: Forward


@dataclass(frozen=True, slots=True)
class Close:
    """End the process. Not answered."""


# --- from the engine ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has started."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """Answer: the last request is done."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One completion of Completions."""

    key: int
    tokens: int
    finish: str
    version: int


@dataclass(frozen=True, slots=True)
class Completions:
    """Finished completions, sent at any time. The bytes are all ids (int64), then all log-probabilities (float64)."""

    entries: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Answer to Score. The bytes are the log-probabilities (float64), one after the other."""

    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Print:
    """A fingerprint; `value` is 16 hex digits, because some JSON readers lose precision above 2^53."""

    name: str
    value: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Prints:
    """The fingerprints of all weights."""

    entries: tuple[Print, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor; the bytes are its elements."""

    part: Part


@dataclass(frozen=True, slots=True)
class Computing:
    """Effect of Compute."""

    report: ForwardReport


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer: the last request failed; `kind` is the error's class in lockstep.errors, "" if it has none there."""

    kind: str
    what: str
    where: str
    fix: str


Message: TypeAlias = (
    Submit | Score | Load | Open | Take | Loaded | Fingerprint | Send | Sleep | Wake | Compute | Close
    | Ready | Done | Completions | Scores | Prints | Tensor | Computing | Failed
)  # fmt: skip
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


class Channel:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(True)

    @classmethod
    def inherited(cls, number: int) -> Channel:
        """Return the end whose file descriptor was passed to this process."""
        return cls(socket.socket(fileno=number))

    def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send a message. Raises EngineError if the other side is gone."""
        body = {"kind": type(message).__name__, "body": codec.to_json(message)}
        header = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        try:
            self._end.sendall(HEAD.pack(len(header), len(payload)) + header)
            if len(payload):
                self._end.sendall(payload)
        except OSError as error:
            raise EngineError(f"the other process is gone: {error}", where="engine process") from error

    def receive(self) -> tuple[Message, memoryview]:
        """Return the next message and its bytes. Raises EngineError if the other side is gone or sends something unknown."""
        header, payload = HEAD.unpack(self._exactly(HEAD.size))
        if header > LONGEST_HEADER:
            raise EngineError(
                f"a message has a header of {header} bytes, which is too long", where="engine process", fix=DEFECT
            )
        try:
            frame = json.loads(self._exactly(header).tobytes())
            message = codec.from_json(KINDS[frame["kind"]], frame["body"])
        except (codec.CodecError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"a message cannot be read: {error}", where="engine process", fix=DEFECT) from error
        return message, self._exactly(payload)

    def waiting(self, seconds: float = 0.0) -> bool:
        """Return whether something can be received within `seconds` (the end of the other side counts)."""
        return bool(select.select([self._end], [], [], seconds)[0])

    def close(self) -> None:
        self._end.close()

    def _exactly(self, size: int) -> memoryview:
        buffer = memoryview(bytearray(size))
        place = 0
        while place < size:
            try:
                count = self._end.recv_into(buffer[place:])
            except OSError as error:
                raise EngineError(f"the other process is gone: {error}", where="engine process") from error
            if not count:
                raise EngineError("the other process is gone", where="engine process")
            place += count
        return buffer


def packed(rows: list[tuple[int, ...]]) -> bytes:
    """Return ids of several sequences, one after the other."""
    return np.concatenate([np.asarray(row, np.int64) for row in rows]).tobytes() if rows else b""


def unpacked(payload: memoryview, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the sequences of `packed`."""
    ids: list[int] = np.frombuffer(payload, np.int64).tolist()
    return [tuple(part) for part in _split(ids, lengths)]


def unpacked_floats(payload: memoryview, lengths: tuple[int, ...]) -> list[tuple[float, ...]]:
    values: list[float] = np.frombuffer(payload, np.float64).tolist()
    return [tuple(part) for part in _split(values, lengths)]


def _split(values: list[Number], lengths: tuple[int, ...]) -> list[list[Number]]:
    if sum(lengths) != len(values):
        what = f"a message has {len(values)} numbers, but {sum(lengths)} were announced"
        raise EngineError(what, where="engine process", fix=DEFECT)
    parts, start = [], 0
    for length in lengths:
        parts.append(values[start : start + length])
        start += length
    return parts
