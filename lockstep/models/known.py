"""Knowing a layer by what it computes: its code is compared with that of a layer of transformers whose meaning is known."""

from __future__ import annotations

import importlib
from functools import cache
from types import CodeType
from typing import Any


@cache
def reference(family: str, layer: str) -> Any:
    """Return a layer's class. Example: reference("llama", "LlamaMLP")."""
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), layer)


def same(one: Any, other: Any) -> bool:
    """Return whether two functions are equal up to names of locals and texts."""
    codes = getattr(one, "__code__", None), getattr(other, "__code__", None)
    return one is other or (all(codes) and _meaning(codes[0]) == _meaning(codes[1]))


def _meaning(code: CodeType | None) -> tuple[object, ...]:
    assert code is not None
    return code.co_code, code.co_names, tuple(c for c in code.co_consts if not isinstance(c, str))
