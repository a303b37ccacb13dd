"""Values of Python's plain types as one line of JSON and back: all that passes between a program and what judges it.

What is read is made of the types listed here, whatever was sent: no object of the sender's comes through.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import types
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MAX_LINE = 1 << 22
"""Bytes of a message."""
MAX_ITEMS = 100_000
"""Items that are taken from an iterator."""
MAX_ALIKE = 64
"""Keys with one hash."""
_TAG = "!"
_ITERATORS = (types.GeneratorType, range, map, zip, filter, enumerate, reversed, itertools.chain, deque)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))

Refer = Callable[[object], int]
"""Gives an object that is not plain a number."""


class NotPlainError(Exception):
    """A value that cannot be sent, or a message that is none."""


def encode(value: Any, refer: Refer | None = None) -> Any:
    """The value as JSON types. Objects of other types become the number that `refer` gives them. Raises NotPlainError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)  # IntEnum and the like
    if isinstance(value, (list, *_ITERATORS)):
        items: Any = value
        return [encode(item, refer) for item in itertools.islice(iter(items), MAX_ITEMS)]
    if isinstance(value, (tuple, set, frozenset)) or kind in _VIEWS:
        name = "tuple" if isinstance(value, tuple) else "frozenset" if isinstance(value, frozenset) else "set"
        name = "list" if kind is _VIEWS[1] else name
        return {_TAG: name, "v": [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {_TAG: "dict", "v": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {_TAG: "complex", "v": [value.real, value.imag]}
    if kind in (Decimal, Fraction):
        return {_TAG: kind.__name__, "v": str(value)}
    if refer is None:
        raise NotPlainError(f"a {kind.__name__} cannot be sent")
    return {_TAG: "ref", "v": refer(value)}


def decode(value: Any, find: Callable[[int], object] | None = None) -> Any:
    """What encode was given. Raises NotPlainError for anything else."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    content = value.get("v")
    match value.get(_TAG), content:
        case ("tuple" | "set" | "frozenset" | "list") as name, list():
            made = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}[name]
            items = [decode(item, find) for item in content]
            if made in (set, frozenset):
                _refuse_collisions(items)
            return made(items)
        case "dict", list():
            pairs = [(decode(key, find), decode(item, find)) for key, item in content]
            _refuse_collisions([key for key, _ in pairs])
            return dict(pairs)
        case "bytes", str():
            return base64.b64decode(content)
        case "complex", [float() as real, float() as imaginary]:
            return complex(real, imaginary)
        case ("Decimal" | "Fraction") as name, str() if len(content) < 4096 and "e" not in content.lower():
            return (Decimal if name == "Decimal" else Fraction)(content)
        case "ref", int() if find is not None:
            return find(content)
    raise NotPlainError("a message that is none")


def _refuse_collisions(keys: list[Any]) -> None:
    """Numbers can be chosen so that all have one hash, and a set of them takes quadratic time."""
    hashes = sorted(map(hash, keys))
    if any(hashes[i] == hashes[i + MAX_ALIKE] for i in range(len(hashes) - MAX_ALIKE)):
        raise NotPlainError("too many keys with one hash")


def send(file: BinaryIO, message: dict[str, Any]) -> None:
    """Write a message of JSON types. Raises NotPlainError, or OSError if nobody reads."""
    try:
        line = json.dumps(message).encode("ascii") + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlainError(f"a value cannot be sent: {type(error).__name__}") from error
    if len(line) > MAX_LINE:
        raise NotPlainError("a value is too long to be sent")
    file.write(line)
    file.flush()


def receive(file: io.BufferedReader) -> dict[str, Any]:
    """The next message. Raises EOFError at the end, NotPlainError for what is no message."""
    line = file.readline(MAX_LINE + 1)
    if not line:
        raise EOFError
    return read(line)


def read(line: bytes) -> dict[str, Any]:
    """A message. Raises NotPlainError."""
    if len(line) > MAX_LINE or not line.endswith(b"\n"):
        raise NotPlainError("a message is too long")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlainError("a message that is none") from error
    if not isinstance(message, dict):
        raise NotPlainError("a message that is none")
    return message


def value_of(message: dict[str, Any], find: Callable[[int], object] | None = None) -> Any:
    """The value of an answer. Raises NotPlainError."""
    try:
        return decode(message.get("ok"), find)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise NotPlainError(f"a message that is none: {type(error).__name__}") from error
