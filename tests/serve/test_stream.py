"""Streams: tokens are sent as they are sampled, and together say what the reply says."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.loopback import HOST
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.serve.conversations import Conversations, settled
from lockstep.serve.endpoint import CHAT, MESSAGES, Endpoint
from lockstep.serve.thread import EngineThread
from lockstep.types import ClientRequest, Completion, FinishReason, Request, Sampled
from tests.envs.played import chat_of, engine_of
from tests.serve.served import KEY, MODEL, TOKEN, Held, Scripted, idle, post, served, until
from tests.serve.test_endpoint import ASK, CALL, LONG, TOOL

LONG_ASK = ASK | {"max_tokens": 200, "ignore_eos": True, "logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def endpoint(tiny_model_dir: Path) -> Iterator[Endpoint]:
    with served(tiny_model_dir) as endpoint:
        yield endpoint


@contextmanager
def streamed(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream, as they arrive."""
    connection = http.client.HTTPConnection(HOST, endpoint.server_port, timeout=60)
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"x-api-key": TOKEN})
    answer = connection.getresponse()
    assert answer.status == 200
    lines = (line.decode().strip().removeprefix("data: ") for line in answer if line.startswith(b"data: "))
    try:
        yield (json.loads(line) for line in lines if line != "[DONE]")
    finally:
        answer.close()
        connection.close()


def joined(chunks: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    """A choice put together from its chunks."""
    pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return {
        "content": "".join(piece["delta"].get("content") or "" for piece in pieces),
        "thoughts": "".join(piece["delta"].get("reasoning_content", "") for piece in pieces),
        "logprobs": [one for piece in pieces if "logprobs" in piece for one in piece["logprobs"]["content"]],
        "ids": [id for piece in pieces for id in piece.get("token_ids", ())],
        "calls": [call for piece in pieces for call in piece["delta"].get("tool_calls", ())],
        "roles": [piece["delta"]["role"] for piece in pieces if "role" in piece["delta"]],
        "finish": [piece["finish_reason"] for piece in pieces if piece["finish_reason"]],
        "pieces": sum(bool(piece["delta"].get("content")) for piece in pieces),
    }


@pytest.mark.parametrize("stop", [[], ["e"], ["zz", "th", "\n"]])
def test_the_deltas_of_each_choice_say_what_the_reply_says(endpoint: Endpoint, stop: list[str]):
    body = LONG_ASK | {"n": 3, "seed": 7, "stop": stop, "ignore_eos": not stop}
    whole = post(endpoint, CHAT, body)[1]
    with streamed(endpoint, CHAT, body | {"stream_options": {"include_usage": True}}) as events:
        chunks = list(events)
    assert chunks[-1]["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    for choice in whole["choices"]:
        found = joined(chunks, choice["index"])
        assert found["content"] == choice["message"]["content"]
        assert found["logprobs"] == choice["logprobs"]["content"], "bit-equal"
        assert found["ids"] == choice["token_ids"]
        assert (found["roles"], found["finish"]) == (["assistant"], [choice["finish_reason"]])
        assert stop or found["pieces"] > 20
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 3


def test_the_events_of_a_message_say_what_it_says(endpoint: Endpoint):
    body: dict[str, Any] = ASK | {"max_tokens": 120, "temperature": 0.0}
    whole = post(endpoint, MESSAGES, body)[1]
    with streamed(endpoint, MESSAGES, body) as events:
        found = list(events)
    kinds = [event["type"] for event in found]
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert len(deltas) > 5 or len(whole["content"][0]["text"]) < 10
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert found[0]["message"]["usage"] == {"input_tokens": whole["usage"]["input_tokens"], "output_tokens": 0}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]


@pytest.mark.parametrize("kind", [NativeEngine, PagedEngine])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_first_text_arrives_before_the_reply_is_done_and_a_client_that_leaves_frees_its_row(
    tiny_model_dir: Path, kind: type, path: str
):
    engine = engine_of(tiny_model_dir, 4, kind)
    with (
        EngineThread(engine) as thread,
        Endpoint(thread, chat_of(tiny_model_dir), model=MODEL, context=512) as endpoint,
    ):
        endpoint.admit(TOKEN, KEY)
        held = Held(thread)
        long = LONG if path == CHAT else ASK | {"max_tokens": 400, "temperature": 1.0}
        with streamed(endpoint, path, long) as events:
            text = next(found for event in events if (found := text_of(event)))
            assert text
            assert thread.counts()["running"] == 1
            assert engine.held
        held.go.set()
        until(lambda: idle(endpoint), 10)
        assert engine.held == 0
        assert engine.processed < 350


def text_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        return str(event["choices"][0]["delta"].get("content") or "")
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


def test_openais_and_anthropics_clients_read_streams(endpoint: Endpoint):
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    ask: dict[str, Any] = ASK | {"max_tokens": 100}
    with openai.OpenAI(base_url=f"{endpoint.address}/v1", api_key=TOKEN, max_retries=0) as client:
        whole = client.chat.completions.create(**ask, seed=3).choices[0].message.content
        chunks = client.chat.completions.create(**ask, seed=3, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with anthropic.Anthropic(base_url=endpoint.address, api_key=TOKEN, max_retries=0) as client:
        with client.messages.stream(**ask, extra_body={"temperature": 0.0}) as stream:
            text = "".join(stream.text_stream)
        assert text == client.messages.create(**ask, extra_body={"temperature": 0.0}).content[0].text


# --- texts that are given -------------------------------------------------------------------------------------------
class Growing(Scripted):
    """A sampler whose replies grow by one token at a time."""

    def sample(self, ask: ClientRequest) -> Future[Completion]:
        text = self.replies.pop(0)
        ids = (*self.chat.tokenizer(text, add_special_tokens=False)["input_ids"], self.chat.stop_ids[0])
        future: Future[Completion] = Future()
        request = Request(ask.id, ask.prompt_ids, ask.id, 0, ask.sampling, 0)
        done = Completion(request, ids, tuple(-0.5 * i for i in range(len(ids))), FinishReason.STOP, 0)

        def grow() -> None:
            for size in range(1, len(ids)):
                if ask.seen is not None:
                    ask.seen(Sampled(ids[:size], done.logprobs[:size]))
                threading.Event().wait(0.001)
            future.set_result(done)

        threading.Thread(target=grow, daemon=True).start()
        return future


TEXTS = (
    "é ü 漢字 🙂🙂 and so on, café 🙂",
    "  white  space \n\n around it \n ",
    CALL,
    CALL + CALL.replace("add", "more").replace("I more. ", ""),
    '{"name": "add", "parameters": {"a": 4}}',
    "4 < 5 <tool 6 <tool_cal",
    "<tool_call>\nnot JSON</tool_call> so it is text",
    "",
)


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_given_texts_arrive_as_they_are(tiny_model_dir: Path, text: str, tools: bool, path: str):
    chat = chat_of(tiny_model_dir)
    tool = TOOL if path == CHAT else {"name": "add", "input_schema": {"type": "object"}}
    body: dict[str, Any] = ASK | ({"tools": [tool]} if tools else {})
    with Endpoint(Growing(chat, [text, text]), chat, model=MODEL) as endpoint:
        endpoint.admit(TOKEN, KEY)
        whole = post(endpoint, path, body)[1]
        with streamed(endpoint, path, body) as events:
            found = list(events)
    assert all("\ufffd" not in json.dumps(event, ensure_ascii=False) for event in found)
    if path == CHAT:
        message, pieces = whole["choices"][0]["message"], joined(found, 0)
        assert pieces["content"] == (message["content"] or "")
        unnamed = [{"function": call["function"]} for call in message.get("tool_calls", ())]
        assert [{"function": call["function"]} for call in pieces["calls"]] == unnamed
        assert pieces["finish"] == [whole["choices"][0]["finish_reason"]]
        return
    blocks: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_delta":
            blocks[event["index"]] = blocks.get(event["index"], "") + "".join(
                event["delta"].get(name, "") for name in ("text", "partial_json")
            )
    wanted = [block.get("text") or json.dumps(block.get("input", "")) for block in whole["content"]]
    assert [text for _, text in sorted(blocks.items())] == [text for text in wanted if text != '""']
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]


@given(seed=st.integers(0, 10_000))
def test_no_settled_text_is_taken_back(conversations: Conversations, seed: int):
    chance = random.Random(seed)
    parts = ["a", " ", "\n", "<", "<tool", "_call>", "</tool_call>", "é", "🙂", "stop", "st", "op", "漢", "x. "]
    ids = conversations.chat.tokenizer("".join(chance.choices(parts, k=20)), add_special_tokens=False)["input_ids"]
    before = ""
    for size in range(len(ids) + 1):
        text, _ = conversations.so_far(tuple(ids[:size]), ["stop"], "")
        if len(text) > len(before):
            assert text.startswith(before)
            before = text
    assert conversations.read(tuple(ids), ["stop"], "", "").said.text.startswith(before)


@pytest.fixture(scope="module")
def conversations(tiny_model_dir: Path) -> Conversations:
    return Conversations(chat_of(tiny_model_dir))


def test_what_may_still_change_is_held_back():
    assert settled("4 \ufffd\ufffd", []) == "4"
    assert settled("4 <tool", ["<tool_call>"]) == "4"
    assert settled("we st", ["stop", "e s"]) == "we"
    assert settled("we stop", ["never"]) == "we stop"


def test_thoughts_are_sent_before_the_answer(tiny_model_dir: Path):
    chat = chat_of(tiny_model_dir)
    chat.parser = "think"
    reply = "<think>four and three</think>\n\nIt is 7."
    with Endpoint(Growing(chat, [reply, reply]), chat, model=MODEL) as endpoint:
        endpoint.admit(TOKEN, KEY)
        message = post(endpoint, CHAT, ASK)[1]["choices"][0]["message"]
        with streamed(endpoint, CHAT, ASK) as events:
            found = joined(list(events), 0)
    assert (found["thoughts"], found["content"]) == (message["reasoning_content"], message["content"])
    assert found["content"] == "It is 7."


def test_a_reply_that_is_read_otherwise_at_its_end_is_an_error(tiny_model_dir: Path):
    """A thought in the middle: what came before it was sent as the answer."""
    chat = chat_of(tiny_model_dir)
    chat.parser = "think"
    with Endpoint(Growing(chat, ["First this. <think>or not</think> 7"]), chat, model=MODEL) as endpoint:
        endpoint.admit(TOKEN, KEY)
        with streamed(endpoint, CHAT, ASK) as events:
            last = list(events)[-1]
    assert "send the request with stream=false" in last["error"]["message"]
