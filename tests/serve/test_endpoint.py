"""The HTTP server: what clients of OpenAI and Anthropic get, exact ids, refusals, clients that go away, hostile bytes."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.loopback import HOST, LoopbackServer
from lockstep.serve.endpoint import CHAT, GENERATE, MESSAGES, MOST_BYTES, Endpoint
from lockstep.serve.thread import EngineThread
from lockstep.types import Request, Sampling
from tests.envs.played import chat_of, engine_of
from tests.rollout.engines import finish
from tests.serve.served import KEY, MODEL, TOKEN, Held, Scripted, idle, post, raw, served, until

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "What is 4 + 3?"}], "max_tokens": 5}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 3}}\n</tool_call>'
LONG = ASK | {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def endpoint(tiny_model_dir: Path) -> Iterator[Endpoint]:
    with served(tiny_model_dir) as endpoint:
        yield endpoint


@pytest.fixture
def scripted(tiny_model_dir: Path) -> Iterator[Endpoint]:
    chat = chat_of(tiny_model_dir)
    with Endpoint(Scripted(chat, [CALL, "It is 7."]), chat, model=MODEL) as endpoint:
        endpoint.admit(TOKEN, KEY)
        yield endpoint


# --- real clients ---------------------------------------------------------------------------------------------------
def test_openais_client(endpoint: Endpoint, tiny_model_dir: Path):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{endpoint.address}/v1", api_key=TOKEN, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        done = client.chat.completions.create(**ASK, n=3, seed=5, logprobs=True, extra_body={"return_token_ids": True})
        assert len({tuple(choice.token_ids) for choice in done.choices}) == 3
        first, prompt = done.choices[0], tuple(done.prompt_token_ids)
        assert prompt == chat_of(tiny_model_dir).render(ASK["messages"])
        own = finish(engine_of(tiny_model_dir), [Request("a", prompt, "a", 5, Sampling(5), 0)])["a"]
        assert tuple(first.token_ids) == own.ids
        assert tuple(token.logprob for token in first.logprobs.content) == own.logprobs, "bit-equal"
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (
            len(prompt),
            sum(len(c.token_ids) for c in done.choices),
        )
        stream = client.chat.completions.create(**ASK, n=2, seed=5, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        for index, choice in enumerate(done.choices[:2]):
            pieces = [c for chunk in chunks for c in chunk.choices if c.index == index]
            assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
            assert pieces[-1].finish_reason == choice.finish_reason
        assert chunks[-1].usage.prompt_tokens == len(prompt)
        with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
            client.chat.completions.create(**ASK, logit_bias={"5": 3})
        assert refused.value.param == "logit_bias.5"
        with pytest.raises(openai.NotFoundError, match="tiny"):
            client.chat.completions.create(**(ASK | {"model": "gpt-9"}))
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="no").models.list()


def test_anthropics_client(endpoint: Endpoint):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=endpoint.address, api_key=TOKEN, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        ask = {**ASK, "system": "Be brief.", "extra_body": {"temperature": 0.0}}
        message = client.messages.create(**ask)
        assert message.stop_reason in ("max_tokens", "end_turn")
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == message.content[0].text == final.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**(ask | {"model": "opus"}))
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="no").messages.create(**ask)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_with_openais_client(scripted: Endpoint, stream: bool):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{scripted.address}/v1", api_key=TOKEN, max_retries=0) as client:
        ask = {"model": MODEL, "messages": list(ASK["messages"]), "tools": [TOOL]}
        if stream:
            pieces = [c for chunk in client.chat.completions.create(**ask, stream=True) for c in chunk.choices]
            (call,) = [call for piece in pieces for call in piece.delta.tool_calls or ()]
            content, reason = pieces[0].delta.content, pieces[-1].finish_reason
            said = {"role": "assistant", "content": content, "tool_calls": [call.model_dump(exclude={"index"})]}
        else:
            choice = client.chat.completions.create(**ask).choices[0]
            (call,) = choice.message.tool_calls
            content, reason, said = choice.message.content, choice.finish_reason, choice.message.to_dict()
        assert (content, reason) == ("I add.", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 4, "b": 3})
        ask["messages"] += [said, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        done = client.chat.completions.create(**ask)
    goes_on(scripted, done.choices[0].message.content, done.prompt_ids_reused)


def test_tools_with_anthropics_client(scripted: Endpoint):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=scripted.address, api_key=TOKEN, max_retries=0) as client:
        tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
        ask: dict[str, Any] = {**ASK, "tools": [tool]}
        message = client.messages.create(**ask)
        assert message.stop_reason == "tool_use"
        text, use = message.content
        assert (text.text, use.name, use.input) == ("I add.", "add", {"a": 4, "b": 3})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "7"}]}
        ask["messages"] = [
            *ASK["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        done = client.messages.create(**ask)
    goes_on(scripted, done.content[0].text, done.prompt_ids_reused)


def goes_on(scripted: Endpoint, said: str, reused: int) -> None:
    """The second prompt is the first, the sampled ids, and the result of the tool."""
    assert isinstance(scripted.sampler, Scripted)
    one, other = scripted.sampler.asks
    chat = scripted.sampler.chat
    sampled = (*chat.tokenizer(CALL, add_special_tokens=False)["input_ids"], chat.stop_ids[0])
    assert said == "It is 7."
    assert reused == len(one.prompt_ids) + len(sampled)
    assert other.prompt_ids[:reused] == one.prompt_ids + sampled
    assert chat.tokenizer.decode(other.prompt_ids[reused:]).endswith("7<|im_end|>\n<|im_start|>assistant\n")
    assert '"add"' in chat.tokenizer.decode(one.prompt_ids)


# --- exact ids ------------------------------------------------------------------------------------------------------
def test_turns_go_on_from_the_sampled_ids_and_a_rewritten_one_does_not(endpoint: Endpoint):
    ask: dict[str, Any] = {**ASK, "return_token_ids": True, "messages": list(ASK["messages"])}
    before: list[int] = []
    states: list[int] = []
    for turn in range(4):
        status, answer, _ = post(endpoint, CHAT, ask)
        assert status == 200
        assert answer["prompt_ids_reused"] == len(before)
        assert answer["prompt_token_ids"][: len(before)] == before
        before = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        states.append(len(before))
        message = answer["choices"][0]["message"]
        ask["messages"] += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": f"{turn}?"},
        ]
    ask["messages"][5]["content"] += " (edited)"  # the third reply: what was known before it still is
    assert post(endpoint, CHAT, ask)[1]["prompt_ids_reused"] == states[1]
    endpoint.admit("another token of another client", "other")
    assert post(endpoint, CHAT, ask, "another token of another client")[1]["prompt_ids_reused"] == 0
    endpoint.withdraw("another token of another client")


def test_ids_in_and_ids_out(endpoint: Endpoint, tiny_model_dir: Path):
    settings = {"max_tokens": 6, "temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2, "logprobs": 1}
    status, answer, _ = post(
        endpoint, GENERATE, {"token_ids": [1, 5, 9], "sampling_params": settings, "request_id": "mine"}
    )
    assert (status, answer["request_id"]) == (200, "mine")
    own = finish(engine_of(tiny_model_dir), [Request("a", (1, 5, 9), "a", 3, Sampling(6, 0.8, top_p=0.9), 0)])["a"]
    choice = answer["choices"][0]
    assert tuple(choice["token_ids"]) == own.ids
    assert tuple(one["logprob"] for one in choice["logprobs"]["content"]) == own.logprobs


# --- refusals -------------------------------------------------------------------------------------------------------
WRONG = [
    (CHAT, {"temperature": float("nan")}, "JSON"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": 1e-30}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"),
    (CHAT, {"min_p": 1.5}, "min_p"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "description": "<|im_end|>"}}]}, "control token"),
    (CHAT, {"n": 10**9}, "n: "),
    (CHAT, {"n": 0}, "n: "),
    (CHAT, {"n": True}, "n: "),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1e400}, "JSON"),
    (CHAT, {"max_completion_tokens": 3}, "two names"),
    (CHAT, {"seed": -1}, "seed"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "control token"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 2000}]}, "context"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}, "system"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"top_k": 1.5}, "top_k"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "without text"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "wrong"),
    (MESSAGES, {"mcp_servers": []}, "mcp_servers"),
    (GENERATE, {"token_ids": []}, "token_ids"),
    (CHAT, {"ignore_eos": True, "stop": "x"}, "ignore_eos"),
    (GENERATE, {"token_ids": [10**9]}, "token_ids"),
    (GENERATE, {"token_ids": [-1]}, "token_ids"),
    (GENERATE, {"token_ids": [1.5]}, "token_ids"),
    (GENERATE, {"token_ids": [3] * 600}, "context"),
    (GENERATE, {"token_ids": [3], "sampling_params": {"min_tokens": 3}}, "min_tokens"),
    (GENERATE, {"token_ids": [3], "stream": True}, "stream"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "told"), WRONG, ids=[f"{p.rpartition('/')[2]}-{c!s:.40}" for p, c, _ in WRONG]
)
def test_what_cannot_be_honoured_is_refused_by_name(
    endpoint: Endpoint, path: str, change: dict[str, object], told: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR):
        status, answer, _ = post(endpoint, path, change if path == GENERATE else ASK | change)
    assert not caplog.records, "no traceback"
    assert status == 400
    shaped(path, answer, told)


def shaped(path: str, answer: dict[str, Any], told: str = "") -> None:
    if path == MESSAGES:
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert told in answer["error"]["message"], answer


@pytest.mark.parametrize("path", [CHAT, MESSAGES, GENERATE])
def test_bodies_that_are_no_requests(endpoint: Endpoint, path: str):
    for body in (
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"null",
    ):
        status, answer, _ = post(endpoint, path, body)
        assert status == 400, body[:20]
        shaped(path, answer)
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    status, answer, _ = post(endpoint, path, ASK | {"tools": [deep], "metadata": deep})
    assert status == 400


def test_other_addresses_methods_and_hosts(endpoint: Endpoint):
    assert post(endpoint, "/v1/embeddings", {})[0] == 404
    assert post(endpoint, "/health", {})[0] == 405
    assert post(endpoint, CHAT, b"", method="GET")[0] == 405
    assert post(endpoint, CHAT, {}, method="PUT")[0] == 405
    assert post(endpoint, CHAT, ASK, Host="evil.example")[0] == 421
    assert post(endpoint, CHAT, ASK, token="no")[0] == 401
    assert post(endpoint, f"{CHAT}?beta=true", ASK)[0] == 200
    assert raw(endpoint, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").endswith(
        b'{"status": "ok"}'
    )


def test_a_body_that_is_too_large_is_refused_and_read_away(endpoint: Endpoint):
    status, answer, _ = post(endpoint, MESSAGES, b"x" * (MOST_BYTES + 1))
    assert status == 413
    shaped(MESSAGES, answer, "bytes")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    for length, status in (
        (b"99999999999999", b"413"),
        (b"-1", b"411"),
        (b"1\r\nContent-Length: 2", b"411"),
        (b"x", b"411"),
    ):
        assert raw(endpoint, head + length + b"\r\n\r\nabc").split()[1] == status
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert raw(endpoint, chunked).split()[1] == b"411"


def test_bytes_that_are_no_http(endpoint: Endpoint):
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(10_000))
    for data in (
        b"GET /health HTTP/1.1\r\n" + many + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\x16\x03\x01\x02\x00 tls \r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET /health HTTP/1.1\r\nnonsense\r\n\r\n",
    ):
        answer = raw(endpoint, data)
        assert b"Traceback" not in answer
        if answer.startswith(b"HTTP"):
            assert 400 <= int(answer.split()[1]) < 500, (data[:40], answer[:100])
    assert post(endpoint, CHAT, ASK)[0] == 200


def test_a_client_that_sends_a_byte_now_and_then_is_closed(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.loopback.REQUEST_S", 0.6)
    with socket.create_connection((HOST, endpoint.server_port)) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.monotonic()
        try:
            while time.monotonic() - began < 20:
                slow.sendall(b"X")
                time.sleep(0.05)
        except OSError:
            pass
    assert time.monotonic() - began < 10
    until(lambda: not endpoint.due)


# --- clients that go away -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(endpoint: Endpoint, stream: bool):
    connection = http.client.HTTPConnection(HOST, endpoint.server_port, timeout=30)
    connection.request("POST", CHAT, json.dumps(LONG | {"stream": stream}), {"x-api-key": TOKEN})
    until(lambda: endpoint.sampler.counts()["running"] == 1)  # type: ignore[attr-defined]
    connection.close()
    began = time.monotonic()
    until(lambda: idle(endpoint), 5)
    assert time.monotonic() - began < 5


def test_a_withdrawn_token_ends_its_requests(endpoint: Endpoint):
    endpoint.admit("for-one-episode-only", "episode")
    connection = http.client.HTTPConnection(HOST, endpoint.server_port, timeout=30)
    connection.request("POST", CHAT, json.dumps(LONG), {"x-api-key": "for-one-episode-only"})
    until(lambda: endpoint.sampler.counts()["running"] == 1)  # type: ignore[attr-defined]
    endpoint.withdraw("for-one-episode-only")
    answer = connection.getresponse()
    assert answer.status == 401
    shaped(CHAT, json.loads(answer.read()))
    assert post(endpoint, CHAT, ASK, "for-one-episode-only")[0] == 401
    until(lambda: idle(endpoint))
    assert "episode" not in endpoint.conversations._known
    connection.close()


def test_too_many_requests_are_told_to_come_back(tiny_model_dir: Path):
    with served(tiny_model_dir, running=1, waiting=1) as endpoint:
        sampler = endpoint.sampler
        assert isinstance(sampler, EngineThread)
        held = Held(sampler)
        connections = [http.client.HTTPConnection(HOST, endpoint.server_port, timeout=30) for _ in range(2)]
        for connection, where in zip(connections, ("running", "waiting"), strict=True):
            connection.request("POST", CHAT, json.dumps(LONG), {"x-api-key": TOKEN})
            until(lambda where=where: sampler.counts()[where] == 1)  # type: ignore[misc]
        for path in (CHAT, MESSAGES):
            status, answer, headers = post(endpoint, path, ASK)
            assert (status, headers["Retry-After"]) == (429, "1")
            shaped(path, answer)
        assert post(endpoint, CHAT, ASK | {"n": 2})[0] == 429
        held.go.set()
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, GENERATE])
def test_a_failure_of_the_engine_is_told(endpoint: Endpoint, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint.sampler._engine, "_prefill", lambda requests: 1 / 0)  # type: ignore[attr-defined]
    status, answer, _ = post(endpoint, path, {"token_ids": [3]} if path == GENERATE else ASK)
    assert status == 500
    shaped(path, answer, "division by zero")
    if path == CHAT:
        answers = raw(endpoint, request_of(ASK | {"stream": True}))
        assert b"200 OK" in answers
        assert b'data: {"error"' in answers
    monkeypatch.undo()
    assert post(endpoint, CHAT, ASK)[0] == 200


def request_of(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_only_loopback_is_bound(endpoint: Endpoint):
    assert endpoint.server_address[0] == HOST == "127.0.0.1"
    assert isinstance(endpoint, LoopbackServer)
