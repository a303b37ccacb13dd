"""The verifier `json`: checks that an answer is a JSON value that fits a schema and equals the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, assert_never

from lockstep.codec import strict_json
from lockstep.errors import TaskError
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored, verdict
from lockstep.verifiers.extract import FINAL_SHARE, MAX_DEPTH, Answer, final_span
from lockstep.workers.pool import Answered, Died, Exceeded, Failed, Work, WorkerPool

if TYPE_CHECKING:
    from referencing import Resource

    from lockstep.config import schema

REGION = 65_536
"""A value is only looked for in this many characters at the end of the reply."""
WALL_SECONDS = 30.0
MEMORY = 512 << 20
_JSON_FENCE = "```json"
_STRING_OR_FENCE = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"?|```')


class StructuredJson:
    """Scores 1 if the reply's value fits the schema and (with `equal`) is the reference. Settings: config.schema.JsonVerifier."""

    def __init__(self, settings: schema.JsonVerifier) -> None:
        """Raises TaskError if the schema is no JSON Schema."""
        self.equal = settings.equal
        self.pool: WorkerPool | None = None
        self.workers = 0
        if settings.json_schema:
            wall = WALL_SECONDS + 4 * settings.cpu_seconds
            work = Work(__name__, {"wanted": settings.json_schema}, "verifier json", wall, settings.cpu_seconds, MEMORY)
            self.pool = WorkerPool(work, settings.workers)
            self.workers = settings.workers
            self.pool.start()

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        answer = find_json(reply)
        try:
            reference = read_json(prompt.answer) if self.equal else None
        except ValueError as error:
            return unscored(f"the reference answer of {shown(prompt.id)} is not JSON: {error}")
        try:
            value = read_json(answer.text or "")
        except ValueError:
            return verdict(answer, False)
        if self.equal and not same(value, reference):
            return verdict(answer, False)
        if self.pool is None:
            return verdict(answer, True)
        outcome = self.pool.call(value)
        match outcome:
            case Answered(fits):
                return verdict(answer, fits is True)
            case Exceeded(limit="time") | Died():
                return unscored(f"the validation was held up: {outcome.error}")
            case Exceeded() | Failed():
                return verdict(answer, False)
            case _:
                assert_never(outcome)


def find_json(reply: str) -> Answer:
    """Return the last closed ```json block of the final part, else all of it. Linear; backquotes in a string close none."""
    start, end = final_span(reply)
    start = max(start, end - REGION)
    text = reply[start:end]
    found: Answer | None = None
    opened = text.find(_JSON_FENCE)
    while opened >= 0:
        begin = opened + len(_JSON_FENCE)
        closed = next((match.start() for match in _STRING_OR_FENCE.finditer(text, begin) if match[0] == "```"), -1)
        if closed >= 0 and text.startswith(_JSON_FENCE, closed):
            opened = closed  # the one before was not closed
            continue
        if closed >= 0:
            in_final = start + opened >= (1 - FINAL_SHARE) * len(reply)
            found = Answer(text[begin:closed].strip(), "json_block", in_final)
        opened = text.find(_JSON_FENCE, closed + 3) if closed >= 0 else -1
    whole = text.strip()
    return found or (Answer(whole, "whole") if whole else Answer(None, "none"))


def read_json(text: str) -> Any:
    """Return a JSON value. Raises ValueError for NaN, infinities, repeated keys, nesting deeper than 64, and anything else."""
    if _depth(text) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return strict_json(text, distinct=True)


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are the same number, true is no number."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _depth(text: str) -> int:
    """Return how deep brackets nest outside strings."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif in_string:
            escaped, in_string = char == "\\", char != '"'
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def load(wanted: dict[str, Any]) -> Callable[[Any], object]:
    """Load what answers calls in a worker: whether a value fits the schema, which may take exponential work.

    Nothing is fetched: a reference to another document is an error. Raises TaskError if the schema is none, or jsonschema is
    not installed.
    """
    from jsonschema.validators import SPECIFICATIONS, validator_for

    check_schema(wanted)
    validator = validator_for(wanted)(wanted, registry=SPECIFICATIONS)
    return lambda value: bool(validator.is_valid(value))


def check_schema(
    wanted: Mapping[str, Any],
    what: str = "the value",
    where: str = "verifier json",
    fix: str = "task.verifier.json_schema",
) -> None:
    """Raises TaskError unless this is a JSON Schema whose references lead to parts of it; `fix` names what to correct."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import SPECIFICATIONS, validator_for
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    try:
        validator_for(wanted).check_schema(wanted)
        root = Resource.from_contents(wanted, default_specification=DRAFT202012)
        lost = _lost(root, SPECIFICATIONS.resolver_with_root(root))
        reason = f"its $ref {lost} leads nowhere" if lost else ""
    except SchemaError as error:
        reason = error.message
    if reason:
        raise TaskError(f"{what} is not a JSON Schema: {reason}", where=where, fix=f"correct {fix}")


def _lost(part: Resource[Any], resolver: Any) -> str:
    """Return the first reference in a part of a schema that leads nowhere; "" if there is none."""
    from referencing.exceptions import Unresolvable

    resolver, here = resolver.in_subresource(part), part.contents
    try:
        if isinstance(here, Mapping) and "$ref" in here:
            resolver.lookup(here["$ref"])
    except Unresolvable:
        return str(here["$ref"])
    return next(filter(None, (_lost(one, resolver) for one in part.subresources())), "")
