"""Shared memory that transfers weights between two processes of one host: GPU memory by CUDA IPC, or a file in /dev/shm.

The sender fills it, the receiver copies from it, and only then is it filled again. It grows to the largest tensor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import DEFECT, EngineError
from lockstep.rollout.vllm.wire import Open, Part
from lockstep.types import WeightStream

SIZE = 2**29
"""Bytes of a bucket, unless a tensor needs more."""
ALIGNMENT = 256
SHARED_MEMORY = Path("/dev/shm")


class Bucket:
    """The sender's side."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate it. On the CPU it is a file, removed from the file system as soon as the receiver has it open (`opened`)."""
        self.size = size
        self._path: Path | None = None
        if device.type == "cuda":
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            number, path = tempfile.mkstemp(prefix="lockstep-", dir=folder)
            os.ftruncate(number, size)
            os.close(number)
            self._path = Path(path)
            self.memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def description(self) -> Open:
        """Return the data that the receiver needs to map it."""
        if self._path is not None:
            return Open(str(self._path), self.size)
        return Open("", self.size, cuda_handle(self.memory))

    def opened(self) -> None:
        """Note that the receiver has mapped it, or cannot: no other process needs to find it any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def put(self, part: Part, tensor: Tensor) -> None:
        view(self.memory, part).copy_(tensor)


def mapped(description: Open) -> Tensor:
    """Return the receiver's view of a bucket. Raises EngineError if this process cannot map it."""
    try:
        if description.path:
            return torch.from_file(description.path, shared=True, size=description.size, dtype=torch.uint8)
        return from_cuda_handle(description.handle, description.size)
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"this process cannot map the memory that transfers weights: {str(error)[:300]}",
            where="rollout.vllm.transport",
            fix="set rollout.vllm.transport=copy, or rollout.vllm.process=in",
        ) from error


def view(memory: Tensor, part: Part) -> Tensor:
    """Return a tensor of the bucket. Raises EngineError if it exceeds the bucket."""
    dtype: torch.dtype | None = getattr(torch, part.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"torch has no dtype {part.dtype!r}", where=part.name, fix=DEFECT)
    count = 1
    for size in part.shape:
        count *= size
    end = part.offset + count * dtype.itemsize
    if part.offset < 0 or part.offset % ALIGNMENT or end > len(memory):
        raise EngineError(
            f"bytes {part.offset} to {end} of the shared memory, which has {len(memory)}, cannot hold the tensor",
            where=part.name,
            fix=DEFECT,
        )
    return memory[part.offset : end].view(dtype).view(part.shape)


def loads(weights: WeightStream, size: int) -> Iterator[list[tuple[Part, Tensor]]]:
    """Yield the stream in loads of at most `size` bytes; a larger tensor comes alone."""
    load: list[tuple[Part, Tensor]] = []
    end = 0
    for name, tensor in weights:
        room = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if load and end + room > size:
            yield load
            load, end = [], 0
        part = Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
        load.append((part, tensor))
        end += room
    if load:
        yield load


def needed(load: list[tuple[Part, Tensor]]) -> int:
    """Return the bytes of a bucket that holds this load."""
    part, tensor = load[-1]
    return part.offset + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def cuda_handle(memory: Tensor) -> tuple[str, ...]:
    """Return, as text, what torch.multiprocessing would pickle for a CUDA tensor: numbers, flags, handles in hex."""
    from torch.multiprocessing.reductions import reduce_tensor

    reduced: Any = reduce_tensor(memory)
    values = reduced[1][7:]  # after the tensor's own geometry and device: handle, sizes, flags, counters, event
    return tuple(_text(value) for value in values)


def from_cuda_handle(handle: tuple[str, ...], size: int) -> Tensor:
    """Return the memory behind a handle of another process on the same GPU, which is this process's current one."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    torch.cuda.init()
    device = torch.cuda.current_device()
    typed: Any = torch.storage.TypedStorage
    geometry = (torch.Tensor, (size,), (1,), 0, typed, torch.uint8, device)
    memory: Tensor = rebuild_cuda_tensor(*geometry, *(_value(text) for text in handle))
    return memory


def _text(value: object) -> str:
    match value:
        case bool():
            return f"flag:{int(value)}"
        case int():
            return f"int:{value}"
        case bytes():
            return f"bytes:{value.hex()}"
        case None:
            return "none:"
        case _:
            raise EngineError(
                f"the handle of the CUDA memory has a field of an unknown type, {type(value).__name__}",
                fix="set rollout.vllm.transport=copy",
            )


def _value(text: str) -> object:
    kind, _, body = text.partition(":")
    match kind:
        case "flag":
            return bool(int(body))
        case "int":
            return int(body)
        case "bytes":
            return bytes.fromhex(body)
        case "none":
            return None
        case _:
            raise EngineError(
                f"the handle of the CUDA memory has an unknown field, {text[:20]!r}",
                fix="set rollout.vllm.transport=copy",
            )
