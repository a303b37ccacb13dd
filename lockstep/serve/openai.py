"""OpenAI's Chat Completions API, and vLLM's route for token ids: reads requests, writes answers and streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.serve.conversations import Reply, Said, ToolCall
from lockstep.serve.stream import SentReply
from lockstep.serve.wire import (
    Body,
    Choices,
    Refusal,
    Schema,
    Seed,
    Stops,
    Temperature,
    Tokens,
    ToolName,
    TopK,
    TopP,
    Wanted,
    checked_json,
    parsed,
    sampling,
)
from lockstep.types import Completion, FinishReason, Sampled, Sampling, TokenIds


class _Part(Body):
    type: Literal["text"]
    text: str


class _Function(Body):
    name: ToolName
    arguments: str = "{}"


class _Call(Body):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None
    reasoning_content: str | None = None
    """The thoughts of an earlier reply: its ids hold them."""


class _Described(Body):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: Literal[False] | None = None


class _Tool(Body):
    type: Literal["function"]
    function: _Described


class _StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _Format(Body):
    type: Literal["text"]


class _Drawn(Body):
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: str | Stops | None = None
    ignore_eos: bool = False

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the settings. Raises Refusal."""
        if self.stop == "":
            raise Refusal(400, "stop: an empty string ends nothing", "stop")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return sampling(max_tokens, self.temperature, self.top_p, self.top_k, self.min_p, stop, self.ignore_eos)


class ChatBody(_Drawn):
    """A chat request. Settings that this engine has only one value for are taken at that value."""

    model: str
    messages: list[_Message]
    max_completion_tokens: Tokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _Format | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, None] | None = None
    return_token_ids: bool | None = None
    store: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    """Labels of the client's own, as is `user`; they ask for nothing."""


class _Settings(_Drawn):
    logprobs: Literal[0, 1] | None = None
    """Log-probabilities of the sampled ids: always given."""
    skip_special_tokens: bool = True
    detokenize: bool = False
    """Text is not made; both say how it would be."""


class GenerateBody(Body):
    """A request of token ids."""

    token_ids: list[int]
    sampling_params: _Settings = _Settings()
    model: str | None = None
    request_id: str | None = None
    stream: Literal[False] | None = None


def read_chat(data: bytes) -> tuple[ChatBody, Wanted]:
    """Read a chat request. Raises Refusal."""
    body = parsed(ChatBody, data)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise Refusal(400, "max_tokens and max_completion_tokens are two names of one limit", "max_tokens")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream", "stream_options")
    turns = tuple(_turn(message, f"messages.{i}") for i, message in enumerate(body.messages))
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]
    settings = body.sampling(body.max_tokens or body.max_completion_tokens)
    text = json.dumps(tools) if tools else ""
    return body, Wanted(body.model, settings, body.n or 1, body.seed, bool(body.stream), turns, text)


def read_generate(data: bytes, model: str, vocabulary: int) -> tuple[GenerateBody, Wanted]:
    """Read a request of token ids. Raises Refusal."""
    body = parsed(GenerateBody, data)
    s = body.sampling_params
    if not body.token_ids or not all(0 <= token < vocabulary for token in body.token_ids):
        raise Refusal(400, f"token_ids: at least one id, each from 0 to {vocabulary - 1}", "token_ids")
    settings = s.sampling(s.max_tokens)
    return body, Wanted(body.model or model, settings, s.n or 1, s.seed, prompt_ids=tuple(body.token_ids))


def _turn(message: _Message, place: str) -> Said:
    if message.content is None and not message.tool_calls:
        raise Refusal(400, f"{place}.content: a turn without text", f"{place}.content")
    if message.tool_calls and message.role != "assistant":
        raise Refusal(400, f"{place}.tool_calls: only the assistant calls tools", f"{place}.tool_calls")
    text = message.content if isinstance(message.content, str) else "".join(p.text for p in message.content or ())
    calls = tuple(
        ToolCall(
            call.function.name, checked_json(call.function.arguments, f"{place}.tool_calls.{i}.function.arguments")
        )
        for i, call in enumerate(message.tool_calls or ())
    )
    return Said("system" if message.role == "developer" else message.role, text, calls)


# --- answers --------------------------------------------------------------------------------------------------------
def chat_choice(
    index: int, completion: Completion, reply: Reply, body: ChatBody, token: Callable[[int], str]
) -> dict[str, Any]:
    """Return one choice of a chat's answer."""
    said = reply.said
    message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if said.calls else "")}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    reason = "tool_calls" if said.calls else finish_of(completion)
    choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
    if body.logprobs:
        choice["logprobs"] = {"content": _logprobs(completion, token)}
    return choice | ({"token_ids": completion.ids} if body.return_token_ids else {})


def generate_choice(index: int, completion: Completion) -> dict[str, Any]:
    """Return one choice of an answer in ids; log-probabilities are of the distribution that each id was drawn from."""
    content = _logprobs(completion, lambda id: f"token_id:{id}")
    reason = finish_of(completion)
    return {"index": index, "token_ids": completion.ids, "logprobs": {"content": content}, "finish_reason": reason}


def finish_of(completion: Completion) -> str:
    """Return OpenAI's word for the end of a reply."""
    return "length" if completion.finish is FinishReason.LENGTH else "stop"


def usage(prompt: int, reused: int, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the counts of an answer."""
    drawn = sum(len(completion.ids) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


class ChatStream:
    """The chunks of a stream for one choice."""

    def __init__(
        self, head: dict[str, Any], told: dict[str, Any], index: int, body: ChatBody, token: Callable[[int], str]
    ) -> None:
        """Take the `head` of all chunks and what is `told` in the first of them."""
        self._head, self._told, self._index, self._body, self._token = head, told, index, body, token
        self._sent = SentReply()

    def more(self, text: str, thoughts: str, sampled: Sampled | Completion) -> Iterator[dict[str, Any]]:
        """Yield a chunk of what is new in the beginnings of answer and thoughts, if anything is."""
        first = not (self._sent.text or self._sent.thoughts)
        new, thought = self._sent.more(text, thoughts)
        if new or thought:
            delta = {"role": "assistant"} if first else {}
            delta |= ({"content": new} if new else {}) | ({"reasoning_content": thought} if thought else {})
            yield self._chunk(delta, None, **self._tokens(sampled))

    def end(self, choice: dict[str, Any], completion: Completion) -> Iterator[dict[str, Any]]:
        """Yield what is left of a choice that is done."""
        message, first = choice["message"], not (self._sent.text or self._sent.thoughts)
        content = message["content"]
        new, thought = self._sent.rest(content or "", message.get("reasoning_content", ""))
        delta: dict[str, Any] = {"role": "assistant", "content": content} if first else {"content": new} if new else {}
        delta |= {"reasoning_content": thought} if thought else {}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        extra = self._tokens(completion)
        if delta or any(extra.values()):
            yield self._chunk(delta, None, **extra)
        yield self._chunk({}, choice["finish_reason"])

    def _chunk(self, delta: dict[str, Any], finish: str | None, **extra: Any) -> dict[str, Any]:
        told, self._told = self._told, {}
        return (
            self._head | told | {"choices": [{"index": self._index, "delta": delta, "finish_reason": finish, **extra}]}
        )

    def _tokens(self, sampled: Sampled | Completion) -> dict[str, Any]:
        """Return log-probabilities and ids of the tokens since the last chunk, if they were asked for."""
        ids, logprobs = sampled.ids[self._sent.tokens :], sampled.logprobs[self._sent.tokens :]
        self._sent.tokens = len(sampled.ids)
        extra: dict[str, Any] = {}
        if ids and self._body.logprobs:
            extra["logprobs"] = {"content": _logprobs(Sampled(ids, logprobs), self._token)}
        return extra | ({"token_ids": ids} if ids and self._body.return_token_ids else {})


def _logprobs(sampled: Sampled | Completion, token: Callable[[int], str]) -> list[dict[str, Any]]:
    texts = [token(id) for id in sampled.ids]
    return [
        {"token": text, "bytes": list(text.encode("utf-8", "replace")), "logprob": value, "top_logprobs": []}
        for text, value in zip(texts, sampled.logprobs, strict=True)
    ]


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(refusal.status)
    kind = kind or ("server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.field, "code": refusal.code}}


def prompt_of(ids: TokenIds, reused: int, body: ChatBody) -> dict[str, Any]:
    """Return what an answer says about its prompt."""
    return {"prompt_ids_reused": reused} | ({"prompt_token_ids": ids} if body.return_token_ids else {})
