"""Converts records to plain Python values and back, for messages between processes: numbers become bytes, nothing is pickled.

What a worker's method takes and returns travels as its annotations say.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pkgutil import resolve_name
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np

Convert: TypeAlias = Callable[[Any], Any]

NUMBERS: dict[Any, str] = {int: "iq", float: "fd", bool: "?"}
"""Codes of struct as which tuples of numbers travel: the first that loses nothing. A message begins with its place."""
ALIKE = 128
"""Added to the place if all numbers are equal, as in most masks and advantages: then their count and one of them follow. Not for
zeros: 0.0 and -0.0 are equal, and differ in a bit.
"""
REMEMBERED = 64
"""Messages whose tuples are remembered: the replies of a group share prompt, mask and often advantages."""


def to_plain(kind: Any, value: Any) -> Any:
    """Return a value of type `kind` as lists, dicts, texts, numbers and bytes."""
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are tried as float32
        return _codec(kind)[0](value)


def from_plain(kind: Any, value: Any) -> Any:
    """Return the value that `to_plain` made plain, equal to the last bit."""
    return _codec(kind)[1](value)


@cache
def kinds_of(worker: str, method: str) -> tuple[dict[str, Any], Any]:
    """Return the types of a method's arguments by name, and that of its result. `worker` names the class, `method` a method of
    it or of one of its parts, as in "learner.logprobs".
    """
    owner, (*parts, name) = resolve_name(worker), method.split(".")
    for part in parts:
        owner = get_type_hints(owner)[part]
    kinds = get_type_hints(getattr(owner, name))
    return kinds, kinds.pop("return")


@cache
def _codec(kind: Any) -> tuple[Convert, Convert]:
    """Return how values of a type are written and how they are read. Raises TypeError for a type that cannot be sent."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        record: Any = kind
        hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
        write, read = _parts([hints[name] for name in names])
        return lambda value: write([getattr(value, name) for name in names]), lambda value: record(*read(value))
    if origin in (types.UnionType, Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        write, read = _codec(inner)
        return (
            lambda value: None if value is None else write(value),
            lambda value: None if value is None else read(value),
        )
    if origin is tuple and Ellipsis not in args:
        write, read = _parts(args)
        return write, lambda value: tuple(read(value))
    if origin is tuple and args[0] in NUMBERS:
        codes = NUMBERS[args[0]]
        return lambda value: _pack(value, codes), lambda value: _unpack(value, codes)
    if origin in (tuple, list, Sequence, Collection):
        write, read = _codec(args[0])
        make = list if origin is list else tuple
        return lambda value: [write(one) for one in value], lambda value: make(read(one) for one in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        write, read = _codec(args[1])
        return (
            lambda value: {name: write(one) for name, one in value.items()},
            lambda value: {name: read(one) for name, one in value.items()},
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value, kind
    if kind in (str, int, float, bool, bytes, type(None), Any) or origin is Literal:
        return lambda value: value, lambda value: value
    raise TypeError(f"values of type {kind!r} cannot be sent")


def _parts(kinds: Sequence[Any]) -> tuple[Convert, Convert]:
    """Return how values of these types, one of each, are written and how they are read."""
    parts = [_codec(kind) for kind in kinds]
    return (
        lambda values: [write(one) for (write, _), one in zip(parts, values, strict=True)],
        lambda values: [read(one) for (_, read), one in zip(parts, values, strict=True)],
    )


def _pack(numbers: Sequence[Any], codes: str) -> bytes:
    alike = bool(numbers) and numbers[0] == numbers[-1] != 0 and numbers.count(numbers[0]) == len(numbers)
    place, packed = _packed(numbers[:1] if alike else numbers, codes)
    return bytes([place + ALIKE]) + struct.pack("=q", len(numbers)) + packed if alike else bytes([place]) + packed


def _packed(numbers: Sequence[Any], codes: str) -> tuple[int, bytes]:
    count, narrow = len(numbers), codes[0]
    if narrow == "f":
        whole = struct.pack(f"={count}d", *numbers)
        short = np.frombuffer(whole, np.float64).astype(np.float32)
        return (0, short.tobytes()) if short.astype(np.float64).tobytes() == whole else (1, whole)
    try:
        return 0, struct.pack(f"={count}{narrow}", *numbers)
    except struct.error:
        return 1, struct.pack(f"={count}{codes[1]}", *numbers)


@lru_cache(REMEMBERED)
def _unpack(message: bytes, codes: str) -> tuple[Any, ...]:
    alike, place = divmod(message[0], ALIKE)
    code = codes[place]
    if alike:
        count, *one = struct.unpack_from(f"=q{code}", message, 1)
        return tuple(one * count)
    return struct.unpack_from(f"{(len(message) - 1) // struct.calcsize(code)}{code}", message, 1)
