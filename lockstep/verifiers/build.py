"""Builds a verifier from its settings."""

from __future__ import annotations

from typing import assert_never

from lockstep.config import schema
from lockstep.config.verifier import compile_pattern
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.choice import Choice
from lockstep.verifiers.code import Code
from lockstep.verifiers.composite import Composite, WeightedPart
from lockstep.verifiers.exact import Numeric, Text
from lockstep.verifiers.expression import Expression
from lockstep.verifiers.judge import Judge
from lockstep.verifiers.python import UserFunction
from lockstep.verifiers.regex import Regex
from lockstep.verifiers.rubric import VerifiersRubric
from lockstep.verifiers.sets import UnorderedSet
from lockstep.verifiers.structured import StructuredJson
from lockstep.verifiers.trl import TrlRewards
from lockstep.verifiers.verl import VerlScore


def build_verifier(settings: schema.Verifier) -> Verifier:
    """Return the verifier that the settings describe. Raises TaskError if a function of the user's or a schema cannot be used."""
    match settings:
        case schema.NumericVerifier():
            return Numeric(settings.fallback, settings.tolerance)
        case schema.TextVerifier():
            return Text(settings.fallback)
        case schema.MathVerifier():
            return Expression(settings)
        case schema.ChoiceVerifier():
            return Choice(settings.options, settings.several, settings.fallback)
        case schema.SetVerifier():
            return UnorderedSet(settings.fallback, settings.tolerance, settings.repeats)
        case schema.RegexVerifier():
            pattern = None if settings.pattern is None else compile_pattern(settings.pattern)
            return Regex(pattern, settings.compare, settings.shown_as)
        case schema.JsonVerifier():
            return StructuredJson(settings)
        case schema.PythonVerifier():
            return UserFunction(settings.path, settings)
        case schema.TrlVerifier():
            return TrlRewards(settings)
        case schema.VerlVerifier():
            return VerlScore(settings)
        case schema.RubricVerifier():
            return VerifiersRubric(settings)
        case schema.CodeVerifier():
            return Code(settings)
        case schema.JudgeVerifier():
            return Judge(settings, None if settings.rule is None else build_verifier(settings.rule))
        case schema.CompositeVerifier():
            parts = [WeightedPart(part.name, build_verifier(part.verifier), part.weight) for part in settings.parts]
            return Composite(parts, settings.combine)
        case _:
            assert_never(settings)
