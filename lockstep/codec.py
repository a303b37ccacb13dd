"""Reads JSON strictly; converts frozen dataclasses to JSON values and back, with errors that name the path of a wrong field."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
Reader: TypeAlias = Callable[[Any], Any]


class CodecError(ValueError):
    """A value does not fit its type; the message begins with the path. Callers turn it into their own error."""

    def __init__(self, reason: str, path: str = "") -> None:
        self.reason, self.path = reason, path
        super().__init__(reason, path)

    def inside(self, place: str) -> CodecError:
        """Return the same error with a longer path: place is ".field" or "[3]"."""
        return CodecError(self.reason, place + self.path)

    def __str__(self) -> str:
        path = self.path.removeprefix(".")
        return f"{path}: {self.reason}" if path else self.reason


def strict_json(text: str | bytes, *, finite: bool = False, distinct: bool = False) -> Any:
    """Return a JSON value.

    Raises ValueError, also for NaN, infinities, deep nesting, with `finite` for numbers beyond the largest float, as 1e999, and
    with `distinct` for an object that has a key twice.
    """
    number, pairs = _finite if finite else None, _distinct if distinct else None
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=number, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text[:20])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its fields. Raises ValueError for a key that it has twice: which value is meant is not known."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        values = [repr(value)[:40] for name, value in pairs if name == twice]  # they find the place in a long file
        raise ValueError(f"the key {twice[:40]!r} occurs twice, with {values[0]} and {values[1]}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def to_json(value: object) -> Any:
    """Return a record of str, int, float, bool, None, tuples and records as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[Record], value: object) -> Record:
    """Return the record of type `kind` from the value that `to_json` made. Raises CodecError, with the path of the fault."""
    try:
        read: Reader = reader(kind)  # type: ignore[arg-type]
        return read(value)  # type: ignore[no-any-return]
    except CodecError as error:
        raise error if error.path else CodecError(error.reason, f".{kind.__name__}") from None


@cache
def reader(kind: Any) -> Reader:
    """Return the function that reads a value of this type. Made once per type: records of thousands of items are read."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if origin in (types.UnionType, Union):
        (one,) = [a for a in args if a is not type(None)]
        read = reader(one)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(reader(args[0]))
    if kind not in (str, int, float, bool):
        raise TypeError(f"records of type {kind!r} are not supported")
    return _scalar_reader(kind)


def _scalar_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)  # some JSON writers turn 1.0 into 1
        raise CodecError(f"expected {kind.__name__}, got {_name(value)}")

    return read


def _tuple_reader(item: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise CodecError(f"expected a list, got {_name(value)}")
        found: list[Any] = []
        try:
            for one in value:
                found.append(item(one))  # its length shows where the fault is
        except CodecError as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return read


def _record_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = [(name, reader(hints[name])) for name in _names(kind)]
    names = frozenset(name for name, _ in readers)

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise CodecError(f"expected fields, got {_name(value)}")
        if value.keys() != names:
            if unknown := sorted(set(value) - names):
                raise CodecError(f"unknown field {', '.join(map(str, unknown))}")
            raise CodecError(f"missing field {', '.join(name for name, _ in readers if name not in value)}")
        fields: list[Any] = []
        try:
            for name, one in readers:
                fields.append(one(value[name]))  # its length shows where the fault is
        except CodecError as error:
            raise error.inside(f".{readers[len(fields)][0]}") from None
        return kind(*fields)

    return read


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__
