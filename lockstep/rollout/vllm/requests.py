"""Translates requests into vLLM's, and vLLM's outputs into completions. Does not import vLLM.

vLLM never sees a text: prompts go in as ids, detokenising is off, and stop strings are searched here, in the text of the whole
reply as the tokenizer decodes it. A search every STRIDE tokens is enough: tokens sampled after the one that completes a stop
string are cut off, ids and log-probabilities alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.vllm import LARGEST_TEMPERATURE, LEAST_TEMPERATURE
from lockstep.errors import DEFECT, EngineError
from lockstep.rollout.requests import SHORTEN, Decode, check_request, stopped_at
from lockstep.types import Completion, FinishReason, Request

STRIDE = 8
"""A running reply is searched for stop strings whenever it has grown by this many tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """vLLM's sampling parameters of one request (vllm.SamplingParams has fields of these names)."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop_token_ids: list[int]
    ignore_eos: bool = True
    """Always True: otherwise vLLM adds the end tokens of the model's generation_config to the given ones."""
    logprobs: int = 0
    """Number of alternatives with log-probabilities; 0 is the sampled token alone."""
    flat_logprobs: bool = True
    detokenize: bool = False


@dataclass(slots=True)
class Pending:
    """A request that vLLM works on."""

    request: Request
    searched: int = 0
    """Tokens already searched for stop strings."""


def check_servable(request: Request, version: int, longest: int) -> None:
    """Raise StaleWeightsError for another version, EngineError for a request that vLLM cannot serve."""
    check_request(
        request, version, longest, f"{SHORTEN}, or raise rollout.vllm.max_model_len within the model's context"
    )
    temperature = request.sampling.temperature
    if temperature and not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise EngineError(
            f"vLLM cannot sample at temperature {temperature:g}",
            where=f"request {request.id}",
            fix=f"set the temperature to 0, or from {LEAST_TEMPERATURE} to {LARGEST_TEMPERATURE:g}; or set rollout.engine=native",
        )


def asked_of(request: Request, stop_ids: Sequence[int], *, seeded: bool) -> Asked:
    """Return vLLM's parameters of a request. vLLM accepts no top_k, top_p or min_p at temperature 0."""
    sampling = request.sampling
    return Asked(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=request.seed & (2**63 - 1) if seeded else None,
        stop_token_ids=[] if sampling.ignore_eos else list(stop_ids),
    )


def streams(request: Request) -> bool:
    """Return whether a running reply must be searched for stop strings."""
    return bool(request.sampling.stop) and not request.sampling.ignore_eos


def look(pending: Pending, ids: Sequence[int], finished: bool, decode: Decode) -> int | None:
    """Search a reply that has grown; returns the number of tokens at which a stop string ends it, None if it continues."""
    if not streams(pending.request) or not (finished or len(ids) - pending.searched >= STRIDE):
        return None
    end = stopped_at(ids, pending.searched, pending.request.sampling.stop, decode)
    pending.searched = len(ids)
    return end


def completion_of(
    pending: Pending, ids: Sequence[int], logprobs: Sequence[float], end: int | None, reason: str | None, version: int
) -> Completion:
    """Return the completion. `end` is where a stop string cut the reply off; `reason` is vLLM's own ("stop", "length").

    Raises EngineError for a reply that vLLM did not finish, or whose log-probabilities do not fit its tokens.
    """
    request = pending.request
    if len(logprobs) != len(ids):
        what = f"vLLM gave {len(logprobs)} log-probabilities for a reply of {len(ids)} tokens"
        raise EngineError(what, where=f"request {request.id}", fix=DEFECT)
    if end is not None:
        return Completion(request, tuple(ids[:end]), tuple(logprobs[:end]), FinishReason.STOP, version)
    if reason not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended the reply for an unexpected reason: {reason!r}",
            where=f"request {request.id}",
            fix="look for the cause in vLLM's log above",
        )
    return Completion(request, tuple(ids), tuple(logprobs), FinishReason(reason), version)
