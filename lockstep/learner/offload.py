"""Keeps master weights and moments in main memory (optimizer.offload): a step copies them to the device and back in batches.

While the device steps one batch, the next is copied in and the previous one out, on streams of their own, through two buffers.
A batch holds pieces of tensors. They are cut where the optimizer's result for a piece does not depend on the rest of the tensor
(Muon's tensors stay whole), so the results equal those of a run without offload bit for bit. On a CPU copies and steps follow
one another.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lockstep.errors import LearnerError
from lockstep.learner.adamw8bit import BLOCK
from lockstep.learner.optimizers import Inner

CHUNK = 2**24
"""Weights of a batch, at most, unless a single tensor that cannot be cut has more. A multiple of the block of 8-bit moments."""
ALIGNMENT = 512
"""Bytes: kernels read a tensor that begins at a multiple of this as they read one of its own."""
MASTER = "master"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Weights of a tensor that are stepped together: all, or a stretch of the flat tensor."""

    name: str
    group: int
    """Number of the optimizer's parameter group."""
    span: slice
    shape: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A piece in a buffer of the device: its master, if that is not the parameter, and its state."""

    piece: _Piece
    live: dict[str, Tensor]


_Queued: TypeAlias = tuple[list[_Loaded], torch.cuda.Event | None]
"""A batch in a buffer, and the event of its arrival there."""


class HostState:
    """Masters and moments of some parameters, in main memory: pinned, if the parameters are on a GPU."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter], inner: Sequence[Inner]
    ) -> None:
        """Copy the parameters as masters. `masters` are their stand-ins. Raises LearnerError if memory cannot be pinned."""
        self._parameters, self._masters = parameters, masters
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._batches = {one.names: _batches(one, masters, parameters) for one in inner}
        pinned: list[int] = []
        weakref.finalize(self, _unpin, pinned).atexit = False
        self._kept: dict[str, dict[str, Tensor]] = {}
        """Per parameter: its master, if that is not the parameter, and its moments."""
        for one in inner:
            for name in one.names:
                self._kept[name] = {
                    key: _host_tensor(shape, dtype, self._device, pinned)
                    for key, (shape, dtype) in _layout(one, masters[name], parameters[name]).items()
                }
                if MASTER in self._kept[name]:
                    self._kept[name][MASTER].copy_(parameters[name].detach().cpu())
        self._up, self._down = _Lane(self._device), _Lane(self._device)
        held = sum(tensor.nbytes for kept in self._kept.values() for tensor in kept.values())
        self.note = f"masters and moments in main memory: {held / 2**30:.1f} GiB"
        """Line for the log."""

    def master(self, name: str) -> Tensor:
        """Return a master that is not the parameter."""
        return self._kept[name][MASTER]

    def keep(self, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take over saved moments; returns the tensors that hold them."""
        moments = {key: tensor for key, tensor in self._kept[name].items() if key != MASTER}
        for key, tensor in moments.items():
            tensor.copy_(saved[key])
        return moments

    def step(self, inner: Inner, lr: float) -> None:
        """Make a step of one optimizer, batch by batch, and round the masters to the parameters."""
        for name in inner.names:
            if self._masters[name] not in inner.optimizer.state:
                self._begin(inner, name)
        batches = self._batches[inner.names]
        if not batches:
            return
        room = max(sum(_room(tensor) for piece in batch for tensor in self._host(piece).values()) for batch in batches)
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in batches[:2]]
        free = [self._event()] * 2
        """The point from which each buffer may be written: its memory may serve earlier work until then."""
        queued = [self._load(batches[0], buffers[0], free[0])]
        for number in range(len(batches)):
            if number + 1 < len(batches):
                other = (number + 1) % 2
                queued.append(self._load(batches[number + 1], buffers[other], free[other]))
            loaded, arrived = queued.pop(0)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            self._update(inner, loaded, lr)
            free[number % 2] = self._store(loaded)
        for event in free:
            if event is not None:
                event.synchronize()  # from here on, main memory may be read

    def _begin(self, inner: Inner, name: str) -> None:
        """Set the state before the first step as the optimizer would: zeros."""
        state: dict[str, Tensor] = {}
        if "step" in (inner.keys or ()):
            fused = inner.optimizer.param_groups[0].get("fused")
            state["step"] = torch.zeros((), device=self._device if fused else "cpu")
        state |= {key: tensor for key, tensor in self._kept[name].items() if key != MASTER}
        inner.optimizer.state[self._masters[name]] = state

    # --- a batch --------------------------------------------------------------------------------------------------
    def _host(self, piece: _Piece) -> dict[str, Tensor]:
        """Return what main memory holds of a piece, flat."""
        blocks = slice(piece.span.start // BLOCK, -(-piece.span.stop // BLOCK))
        kept = self._kept[piece.name]
        return {key: tensor.view(-1)[blocks if _is_scale(key) else piece.span] for key, tensor in kept.items()}

    def _load(self, batch: Sequence[_Piece], buffer: Tensor, after: torch.cuda.Event | None) -> _Queued:
        """Copy a batch into a buffer, as soon as that is free."""
        loaded, place = [], 0
        for piece in batch:
            live = {}
            for key, tensor in self._host(piece).items():
                live[key] = buffer[place : place + tensor.nbytes].view(tensor.dtype)
                place += _room(tensor)
            loaded.append(_Loaded(piece, live))

        def copy() -> None:
            for one in loaded:
                for key, tensor in self._host(one.piece).items():
                    one.live[key].copy_(tensor, non_blocking=True)

        return loaded, self._up.run(copy, after)

    def _store(self, loaded: Sequence[_Loaded]) -> torch.cuda.Event | None:
        """Copy a batch back when it is stepped; returns the point from which its buffer is free."""

        def copy() -> None:
            for one in loaded:
                for key, tensor in self._host(one.piece).items():
                    tensor.copy_(one.live[key], non_blocking=True)

        return self._down.run(copy, self._event())

    def _update(self, inner: Inner, loaded: Sequence[_Loaded], lr: float) -> None:
        """Step the pieces in place of their tensors."""
        state, groups = inner.optimizer.state, inner.optimizer.param_groups
        whole, weights = [group["params"] for group in groups], [self._weight(one, inner) for one in loaded]
        try:
            for number, group in enumerate(groups):
                group["params"] = [w for one, w in zip(loaded, weights, strict=True) if one.piece.group == number]
            inner.step(lr)
            for one, weight in zip(loaded, weights, strict=True):
                if MASTER in one.live:
                    self._flat(one.piece).copy_(one.live[MASTER])
                if one.piece.last and "step" in state[weight]:
                    state[self._masters[one.piece.name]]["step"] = state[weight]["step"]
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for weight in weights:
                state.pop(weight, None)

    def _weight(self, one: _Loaded, inner: Inner) -> nn.Parameter:
        """Return a piece as a parameter with gradient, and give it its state."""
        piece, master, state = one.piece, self._masters[one.piece.name], inner.optimizer.state
        assert master.grad is not None
        weight = nn.Parameter(one.live.get(MASTER, self._flat(piece)).view(piece.shape))
        weight.grad = master.grad.reshape(-1)[piece.span].view(piece.shape)
        moments = {key: tensor for key, tensor in one.live.items() if key != MASTER}
        state[weight] = {key: t if _is_scale(key) else t.view(piece.shape) for key, t in moments.items()}
        if "step" in state[master]:  # the same for all pieces of a tensor
            state[weight]["step"] = state[master]["step"].clone()
        return weight

    def _flat(self, piece: _Piece) -> Tensor:
        """Return the parameter's own weights of a piece."""
        return self._parameters[piece.name].detach().view(-1)[piece.span]

    def _event(self) -> torch.cuda.Event | None:
        """Return the present point of the computation."""
        return _mark(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    stream.record_event(event)
    return event


class _Lane:
    """A stream of copies beside the computation; on a CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], None], after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Do the work behind an event; returns the event of its end."""
        if self._stream is None or after is None:
            work()
            return None
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work()
        return _mark(self._stream)


def _is_scale(key: str) -> bool:
    return key.endswith("_scale")


def _room(tensor: Tensor) -> int:
    """Return the bytes of a buffer that a tensor takes."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _layout(
    inner: Inner, master: nn.Parameter, parameter: nn.Parameter
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of everything that main memory holds of a parameter: what the optimizer would make."""
    found = {} if master is parameter else {MASTER: (tuple(master.shape), master.dtype)}
    for key in inner.keys or ():
        if _is_scale(key):
            found[key] = (-(-master.numel() // BLOCK),), master.dtype
        elif key != "step":
            codes = f"{key}_scale" in (inner.keys or ())
            found[key] = tuple(master.shape), torch.uint8 if codes else master.dtype
    return found


def _batches(
    inner: Inner, masters: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]
) -> list[list[_Piece]]:
    """Cut an optimizer's tensors into pieces, and put neighbours together up to CHUNK weights."""
    names = {masters[name]: name for name in inner.names}
    batches: list[list[_Piece]] = []
    filled = CHUNK
    for number, group in enumerate(inner.optimizer.param_groups):
        for master in group["params"]:
            name, count = names[master], master.numel()
            size = CHUNK if inner.by_weight else max(1, count)
            for start in range(0, count, size):
                span = slice(start, min(start + size, count))
                length = span.stop - span.start
                shape = tuple(parameters[name].shape) if length == count else (length,)
                if filled + length > CHUNK:
                    batches.append([])
                    filled = 0
                batches[-1].append(_Piece(name, number, span, shape, span.stop == count))
                filled += length
    return batches


# --- pinned memory --------------------------------------------------------------------------------------------------
def _host_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: list[int]) -> Tensor:
    """Return zeros in main memory, pinned for a GPU. Raises LearnerError if that is refused.

    Torch's own pinned memory is rounded up to powers of two, up to twice as much.
    """
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype)
    count = math.prod(shape)
    area = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_DONTFORK)  # a fork would copy pinned pages
    with suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(area, dtype=dtype, count=count).view(shape).fill_(0)  # many threads touch the pages
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if error:
        raise LearnerError(
            f"{tensor.nbytes / 2**30:.2f} GiB of main memory cannot be pinned (CUDA error {error})",
            where="optimizer.offload=cpu",
            fix="free main memory, or leave optimizer.offload out",
        )
    pinned.append(tensor.data_ptr())
    return tensor


def _unpin(pinned: Sequence[int]) -> None:
    for address in pinned:
        torch.cuda.cudart().cudaHostUnregister(address)
