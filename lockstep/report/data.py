"""Converts data to JSON for an HTML page: texts become safe to show, and numbers that are not finite become null."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from lockstep.track.text import visible


def page_data(value: object) -> Any:
    """Convert to JSON for a page: control characters of texts as escapes, numbers that are not finite as null.

    Raises TypeError for what JSON cannot hold.
    """
    match value:
        case None | bool() | int():
            return value
        case str():
            return visible(str(value))
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {visible(str(key)): page_data(item) for key, item in value.items()}
        case Sequence():
            return [page_data(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return page_data(asdict(value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be shown in a report: {value!r}")
