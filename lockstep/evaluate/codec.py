"""Frozen dataclasses to JSON values and back: a missing, unknown or mistyped field is refused with its path."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


class CodecError(ValueError):
    """A value does not fit its type; the message begins with the path. Callers turn it into their own error."""


def to_json(value: object) -> Any:
    """A record of str, int, float, bool, None, tuples and records as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[Record], value: object, path: str = "") -> Record:
    """The record of type `kind` that `to_json` made `value` of. Raises CodecError, with the path of what is wrong."""
    return _read(kind, value, path)  # type: ignore[no-any-return]


def _read(kind: Any, value: object, path: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, path)
    if origin in (types.UnionType, Union):
        return _read_optional(args, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise CodecError(f"{path}: expected a list, got {_name(value)}")
        return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # JSON writes 1.0 as 1 in some hands
    if kind not in (str, int, float, bool):
        raise TypeError(f"{path}: records of type {kind!r} are not supported")
    if type(value) is not kind:
        raise CodecError(f"{path}: expected {kind.__name__}, got {_name(value)}")
    return value


def _read_optional(args: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    (kind,) = [a for a in args if a is not type(None)]
    return _read(kind, value, path)


def _read_record(kind: Any, value: object, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise CodecError(f"{path or kind.__name__}: expected fields, got {_name(value)}")
    hints = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    if unknown := sorted(set(value) - set(names)):
        raise CodecError(f"{path or kind.__name__}: unknown field {', '.join(map(str, unknown))}")
    if missing := [n for n in names if n not in value]:
        raise CodecError(f"{path or kind.__name__}: missing field {', '.join(missing)}")
    return kind(**{n: _read(hints[n], value[n], f"{path}.{n}" if path else n) for n in names})


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__
