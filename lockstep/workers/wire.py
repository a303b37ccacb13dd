"""Encodes values as a line of JSON, also types that JSON lacks, and decodes them. All messages between run and workers use it."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lockstep.types import Grade, Prompt, ReplyText, Turn

_TAG = "!"
"""Key of a dictionary that stands for a Python type that JSON does not have."""
_TEXT_TYPES: dict[type, tuple[str, Any]] = {
    # A type, its name on the wire, and how its str() is read again.
    datetime.datetime: ("datetime", datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.fromisoformat),
    Decimal: ("decimal", Decimal),
    Fraction: ("fraction", Fraction),
}
_READERS = dict(_TEXT_TYPES.values())
_RECORDS: dict[str, type] = {record.__name__: record for record in (Prompt, ReplyText, Grade, Turn)}


def dumps(value: object) -> bytes:
    """Return one line of ASCII JSON. Raises TypeError for a value that has no form there, naming its place."""
    try:
        return json.dumps(_plain(value, "")).encode("ascii") + b"\n"
    except RecursionError as error:
        raise TypeError("the value is nested too deeply, or contains itself") from error


def loads(line: bytes) -> Any:
    """Return what dumps was given; subclasses come back as their base. Raises ValueError for anything else."""
    return _real(json.loads(line))


def _plain(value: Any, place: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
        case tuple() | set() | frozenset():
            items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
            name = next(t.__name__ for t in (tuple, frozenset, set) if isinstance(value, t))
            return {_TAG: name, "v": [_plain(item, f"{place}[{i}]") for i, item in enumerate(items)]}
        case bytes():
            return {_TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
        case Mapping():
            if all(isinstance(key, str) for key in value) and _TAG not in value:
                return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
            return {_TAG: "dict", "v": [[_plain(k, place), _plain(v, f"{place}.{k}")] for k, v in value.items()]}
        case _:
            return _other(value, place)


def _other(value: Any, place: str) -> Any:
    for name, record in _RECORDS.items():
        if isinstance(value, record):
            names = [field.name for field in dataclasses.fields(record)]
            return {_TAG: name, "v": {n: _plain(getattr(value, n), f"{place}.{n}") for n in names}}
    for kind, (name, _) in _TEXT_TYPES.items():
        if type(value) is kind:
            return {_TAG: name, "v": value.isoformat() if hasattr(value, "isoformat") else str(value)}
    if type(value).__module__ == "numpy":
        return _plain(value.tolist(), place)
    raise TypeError(f"{place.lstrip('.') or 'the value'} is a {type(value).__name__}, which cannot be sent")


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _real(item) for key, item in value.items()}
        case "tuple":
            return tuple(_real(item) for item in value["v"])
        case "set":
            return {_real(item) for item in value["v"]}
        case "frozenset":
            return frozenset(_real(item) for item in value["v"])
        case "dict":
            return {_real(k): _real(v) for k, v in value["v"]}
        case "bytes":
            return base64.b64decode(value["v"])
        case name if name in _RECORDS:
            return _RECORDS[name](**{key: _real(item) for key, item in value["v"].items()})
        case name:
            return _READERS[name](value["v"])
