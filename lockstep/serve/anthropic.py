"""Anthropic's Messages API: reads requests, writes answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.serve.conversations import Reply, Said, ToolCall
from lockstep.serve.stream import SentReply
from lockstep.serve.wire import (
    Body,
    Refusal,
    Schema,
    Stops,
    Temperature,
    Tokens,
    ToolName,
    TopK,
    TopP,
    Wanted,
    parsed,
    sampling,
)
from lockstep.types import Completion, FinishReason

Hint = dict[str, str] | None
"""Hint what to cache, and for how long: it changes the price elsewhere, and nothing here."""


class _Text(Body):
    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: None = None


class _Use(Body):
    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: Schema
    cache_control: Hint = None


class _Result(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] = ""
    is_error: bool = False
    cache_control: Hint = None


_Block = Annotated[_Text | _Use | _Result, Field(discriminator="type")]


class _Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Tool(Body):
    name: ToolName
    description: str | None = None
    input_schema: Schema
    type: Literal["custom"] | None = None
    cache_control: Hint = None


class _Auto(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: Literal[False] = False


class _NoThinking(Body):
    type: Literal["disabled"]


class _Metadata(Body):
    user_id: str | None = None


class MessagesBody(Body):
    """A request for a message."""

    model: str
    messages: list[_Message]
    max_tokens: Tokens
    system: str | list[_Text] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Auto | None = None
    thinking: _NoThinking | None = None
    metadata: _Metadata | None = None


def read_messages(data: bytes) -> Wanted:
    """Read a request. Raises Refusal."""
    body = parsed(MessagesBody, data)
    turns = [Said("system", _text(body.system))] if body.system else []
    for i, message in enumerate(body.messages):
        turns += _turns(message, f"messages.{i}.content")
    tools = [
        {"type": "function", "function": _described(tool)} for tool in body.tools or ()
    ]  # the form in which templates take tools
    stops = body.stop_sequences or []
    settings = sampling(body.max_tokens, body.temperature, body.top_p, body.top_k, None, stops)
    text = json.dumps(tools) if tools else ""
    return Wanted(body.model, settings, stream=bool(body.stream), turns=tuple(turns), tools=text)


def _described(tool: _Tool) -> dict[str, Any]:
    told = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **told, "parameters": tool.input_schema}


def _turns(message: _Message, place: str) -> list[Said]:
    """Return a message as turns: results of tools are turns of their own, before the text beside them."""
    if isinstance(message.content, str):
        return [Said(message.role, message.content)]
    texts, calls, results = [], [], []
    for i, block in enumerate(message.content):
        if isinstance(block, _Text):
            texts.append(block.text)
        elif isinstance(block, _Use) and message.role == "assistant":
            calls.append(ToolCall(block.name, json.dumps(block.input), block.id))
        elif isinstance(block, _Result) and message.role == "user" and not texts:
            results.append(Said("tool", f"{'Error: ' if block.is_error else ''}{_text(block.content)}"))
        else:
            what = "results come first, in the user's turn, and calls are the assistant's"
            raise Refusal(400, f"{place}.{i}: a {block.type} in the wrong place: {what}", f"{place}.{i}")
    if not (texts or calls or results):
        raise Refusal(400, f"{place}: a turn without text", place)
    return results + ([Said(message.role, "".join(texts), tuple(calls))] if texts or calls else [])


def _text(content: str | list[_Text]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


# --- answers --------------------------------------------------------------------------------------------------------
def message_of(id: str, model: str, completion: Completion, reply: Reply, reused: int) -> dict[str, Any]:
    """Return the answer: a message."""
    said = reply.said
    blocks: list[dict[str, Any]] = [{"type": "text", "text": said.text}] if said.text or not said.calls else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in said.calls
    ]
    if completion.finish is FinishReason.LENGTH:
        reason = "max_tokens"
    else:
        reason = "tool_use" if said.calls else "stop_sequence" if reply.stop else "end_turn"
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": reply.stop or None,
        "usage": {"input_tokens": len(completion.request.prompt_ids), "output_tokens": len(completion.ids)},
        "prompt_ids_reused": reused,
    }


class MessageStream:
    """The events of a stream. Its text is block 0."""

    def __init__(self) -> None:
        self._sent = SentReply()

    def begin(self, id: str, model: str, prompt: int, reused: int) -> dict[str, Any]:
        """Return the event that comes first."""
        used = {"input_tokens": prompt, "output_tokens": 0}
        message: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "usage": used,
        }
        message |= {"stop_reason": None, "stop_sequence": None, "prompt_ids_reused": reused}
        return {"type": "message_start", "message": message}

    def more(self, text: str, *, whole: bool = False) -> Iterator[dict[str, Any]]:
        """Yield what is new in the beginning of the text, or in the `whole`."""
        first = not self._sent.text
        new, _ = self._sent.rest(text, "") if whole else self._sent.more(text, "")
        if first and (new or whole):
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        if new:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": new}}

    def end(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what is left of a message that is done."""
        blocks = message["content"]
        if not any(block["type"] == "text" for block in blocks):
            self._sent.rest("", "")
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                yield from self.more(block["text"], whole=True)
            else:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        used = {"output_tokens": message["usage"]["output_tokens"]}
        yield {"type": "message_delta", "delta": ended, "usage": used}
        yield {"type": "message_stop"}


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
