"""Converts records to plain Python values and back, for messages between processes: numbers become bytes, nothing is pickled.

What a worker's method takes and returns travels as its annotations say. Values of one type are converted together, and many
records field by field; an object that is there several times, as the prompt of a group is, travels once.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain, islice, starmap
from pkgutil import resolve_name
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np

from lockstep.types import repeated

Codec: TypeAlias = tuple[Callable[[Sequence[Any]], Any], Callable[[Any], Sequence[Any]]]
"""Functions that make values of a type plain, all together, and that reverse it."""

NUMBERS: dict[Any, str] = {int: "iq", float: "fd", bool: "?"}
"""Codes of struct as which tuples of numbers travel: the first that loses nothing of any of them."""


def to_plain(kind: Any, value: Any) -> Any:
    """Return a value of type `kind` as lists, dicts, texts, numbers and bytes."""
    return _codec(kind)[0]([value])


def from_plain(kind: Any, value: Any) -> Any:
    """Return the value that `to_plain` made plain, equal to the last bit."""
    return _codec(kind)[1](value)[0]


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
def _codec(kind: Any) -> Codec:
    """Return how values of a type travel. Raises TypeError for a type that cannot be sent."""
    origin, args = get_origin(kind), get_args(kind)
    record: Any = kind
    if is_dataclass(kind):
        hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
        return _once(
            _parts([hints[name] for name in names], lambda one: [getattr(one, name) for name in names], record)
        )
    if hasattr(kind, "_fields"):  # a NamedTuple
        return _once(_parts([*get_type_hints(kind).values()], lambda one: one, record))
    if origin in (types.UnionType, Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _inside(
            inner,
            lambda one: one is None,
            lambda one: () if one is None else (one,),
            lambda no, rest: None if no else next(rest),
        )
    if origin is tuple and Ellipsis not in args:
        return _parts(args, list, lambda *parts: parts)
    if origin is tuple and args[0] in NUMBERS:
        codes = NUMBERS[args[0]]
        return _once((lambda values: _pack(values, codes), lambda plain: _unpack(*plain)))
    if origin in (tuple, list, Sequence, Collection):
        make = list if origin is list else tuple
        return _inside(args[0], len, iter, lambda count, rest: make(islice(rest, count)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _inside(
            args[1], list, lambda one: one.values(), lambda names, rest: dict(zip(names, rest, strict=False))
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda values: [one.value for one in values], lambda plain: [kind(one) for one in plain]
    if kind in (str, int, float, bool, bytes, type(None), Any) or origin is Literal:
        return list, list
    raise TypeError(f"values of type {kind!r} cannot be sent")


def _once(codec: Codec) -> Codec:
    """Return a codec by which each object is written once, however often it is among the values, and is shared again."""
    write, read = codec

    def write_once(values: Sequence[Any]) -> Any:
        own = {id(one): one for one in values}
        places = {name: place for place, name in enumerate(own)}
        return [[places[id(one)] for one in values], write([*own.values()])]

    def read_shared(plain: Any) -> Sequence[Any]:
        own = read(plain[1])
        return [own[place] for place in plain[0]]

    return write_once, read_shared


def _parts(kinds: Sequence[Any], parts_of: Callable[[Any], Sequence[Any]], make: Callable[..., Any]) -> Codec:
    """Return the codec of values that are made of one part of each type."""
    parts = [_codec(kind) for kind in kinds]

    def write(values: Sequence[Any]) -> Any:
        columns = zip(*map(parts_of, values), strict=True) if values else [()] * len(parts)
        return [write(column) for (write, _), column in zip(parts, columns, strict=True)]

    def read(plain: Any) -> Sequence[Any]:
        columns = [read(column) for (_, read), column in zip(parts, plain, strict=True)]
        return [*starmap(make, zip(*columns, strict=True))]

    return write, read


def _inside(
    kind: Any, form: Callable[[Any], Any], values_in: Callable[[Any], Any], make: Callable[[Any, Any], Any]
) -> Codec:
    """Return the codec of what holds any number of values of a type: by its `form`, `make` takes them from a row of all."""
    write, read = _codec(kind)

    def write_all(values: Sequence[Any]) -> Any:
        return [[form(one) for one in values], write([*chain.from_iterable(map(values_in, values))])]

    def read_all(plain: Any) -> Sequence[Any]:
        rest = iter(read(plain[1]))
        return [make(one, rest) for one in plain[0]]

    return write_all, read_all


def _pack(values: Sequence[Any], codes: str) -> Any:
    """Return for tuples of numbers their lengths, which of them repeat one number, as most advantages do, a code and bytes.

    Not zeros: 0.0 and -0.0 are equal, and differ in a bit.
    """
    alike = [bool(one) and one[0] == one[-1] != 0 and one.count(one[0]) == len(one) for one in values]
    numbers = [one[:1] if same else one for one, same in zip(values, alike, strict=True)]
    return [[len(one) for one in values], alike, *_packed(numbers, codes[0], codes[-1])]


def _packed(numbers: Sequence[Any], narrow: str, wide: str) -> tuple[str, bytes]:
    if narrow == "f":
        whole = _joined(numbers, wide)
        with np.errstate(over="ignore", invalid="ignore"):
            short = np.frombuffer(whole, np.float64).astype(np.float32)
        return (narrow, short.tobytes()) if short.astype(np.float64).tobytes() == whole else (wide, whole)
    try:
        return narrow, _joined(numbers, narrow)
    except struct.error:
        return wide, _joined(numbers, wide)


def _joined(numbers: Sequence[Any], code: str) -> bytes:
    return b"".join([struct.pack(f"={len(one)}{code}", *one) for one in numbers])


def _unpack(lengths: Sequence[int], alike: Sequence[bool], code: str, packed: bytes) -> Sequence[Any]:
    found, start, size = [], 0, struct.calcsize(f"={code}")
    for length, same in zip(lengths, alike, strict=True):
        numbers = struct.unpack_from(f"={1 if same else length}{code}", packed, start)
        start += size * len(numbers)
        found.append(repeated(numbers[0], length) if same else numbers)
    return found
