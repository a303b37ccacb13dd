"""Settings → verifier."""

from __future__ import annotations

from typing import assert_never

from lockstep.config import schema
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.numeric import Numeric
from lockstep.verifiers.python import load_function
from lockstep.verifiers.text import Text


def build_verifier(settings: schema.Verifier) -> Verifier:
    """The verifier that the settings describe. Raises TaskError if a function of the user's cannot be used."""
    match settings:
        case schema.NumericVerifier():
            return Numeric(settings.fallback, settings.tolerance)
        case schema.TextVerifier():
            return Text(settings.fallback)
        case schema.PythonVerifier():
            return load_function(settings.path)
        case _:
            assert_never(settings)
