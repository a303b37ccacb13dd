"""Converts records to plain Python values and back, for messages between processes: numbers become bytes, nothing is pickled."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

Record = TypeVar("Record")
Convert: TypeAlias = Callable[[Any], Any]

NUMBERS: dict[Any, tuple[Any, ...]] = {int: (np.int32, np.int64), float: (np.float32, np.float64), bool: (np.bool_,)}
"""Types as which tuples of numbers travel: the first that loses nothing. A message begins with its place."""


def to_plain(kind: Any, value: Any) -> Any:
    """Return a value of type `kind` as lists, dicts, texts, numbers and bytes."""
    return _writer(kind)(value)


def from_plain(kind: type[Record], value: Any) -> Record:
    """Return the value that `to_plain` made plain, equal to the last bit."""
    any_kind: Any = kind
    read: Callable[[Any], Record] = _reader(any_kind)
    return read(value)


def many_to_plain(kind: type[Record], values: Sequence[Record]) -> list[Any]:
    """Return the plain values of several records of one type."""
    return [to_plain(kind, value) for value in values]


def many_from_plain(kind: type[Record], values: Sequence[Any]) -> list[Record]:
    """Reverse `many_to_plain`."""
    return [from_plain(kind, value) for value in values]


@cache
def _writer(kind: Any) -> Convert:
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        parts = [(field.name, _writer(hint)) for field, hint in _hints(kind)]
        return lambda value: [write(getattr(value, name)) for name, write in parts]
    if origin in (types.UnionType, Union):
        write = _writer(_only(args))
        return lambda value: None if value is None else write(value)
    if origin is tuple and args[-1] is Ellipsis:
        if args[0] in NUMBERS:
            return lambda value: _pack(value, NUMBERS[args[0]])
        item = _writer(args[0])
        return lambda value: [item(one) for one in value]
    if origin is tuple:
        return list
    if _is_mapping(origin) or origin is list:
        return origin if origin is list else dict
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value
    return _same(kind, origin)


@cache
def _reader(kind: Any) -> Convert:
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        readers = [_reader(hint) for _, hint in _hints(kind)]
        make: Any = kind
        return lambda value: make(*(read(one) for read, one in zip(readers, value, strict=True)))
    if origin in (types.UnionType, Union):
        read = _reader(_only(args))
        return lambda value: None if value is None else read(value)
    if origin is tuple and args[-1] is Ellipsis:
        if args[0] in NUMBERS:
            return lambda value: tuple(np.frombuffer(value, NUMBERS[args[0]][value[0]], offset=1).tolist())
        item = _reader(args[0])
        return lambda value: tuple(item(one) for one in value)
    if origin is tuple:
        return tuple
    if _is_mapping(origin) or origin is list:
        return origin if origin is list else dict
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return _same(kind, origin)


def _pack(value: Sequence[Any], types: tuple[Any, ...]) -> bytes:
    whole = np.array(value, types[-1])
    if len(types) > 1:
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = whole.astype(types[0])
            if narrow.astype(types[-1]).tobytes() == whole.tobytes():
                return b"\0" + narrow.tobytes()
    return bytes([len(types) - 1]) + whole.tobytes()


def _hints(kind: Any) -> list[tuple[Any, Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


def _only(args: tuple[Any, ...]) -> Any:
    (one,) = [arg for arg in args if arg is not type(None)]
    return one


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _same(kind: Any, origin: Any) -> Convert:
    if kind in (str, int, float, bool, bytes) or origin is Literal:
        return lambda value: value
    raise TypeError(f"values of type {kind!r} cannot be sent")
