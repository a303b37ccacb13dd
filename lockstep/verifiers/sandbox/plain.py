"""Converts values of Python's plain types to one line of JSON and back; a program and its tests exchange nothing else.

The reader builds each value from the types listed here, whatever was sent, so it never gets an object of the sender.
"""

from __future__ import annotations

import base64
import io
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MAX_LINE = 1 << 27
"""Bytes of a message."""
MAX_ALIKE = 64
"""Keys with one hash."""
MAX_EXPONENT = 4096
"""Digits before or after the point of a Decimal, and of a Fraction as text."""
_MAX_BITS = 10_000
"""Whole numbers with more are written in hexadecimal: Python refuses decimal texts of more than 4300 digits."""
_TAG = "!"
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))

Refer = Callable[[object], int]
"""Gives an object that is not plain a number."""


class NotPlainError(Exception):
    """A value that cannot be sent, or a message that is none."""


def encode(value: Any, refer: Refer | None = None) -> Any:
    """Return the value as JSON types; objects of other types become the number that `refer` gives them. Raises NotPlainError.

    Iterators become lists, so one without end takes all the memory that its process may have.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= _MAX_BITS):
        return value
    if kind is int:
        return {_TAG: "int", "v": hex(value)}
    for base in (int, float, str):
        if isinstance(value, base):
            return encode(base(value))  # IntEnum and the like
    if isinstance(value, list | range | deque | array) or _is_own_iterator(value):
        return [encode(item, refer) for item in value]
    if isinstance(value, tuple | set | frozenset) or kind in _VIEWS:
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


def _is_own_iterator(value: object) -> bool:
    """Say if it is one of Python's own iterators: a generator, `map`, `iter([])`, `itertools.product` and the like."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def decode(value: Any, find: Callable[[int], object] | None = None) -> Any:
    """Return what encode was given. Raises one of NotPlainError, ValueError, TypeError, ArithmeticError, RecursionError."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    content = value.get("v")
    match value.get(_TAG), content:
        case "int", str():
            return int(content, 16)
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
        case "Decimal", str() if len(content) < 2 * MAX_EXPONENT:
            number = Decimal(content)
            if not number.is_finite() or abs(number.adjusted()) <= MAX_EXPONENT:
                return number
        case "Fraction", str() if len(content) < MAX_EXPONENT and "e" not in content.lower():
            return Fraction(content)
        case "ref", int() if find is not None:
            return find(content)
    raise NotPlainError("not a message of this protocol")


def _refuse_collisions(keys: list[Any]) -> None:
    """Raise NotPlainError for numbers chosen so that all have one hash: a set of them takes quadratic time."""
    hashes = sorted(map(hash, keys))
    if any(hashes[i] == hashes[i + MAX_ALIKE] for i in range(len(hashes) - MAX_ALIKE)):
        raise NotPlainError("too many keys with one hash")


def send(file: BinaryIO, message: dict[str, Any]) -> None:
    """Write a message of JSON types. Raises NotPlainError, or OSError if the reader is gone."""
    try:
        line = json.dumps(message).encode("ascii") + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlainError(f"a value cannot be sent: {type(error).__name__}") from error
    if len(line) > MAX_LINE:
        raise NotPlainError("a value is too long to be sent")
    file.write(line)
    file.flush()


def receive(file: io.BufferedReader) -> dict[str, Any]:
    """Return the next message. Raises EOFError at the end, NotPlainError for what is no message."""
    line = file.readline(MAX_LINE + 1)
    if not line:
        raise EOFError
    return read(line)


def read(line: bytes) -> dict[str, Any]:
    """Return the message. Raises NotPlainError."""
    if len(line) > MAX_LINE or not line.endswith(b"\n"):
        raise NotPlainError("a message is too long or cut short")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlainError("not a message of this protocol") from error
    if not isinstance(message, dict):
        raise NotPlainError("not a message of this protocol")
    return message


def value_of(message: dict[str, Any], find: Callable[[int], object] | None = None) -> Any:
    """Return the value of an answer. Raises NotPlainError."""
    try:
        return decode(message.get("ok"), find)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise NotPlainError(f"not a message of this protocol: {type(error).__name__}") from error
