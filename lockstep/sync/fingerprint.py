"""64-bit fingerprints of tensors: they need one read of the weights and depend on positions.

The fingerprint of a tensor is the sum over its elements of

    (bits_i + 1) · r(i)   mod 2^64,   r(i) = a[i mod 4096] · b[i div 4096]

where i is the row-major index, bits_i the element's bits as an unsigned integer, and a, b odd 64-bit numbers from splitmix64 of
fixed keys. For 8-byte elements except the first, bits_i is bits ^ bits >> 32: the highest bit times an odd number is the same
in every place, so that sign flips alone would cancel in pairs. All r(i) are odd and that map is one to one, so a change of a
single element always changes the sum. Name, dtype and shape are mixed in afterwards. The keys are fixed, so a fingerprint
identifies weights across runs and checkpoints. It guards against mistakes and faults, not against an adversary, who could make a
collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import SyncError
from lockstep.types import WeightStream

KEY_A, KEY_B = 0x4C6F636B73746570, 0x66696E6765727072  # "Lockstep", "fingerpr"; another key makes another identity
BLOCK = 4096
CPU_BLOCKS = 32  # 1 MiB of int64: stays in a core's cache
GPU_BLOCKS = 4096  # 128 MiB of int64: few launches
LARGEST = (1 << 31) - BLOCK
"""Largest number of elements of a GPU tensor for the kernel, which counts them in 32 bits."""
HELD = 1 << 28
"""Bytes of tensors collected for one launch: a stream may make them one by one."""
MASK = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorPrint(NamedTuple):
    """Fingerprint of one tensor. Example: TensorPrint(0x9f…, "bfloat16", (576, 576), 663552)"""

    value: int
    """The fingerprint, 64 bits, name, dtype and shape mixed in."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of all tensors of a weight stream, by name."""

    tensors: Mapping[str, TensorPrint]

    @cached_property
    def combined(self) -> str:
        """Fingerprint of all of them, independent of their order: 16 hex digits. Few are asked for it."""
        text = "\n".join(f"{name} {self.tensors[name].value:016x}" for name in sorted(self.tensors))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    def changed_since(self, previous: Fingerprints) -> int:
        """Return the number of names that were added, removed or have another fingerprint."""
        names = self.tensors.keys() | previous.tensors.keys()
        return sum(self.tensors.get(name) != previous.tensors.get(name) for name in names)


def splitmix64(seed: int, index: int) -> int:
    """Return the index-th output (from 0) of the generator splitmix64 (Steele, Lea, Flood, 2014) seeded with `seed`."""
    z = (seed + (index + 1) * GAMMA) & MASK
    z = (z ^ (z >> 30)) * MIX_1 & MASK
    z = (z ^ (z >> 27)) * MIX_2 & MASK
    return z ^ (z >> 31)


def identify(name: str, dtype: str, shape: tuple[int, ...], total: int) -> int:
    """Mix the identity of a tensor into the sum of its elements. `dtype` in the form of dtype_name()."""
    text = f"{name}\n{dtype}\n{list(shape)}\n{total & MASK:016x}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype. Example: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


@lru_cache(maxsize=4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> tuple[str, tuple[int, ...]]:
    """Return how prints name a dtype and a shape: one object for all of a kind, which travels between processes once."""
    return str(dtype).removeprefix("torch."), tuple(shape)


def fingerprint(stream: WeightStream) -> Fingerprints:
    """Fingerprint every tensor of a stream, holding few at a time.

    Raises SyncError if a name comes twice, or a tensor is not dense, real and unquantised.
    """
    specs: dict[str, tuple[tuple[str, tuple[int, ...]], int]] = {}
    sums = _Sums()
    for name, tensor in stream:
        if name in specs:
            raise _twice(name)
        sums.add(tensor)
        specs[name] = (_spec(tensor.dtype, tensor.shape), tensor.nbytes)
    prints = {
        name: TensorPrint(identify(name, *spec, total), *spec, size)
        for (name, (spec, size)), total in zip(specs.items(), sums.totals(), strict=True)
    }
    return Fingerprints(prints)


class Fingerprinter:
    """Fingerprints one side repeatedly, reading tensors that are known to be frozen only on request.

    A frozen tensor is also read again when its address or torch's counter of in-place changes differs: cheap, but blind to
    writes through `.data`, which `refresh_frozen` catches. `thawed` names the frozen tensors whose fingerprint differs from the
    first one.
    """

    def __init__(self, frozen: frozenset[str] = frozenset()) -> None:
        self.frozen = frozen
        self.thawed: tuple[str, ...] = ()
        self._first: dict[str, TensorPrint] = {}
        self._known: dict[str, tuple[tuple[int, int], TensorPrint]] = {}

    def refresh_frozen(self) -> None:
        """Read the frozen tensors, too, at the next `read`."""
        self._known.clear()

    def read(self, stream: WeightStream) -> Fingerprints:
        """Fingerprint a stream. Raises SyncError if it lacks a tensor that was declared frozen, or repeats a name."""
        kept: dict[str, TensorPrint] = {}
        guards: dict[str, tuple[int, int]] = {}

        def unknown() -> WeightStream:
            for name, tensor in stream:
                if name in self.frozen:
                    if name in guards:
                        raise _twice(name)
                    guards[name] = _guard(tensor)
                    guard, known = self._known.get(name, (None, None))
                    if known is not None and guard == guards[name]:
                        kept[name] = known
                        continue
                yield name, tensor

        fresh = fingerprint(unknown()).tensors
        if absent := sorted(self.frozen - guards.keys()):
            raise SyncError(
                f"{len(absent)} tensors declared frozen are not among the weights, the first is {absent[0]}",
                fix="declare frozen only names that weights() yields",
            )
        prints = {**kept, **fresh}
        self._known = {name: (guard, prints[name]) for name, guard in guards.items()}
        self._first = {**{name: prints[name] for name in guards}, **self._first}
        self.thawed = tuple(name for name in guards if prints[name] != self._first[name])
        return Fingerprints(prints)


def _twice(name: str) -> SyncError:
    return SyncError(f"the weight stream has {name} twice", fix="yield each tensor once, and tied tensors by one name")


def _guard(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class _Sums:
    """The sums of many tensors: on a GPU a few launches for all of them, and one copy to the host at the end."""

    def __init__(self) -> None:
        self._count = 0
        self._numbers: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        """Tensors of one element on the CPU, as the scalings of adapters: read together, and summed in Python."""
        self._summed: list[tuple[Sequence[int], Tensor]] = []
        """Indices of tensors, and their sums."""
        self._waiting: list[tuple[int, Tensor]] = []
        self._bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Take in a tensor. Raises SyncError unless it is dense, real and not quantised."""
        place, self._count = self._count, self._count + 1
        _require_dense(tensor)
        count, size = tensor.numel(), tensor.itemsize
        if tensor.is_cuda and 0 < count <= LARGEST and _kernels(tensor.device):
            bits = tensor if size < 8 else _bits(tensor)  # a kernel reads the bits of any type
            adjacent = bits.is_contiguous() or (bits.dim() == 2 and bits.stride(1) == 1)
            self._waiting.append((place, bits if adjacent else bits.contiguous()))
            self._bytes += count * size
            if self._bytes > HELD:
                self._launch()
        elif count == 1 and tensor.is_cpu:
            self._numbers.setdefault(tensor.dtype, []).append((place, tensor))
        else:
            self._summed.append(((place,), _torch_sum(_bits(tensor).reshape(-1))[None]))

    def totals(self) -> list[int]:
        """Return the sums of all tensors in the order of `add`, as signed numbers."""
        self._launch()
        totals: dict[int, int] = {}
        for dtype, numbers in self._numbers.items():
            whole, factor = 1 << 8 * dtype.itemsize, (splitmix64(KEY_A, 0) | 1) * (splitmix64(KEY_B, 0) | 1)
            bits = torch.cat([t.reshape(1) for _, t in numbers]).detach().view(INTEGERS[dtype.itemsize]).tolist()
            totals |= {place: (value % whole + 1) * factor for (place, _), value in zip(numbers, bits, strict=True)}
        for device in dict.fromkeys(sums.device for _, sums in self._summed):
            there = [(places, sums) for places, sums in self._summed if sums.device == device]
            values: list[int] = torch.cat([sums for _, sums in there]).tolist()
            totals |= dict(zip([place for places, _ in there for place in places], values, strict=True))
        return [totals[place] for place in range(self._count)]

    def _launch(self) -> None:
        kinds: dict[tuple[torch.device, int], list[tuple[int, Tensor]]] = {}
        for place, tensor in self._waiting:
            kinds.setdefault((tensor.device, tensor.itemsize), []).append((place, tensor))
        for (device, _), members in kinds.items():
            places, tensors = [place for place, _ in members], [tensor for _, tensor in members]
            self._summed.append((places, _kernel_sums(tensors, device)))
        self._waiting, self._bytes = [], 0


def _kernel_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    kernels = _kernels(device)
    assert kernels is not None
    blocks = max(-(-tensor.numel() // BLOCK) for tensor in tensors)
    sums: Tensor = kernels.tensor_sums(tensors, _table(KEY_A, BLOCK, device), _rows(blocks, device))
    return sums


def _torch_sum(bits_T: Tensor) -> Tensor:
    """Compute Σ (bits_i + 1)·r(i) as a 0-d int64 tensor: whole blocks, then the rest. Its arithmetic wraps mod 2^64."""
    device, blocks = bits_T.device, len(bits_T) // BLOCK
    total, rest_T = torch.zeros((), dtype=torch.int64, device=device), bits_T[blocks * BLOCK :]
    if blocks:
        total += _blocks_sum(bits_T[: blocks * BLOCK].view(blocks, BLOCK))
    if len(rest_T):
        wide_T = rest_T.to(torch.int64)
        if rest_T.element_size() < 8:  # the sign was extended
            wide_T &= (1 << 8 * rest_T.element_size()) - 1
        total += ((wide_T + 1) * _table(KEY_A, BLOCK, device)[: len(rest_T)]).sum() * _rows(blocks + 1, device)[-1]
    return total


def _require_dense(tensor: Tensor) -> None:
    """Raise SyncError unless a tensor is dense, real and not quantised."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        raise SyncError(
            f"cannot fingerprint a {tensor.layout} {dtype_name(tensor)} tensor on {tensor.device}",
            fix="send dense tensors of real numbers",
        )


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers."""
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    if tensor.element_size() == 8 and tensor.numel() > 1:
        first, start = (0,) * bits.dim(), bits
        bits = bits ^ _shift(bits, 32)
        bits[first] = start[first]  # a single number, as an adapter's scaling, has the fingerprint that it always had
    return bits


@cache
def _kernels(device: torch.device) -> Any | None:
    """Return the module of Triton kernels for tensors on a GPU; None on a CPU or without Triton."""
    if device.type != "cuda":
        return None
    try:
        from lockstep.sync import kernels
    except ImportError:
        return None
    return kernels


def _blocks_sum(bits_BK: Tensor) -> Tensor:
    """Sum B whole blocks of K = 4096 elements. Several at a time use one buffer."""
    device = bits_BK.device
    a_K = _table(KEY_A, BLOCK, device)
    at_once = CPU_BLOCKS if device.type == "cpu" else GPU_BLOCKS
    sums_B = torch.empty(len(bits_BK), dtype=torch.int64, device=device)
    buffer = torch.empty(min(at_once, len(bits_BK)), BLOCK, dtype=torch.int64, device=device)
    for start in range(0, len(bits_BK), at_once):
        chunk = bits_BK[start : start + at_once]
        work = buffer[: len(chunk)]
        work.copy_(chunk)
        if chunk.dtype in (torch.int16, torch.int32):  # the sign was extended
            work.bitwise_and_((1 << 8 * chunk.element_size()) - 1)
        work.mul_(a_K)
        torch.sum(work, dim=1, out=sums_B[start : start + len(chunk)])
    sums_B += a_K.sum()  # the + 1 of every element
    return (sums_B * _rows(len(sums_B), device)).sum()


def _rows(count: int, device: torch.device) -> Tensor:
    """Return b[:count]; the table behind it grows by doubling."""
    return _table(KEY_B, max(BLOCK, 1 << (count - 1).bit_length()), device)[:count]


@lru_cache(maxsize=64)
def _table(seed: int, count: int, device: torch.device) -> Tensor:
    """Return splitmix64(seed, 0 … count - 1) | 1 as int64."""
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(GAMMA) + _signed(seed)
    z = (z ^ _shift(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(MIX_2)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: Tensor, by: int) -> Tensor:
    """Shift logically to the right; torch's shift keeps the sign."""
    return (z >> by) & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
