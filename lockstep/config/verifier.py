"""How replies are graded."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import Section


class NumericVerifier(Section):
    """Exact match of a number: last boxed answer, else (if allowed) the last number of the reply."""

    kind: Literal["numeric"] = "numeric"
    fallback: Literal["none", "last_number"] = "none"
    """What to read when nothing is boxed. last_number can pay for guesses."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference that still counts as equal, relative for |answer| > 1. Two integers must be the same."""


class TextVerifier(Section):
    """Exact match of text after trimming and case folding: last boxed answer, else (if allowed) the last line."""

    kind: Literal["text"] = "text"
    fallback: Literal["none", "last_line"] = "none"
    """What to read when nothing is boxed."""


class PythonVerifier(Section):
    """A function from your file: def grade(prompt, reply) returning a number or a Grade."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:function"""


Verifier: TypeAlias = Annotated[NumericVerifier | TextVerifier | PythonVerifier, Field(discriminator="kind")]
