"""Parts that the OpenAI and Anthropic interfaces share: HTTP errors, validation of JSON, and one form for all requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.codec import strict_json
from lockstep.serve.conversations import Said
from lockstep.types import Sampling, TokenIds

MOST_CHOICES = 64
"""Most replies to one request (n)."""


class Refusal(Exception):
    """A request that cannot be served, with its HTTP status. `field` is the setting at fault."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.field, self.code = status, message, field, code
        super().__init__(message)


class Body(BaseModel):
    """A JSON object of known fields: others are refused, so that nothing is ignored in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for replies, the same for all interfaces."""

    model: str
    sampling: Sampling
    """Its `max_tokens` is 0 if the client set no limit."""
    n: int = 1
    seed: int | None = None
    stream: bool = False
    turns: tuple[Said, ...] = ()
    tools: str = ""
    """JSON list of function schemas; "" for none."""
    prompt_ids: TokenIds = ()
    """Prompt that came as ids; empty for a chat."""


def sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    stop: list[str],
    ignore_eos: bool = False,
) -> Sampling:
    """Return the settings, with the interfaces' defaults. Raises Refusal for what the engine would not do."""
    heat = 1.0 if temperature is None else temperature
    if 0 < heat < 1e-3:
        raise Refusal(400, "temperature is 0 (the most likely token) or at least 0.001", "temperature")
    if ignore_eos and stop:
        raise Refusal(400, "ignore_eos goes on to max_tokens, past every stop string", "ignore_eos")
    kept = max(top_k or 0, 0)
    return Sampling(max_tokens or 0, heat, kept, top_p or 1.0, min_p or 0.0, tuple(stop), ignore_eos)


def parsed(kind: type[B], data: bytes) -> B:
    """Read a request's body. Raises Refusal with status 400 that names the field."""
    try:
        value = strict_json(data.decode("utf-8"))
    except ValueError as error:  # no JSON, too deep, a number of thousands of digits
        raise Refusal(400, f"the body is not JSON that can be read: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        first = max(found, key=lambda one: len(one["loc"]))  # of a field's possible kinds the one that fits best
        place = ".".join(str(part) for part in first["loc"] if part != "str" and "[" not in str(part))
        what = "this setting is not known here" if first["type"] == "extra_forbidden" else first["msg"]
        raise Refusal(400, f"{place[:200]}: {what[:300]}", place[:200] or None) from error
    except (UnicodeEncodeError, RecursionError) as error:
        raise Refusal(400, "the body has text that is not Unicode, or is nested too deeply") from error


def checked_json(text: str, field: str) -> str:
    """Return the text of a JSON object. Raises Refusal for anything else."""
    try:
        value = strict_json(text)
    except ValueError as error:
        raise Refusal(400, f"{field}: not JSON", field) from error
    if not isinstance(value, dict):
        raise Refusal(400, f"{field}: not a JSON object", field)
    return text
