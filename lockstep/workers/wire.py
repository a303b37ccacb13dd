"""Encodes values as a line of JSON, also types that JSON lacks, and decodes them. All messages between run and workers use it."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
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
_FIELDS = {record: tuple(field.name for field in dataclasses.fields(record)) for record in _RECORDS.values()}
_SAME = frozenset((type(None), bool, int, float, str))
"""Types that JSON has, too."""
_STR = frozenset((str,))


def dumps(value: object) -> bytes:
    """Return one line of ASCII JSON. Raises TypeError for a value that has no form there, naming its place."""
    try:
        try:
            return _encode(_plain(value)).encode("ascii") + b"\n"
        except TypeError:
            place, found = _culprit(value, "") or ("", value)
    except RecursionError as error:
        raise TypeError("the value is nested too deeply, or contains itself") from error
    raise TypeError(f"{place.lstrip('.') or 'the value'} is a {type(found).__name__}, which cannot be sent")


def loads(line: bytes) -> Any:
    """Return what dumps was given; subclasses come back as their base. Raises ValueError for anything else."""
    return _decode(line.decode("utf-8"))


def _plain(value: Any) -> Any:
    kind = type(value)
    return value if kind in _SAME else _FORMS.get(kind, _of_base)(value)


def _list(value: Any) -> list[Any]:
    return [item if type(item) in _SAME else _plain(item) for item in value]


def _mapping(value: Any) -> dict[str, Any]:
    if _TAG not in value and _STR.issuperset(map(type, value)):
        return {key: item if type(item) in _SAME else _plain(item) for key, item in value.items()}
    return {_TAG: "dict", "v": [[_plain(key), _plain(item)] for key, item in value.items()]}


def _record(kind: type, value: Any) -> dict[str, Any]:
    items = [(name, getattr(value, name)) for name in _FIELDS[kind]]
    return {_TAG: kind.__name__, "v": {name: item if type(item) in _SAME else _plain(item) for name, item in items}}


def _text(value: Any) -> dict[str, Any]:
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    return {_TAG: _TEXT_TYPES[type(value)][0], "v": text}


_FORMS: dict[type, Callable[[Any], Any]] = {
    list: _list,
    tuple: lambda value: {_TAG: "tuple", "v": _list(value)},
    set: lambda value: {_TAG: "set", "v": _list(sorted(value, key=repr))},
    frozenset: lambda value: {_TAG: "frozenset", "v": _list(sorted(value, key=repr))},
    bytes: lambda value: {_TAG: "bytes", "v": base64.b64encode(value).decode("ascii")},
    dict: _mapping,
    **{kind: partial(_record, kind) for kind in _FIELDS},
    **dict.fromkeys(_TEXT_TYPES, _text),
}
"""Functions that make a value of exactly this type one that JSON has."""
_BASES = {**dict.fromkeys(_SAME, lambda value: value), **_FORMS, Mapping: _mapping}


def _of_base(value: Any) -> Any:
    """Return the form of a subclass's base, or of an array."""
    for base, form in _BASES.items():
        if base not in _TEXT_TYPES and isinstance(value, base):
            return form(value)
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    raise TypeError


def _culprit(value: Any, place: str) -> tuple[str, Any] | None:
    """Return the first thing in a value that cannot be sent, and its place; None if there is none."""
    try:
        _plain(value)
    except TypeError:
        inner = (_culprit(item, f"{place}{at}") for at, item in _parts(value))
        return next((found for found in inner if found), (place, value))
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (("", key), (f".{key}", item))
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        yield from ((f"[{i}]", item) for i, item in enumerate(items))
    else:
        names = next((names for kind, names in _FIELDS.items() if isinstance(value, kind)), ())
        yield from ((f".{name}", getattr(value, name)) for name in names)


def _real(value: dict[str, Any]) -> Any:
    """Return what a dictionary of JSON stands for; what is in it has been read already."""
    match value.get(_TAG):
        case None:
            return value
        case "tuple":
            return tuple(value["v"])
        case "set":
            return set(value["v"])
        case "frozenset":
            return frozenset(value["v"])
        case "dict":
            return dict(value["v"])
        case "bytes":
            return base64.b64decode(value["v"])
        case name if name in _RECORDS:
            return _RECORDS[name](**value["v"])
        case name:
            return _READERS[name](value["v"])


_encode = json.JSONEncoder(check_circular=False).encode
_decode = json.JSONDecoder(object_hook=_real).decode
