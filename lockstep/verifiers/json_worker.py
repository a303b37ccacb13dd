"""Whether a value fits a JSON Schema, in a worker with limits: a schema may ask for exponential work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.verifiers.structured import check_schema


def load(wanted: dict[str, Any]) -> Callable[[Any], object]:
    """What answers calls in a worker. Nothing is fetched: a reference to another document is an error.

    Raises TaskError if the schema is none, or jsonschema is not installed.
    """
    from jsonschema.validators import validator_for
    from referencing import Registry

    check_schema(wanted)
    validator = validator_for(wanted)(wanted, registry=Registry())
    return lambda value: bool(validator.is_valid(value))
