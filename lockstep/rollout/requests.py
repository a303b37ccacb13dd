"""Checks that every engine makes before it accepts a request or new weights, and its search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from lockstep.errors import EngineError, StaleWeightsError
from lockstep.models.weights import active_adapter
from lockstep.types import Forward, Request, TokenIds


class Closing(Protocol):
    def close(self) -> None: ...


STOP_WINDOW = 64
"""Minimum number of last tokens whose text is searched for a stop string."""
Decode = Callable[[Sequence[int]], str]
SHORTEN = "shorten the prompt or lower rollout.max_tokens"


def check_version(request: Request, version: int) -> None:
    """Raise StaleWeightsError for a request that asks for another version of the weights."""
    if request.version != version:
        raise StaleWeightsError(
            f"the request needs version {request.version} of the weights, but the engine holds version {version}",
            where=f"request {request.id}",
            fix="push the learner's weights with WeightSync before sampling",
        )


def check_request(request: Request, version: int, context: int, fix: str = SHORTEN) -> None:
    """Raise StaleWeightsError for another version, EngineError for an invalid request. Context 0 means unlimited."""
    check_version(request, version)
    prompt, budget = len(request.prompt_ids), request.sampling.max_tokens
    if not prompt or budget < 1:
        raise EngineError(
            "the request has an empty prompt, or allows no new token",
            where=f"request {request.id}",
            fix="give a prompt of at least one token and max_tokens of at least 1",
        )
    if not 0 <= request.prefix < prompt:
        raise EngineError(
            f"the shared prefix has {request.prefix} tokens, but the prompt has only {prompt}",
            where=f"request {request.id}",
            fix="make the shared prefix shorter than the prompt",
        )
    if context and prompt + budget > context:
        raise EngineError(
            f"{prompt} prompt tokens and {budget} new tokens exceed the model's context of {context}",
            where=f"request {request.id}",
            fix=fix,
        )


def check_groups(requests: Sequence[Request], prompts: dict[str, TokenIds]) -> None:
    """Raise EngineError if a group has two prompts; `prompts` holds those of known groups, and gains the new ones."""
    for request in requests:
        if prompts.setdefault(request.group, request.prompt_ids) != request.prompt_ids:
            raise EngineError(
                f"requests of group {request.group} have different prompts",
                where=f"request {request.id}",
                fix="give each prompt its own group",
            )


def check_adapter(model: nn.Module, adapter: str | None) -> None:
    """Raise EngineError if another adapter is on than when the engine captured its decode steps."""
    if (now := active_adapter(model)) != adapter:
        raise EngineError(
            f"the active adapter is {now or 'none'}, but the engine was built for {adapter or 'none'}",
            where="AdapterSet",
            fix="build a new engine after activate(), because captured decode steps belong to one adapter",
        )


@contextmanager
def closing_on_error(engine: Closing) -> Iterator[None]:
    """Make the engine drop all requests after an error: partial results are no samples. An interrupted read is not an error."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException:
        engine.close()
        raise


def check_idle(open_requests: int, version: int) -> None:
    """Raise EngineError if weights of `version` arrive while requests are open."""
    if open_requests:
        raise EngineError(
            f"weights of version {version} cannot be loaded while {open_requests} requests run",
            fix="read all completions before a sync",
        )


def check_settled(open_requests: int, where: str = "") -> None:
    """Raise EngineError if numerics or noise are to change while requests are open."""
    if open_requests:
        what = f"numerics and noise cannot change while {open_requests} requests run"
        raise EngineError(what, where=where, fix="read all completions first")


def check_clean(forward: Forward, what: str) -> None:
    """Raise EngineError while noise is on: weights cannot be loaded, proven or saved then."""
    if forward.noise is not None:
        raise EngineError(
            f"{what} while noise is applied to the normalisation weights",
            where="noise",
            fix="remove the noise first (engine.set_forward)",
        )


def stopped_at(ids: Sequence[int], searched: int, stops: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens that first complete one of `stops`, beyond the `searched` first ones; None if none does."""
    # A character may take four tokens, one for each of its bytes.
    window = max(STOP_WINDOW, 4 * max(map(len, stops)) + 8)
    whole = decode(ids[max(0, searched + 1 - window) :])
    if not any(stop in whole for stop in stops) and "\ufffd" not in whole:
        return None
    for end in range(searched + 1, len(ids) + 1):
        text = decode(ids[max(0, end - window) : end])
        if any(stop in text for stop in stops):
            return end
    return None
