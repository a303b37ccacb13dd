"""The HTTP server: it listens on loopback only, requires a bearer token, and answers from exact token ids."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.chat.chat import ChatFormat
from lockstep.errors import BusyError, ChatError, EngineError, SpentError
from lockstep.loopback import HOST, LoopbackHandler, LoopbackServer
from lockstep.seeds import seed_for
from lockstep.serve import anthropic, openai
from lockstep.serve.conversations import Conversations, Reply
from lockstep.serve.stream import ReplyUpdates
from lockstep.serve.wire import Refusal, Wanted
from lockstep.types import ClientRequest, Completion, Sampled, Sampler, TokenIds

log = logging.getLogger(__name__)
MOST_BYTES = 8 * 2**20
"""Largest body of a request."""
DRAINED = 64 * 2**20
"""Bytes of a larger one that are read and dropped, so that its client can read the refusal."""
LOOK_S = 0.2
"""Time between two looks whether a waiting client is still there."""
PING_S = 10.0
"""Time between two signs of life in a stream whose reply is not done."""
CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"


@dataclass(frozen=True, slots=True)
class _Asked:
    """Replies under way."""

    id: str
    key: str
    wanted: Wanted
    prompt_ids: TokenIds
    reused: int
    updates: ReplyUpdates


class Endpoint(LoopbackServer):
    """Serves a Sampler on 127.0.0.1, in threads of its own, from entering the context to leaving it."""

    most_at_once = 256

    def __init__(
        self,
        sampler: Sampler,
        chat: ChatFormat,
        *,
        model: str,
        context: int = 0,
        max_tokens: int = 4096,
        vocabulary: int = 0,
        port: int = 0,
    ) -> None:
        """Take the model's name, its longest context (0 is unlimited) and the number of ids that it takes (0: the tokenizer's).
        `max_tokens` holds for requests that set no limit.

        Raises MachineError if the port is taken.
        """
        self.sampler, self.model, self.context, self.max_tokens = sampler, model, context, max_tokens
        self.vocabulary = vocabulary or len(chat.tokenizer)
        self.conversations = Conversations(chat)
        self._keys: dict[bytes, str] = {}
        self._open: dict[str, set[str]] = {}
        """Ids of open asks by key."""
        self._lock = threading.Lock()
        self._names, self._own = itertools.count(), secrets.token_hex(4)
        super().__init__(Handler, port, "serve")
        self._thread = threading.Thread(target=self.serve_forever, name="lockstep-endpoint", daemon=True)

    @property
    def address(self) -> str:
        """The base of all addresses. Example: http://127.0.0.1:41233"""
        return f"http://{HOST}:{self.server_port}"

    def admit(self, token: str, key: str) -> None:
        """Serve requests with this token as those of `key`. Several tokens may have the same key."""
        with self._lock:
            self._keys[_digest(token)] = key

    def withdraw(self, token: str) -> None:
        """Refuse a token from now on; the last one of its key ends the key's requests and conversations."""
        with self._lock:
            key = self._keys.pop(_digest(token), None)
            last = key is not None and key not in self._keys.values()
            ids = list(self._open.get(key, ())) if last and key is not None else []
        for id in ids:
            self.sampler.cancel(id)
        if last and key is not None:
            self.conversations.forget(key)

    def key_of(self, token: str) -> str | None:
        """Return the key of a token; None for one that is not admitted."""
        with self._lock:
            return self._keys.get(_digest(token))

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop serving; what is open is cancelled."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            self._keys.clear()
            ids = [id for opened in self._open.values() for id in opened]
        for id in ids:
            self.sampler.cancel(id)
        self.server_close()

    @contextmanager
    def asking(self, key: str, wanted: Wanted) -> Iterator[_Asked]:
        """Ask for replies; on leaving, those that are not done are cancelled. Raises Refusal, BusyError, EngineError."""
        if wanted.model != self.model:
            raise Refusal(
                404, f"the model served here is {self.model!r}, not {wanted.model[:100]!r}", "model", "model_not_found"
            )
        name = f"{self._own}-{next(self._names)}"
        prompt, reused = wanted.prompt_ids, 0
        if not prompt:
            try:
                prompt, reused = self.conversations.render(key, wanted.turns, wanted.tools)
            except ChatError as error:
                raise Refusal(400, f"messages: {error}"[:1000], "messages") from error
        room = self.context - len(prompt) if self.context else max(wanted.sampling.max_tokens, self.max_tokens)
        if room < 1:
            what = f"the prompt has {len(prompt)} tokens, the model's context is {self.context}"
            raise Refusal(400, what, "messages" if wanted.turns else "token_ids", "context_length_exceeded")
        settings = replace(wanted.sampling, max_tokens=min(wanted.sampling.max_tokens or self.max_tokens, room))
        seeds = [wanted.seed if i == 0 or wanted.seed is None else seed_for(wanted.seed, i) for i in range(wanted.n)]
        updates = ReplyUpdates()
        asks = [
            ClientRequest(
                f"{name}-{i}", key, prompt, settings, seed, partial(updates.sampled, i) if wanted.stream else None
            )
            for i, seed in enumerate(seeds)
        ]
        with self._lock:
            self._open.setdefault(key, set()).update(ask.id for ask in asks)
        try:
            for i, ask in enumerate(asks):
                self.sampler.sample(ask).add_done_callback(partial(updates.done, i))
            with self._lock:  # withdrawn since the request arrived
                if key not in self._keys.values():
                    raise Refusal(401, "the token was withdrawn")
            yield _Asked(name, key, wanted, prompt, reused, updates)
        finally:
            for ask in asks:
                self.sampler.cancel(ask.id)
            with self._lock:
                self._open[key].difference_update(ask.id for ask in asks)
                if not self._open[key]:
                    del self._open[key]

    def read(self, asked: _Asked, index: int, completion: Completion) -> Reply:
        """Read a reply to a chat, and remember its ids for the next turn."""
        wanted = asked.wanted
        name = f"call_{asked.id}_{index}"
        reply = self.conversations.read(completion.ids, wanted.sampling.stop, wanted.tools, name)
        ids = asked.prompt_ids + completion.ids
        self.conversations.replied(asked.key, wanted.turns, reply.said, wanted.tools, ids)
        with self._lock:
            gone = asked.key not in self._keys.values()
        if gone:
            self.conversations.forget(asked.key)
        return reply

    def so_far(self, asked: _Asked, sampled: Sampled) -> tuple[str, str]:
        """Return the answer and the thoughts of a reply under way, as far as they are settled."""
        return self.conversations.so_far(sampled.ids, asked.wanted.sampling.stop, asked.wanted.tools)

    def token(self, id: int) -> str:
        """Return the text of one token."""
        return str(self.conversations.chat.tokenizer.decode([id]))


class Handler(LoopbackHandler):
    """One connection."""

    server: Endpoint
    streaming = False
    """True once the head of a stream is sent: errors can only be told in the stream."""

    def do_GET(self) -> None:
        self._serve({"/health": self._health, "/v1/models": self._models})

    def do_POST(self) -> None:
        self._serve({CHAT: self._chat, MESSAGES: self._messages, GENERATE: self._generate})

    # --- requests -------------------------------------------------------------------------------------------------
    def _serve(self, routes: dict[str, Callable[[str, bytes], None]]) -> None:
        self.streaming = False
        try:
            if not self.of_this_machine():
                self.close_connection = True
                raise Refusal(421, "the Host is not this machine")
            data = self._body() if self.command == "POST" else b""
            path = self.path.partition("?")[0]
            if path not in routes:
                known = path in (CHAT, MESSAGES, GENERATE, "/health", "/v1/models")
                raise Refusal(405 if known else 404, f"no {self.command} at {path[:200]}")
            key = "" if path == "/health" else self._key()
            routes[path](key, data)
        except Refusal as refusal:
            self._refuse(refusal)
        except SpentError as error:
            self._refuse(Refusal(403, error.what, code="budget_spent"))  # a status that clients do not try again
        except BusyError as error:
            self._refuse(Refusal(429, error.what, code="busy"))
        except CancelledError:
            self._refuse(Refusal(401, "the token was withdrawn, or the server ends"))
        except EngineError as error:
            self._refuse(Refusal(500, str(error)[:2000], code="engine"))
        except RecursionError:
            self._refuse(Refusal(400, "the body is nested too deeply"))
        except OSError:  # the client is gone
            self.close_connection = True
        except Exception as error:
            log.exception("a request could not be answered")
            self._refuse(Refusal(500, f"something broke here: {type(error).__name__}"))

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,15}", lengths[0]):
            self.close_connection = True
            raise Refusal(411, "a request needs one Content-Length, and no Transfer-Encoding")
        length = int(lengths[0])
        if length > MOST_BYTES:
            self.close_connection = True
            left = min(length, DRAINED)
            while left > 0 and (piece := self.rfile.read(min(left, 2**16))):
                left -= len(piece)
            self.arrived()
            raise Refusal(413, f"the body has {length} bytes, the most is {MOST_BYTES}")
        data = self.rfile.read(length)
        if len(data) < length:
            raise ConnectionError("the body ended early")
        self.arrived()
        return data

    def _key(self) -> str:
        given = self.headers.get("Authorization", "")
        token = given[7:] if given[:7].lower() == "bearer " else self.headers.get("x-api-key", "")
        key = self.server.key_of(token.strip())
        if key is None:
            raise Refusal(401, "no such token: give it as Authorization: Bearer, or x-api-key", code="invalid_api_key")
        return key

    # --- answers --------------------------------------------------------------------------------------------------
    def _health(self, key: str, data: bytes) -> None:
        self._send(200, {"status": "ok"})

    def _models(self, key: str, data: bytes) -> None:
        name, context = self.server.model, self.server.context or None
        facts = {"object": "model", "owned_by": "lockstep", "created": 0, "max_model_len": context}
        facts |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": name, "last_id": name}
        self._send(200, {"object": "list", "data": [{"id": name, **facts}], **ends})

    def _chat(self, key: str, data: bytes) -> None:
        body, wanted = openai.read_chat(data)
        with self.server.asking(key, wanted) as asked:
            kind = "chat.completion.chunk" if wanted.stream else "chat.completion"
            head = {"id": f"chatcmpl-{asked.id}", "object": kind, "created": int(time.time()), "model": wanted.model}
            told = openai.prompt_of(asked.prompt_ids, asked.reused, body)
            choices, done = [], []
            if wanted.stream:
                self._begin_stream()
            streams = [openai.ChatStream(head, told, i, body, self.server.token) for i in range(wanted.n)]
            for index, result in self._results(asked, b": waiting\n\n"):
                if isinstance(result, Sampled):
                    self._events(streams[index].more(*self.server.so_far(asked, result), result))
                    continue
                done.append(result)
                reply = self.server.read(asked, index, result)
                choices.append(openai.chat_choice(index, result, reply, body, self.server.token))
                if wanted.stream:
                    self._events(streams[index].end(choices[-1], result))
            used = {"usage": openai.usage(len(asked.prompt_ids), asked.reused, done)}
            if not wanted.stream:
                choices.sort(key=lambda choice: int(choice["index"]))
                return self._send(200, head | told | {"choices": choices} | used)
            if body.stream_options is not None and body.stream_options.include_usage:
                self._event(head | {"choices": []} | used)
            self.wfile.write(b"data: [DONE]\n\n")

    def _messages(self, key: str, data: bytes) -> None:
        wanted = anthropic.read_messages(data)
        with self.server.asking(key, wanted) as asked:
            id, stream = f"msg_{asked.id}", anthropic.MessageStream()
            if wanted.stream:
                self._begin_stream()
                self._events([stream.begin(id, wanted.model, len(asked.prompt_ids), asked.reused)])
            for index, result in self._results(asked, b'event: ping\ndata: {"type": "ping"}\n\n'):
                if isinstance(result, Sampled):
                    self._events(stream.more(self.server.so_far(asked, result)[0]))
                else:
                    reply = self.server.read(asked, index, result)
                    message = anthropic.message_of(id, wanted.model, result, reply, asked.reused)
                    self._events(stream.end(message)) if wanted.stream else self._send(200, message)

    def _generate(self, key: str, data: bytes) -> None:
        body, wanted = openai.read_generate(data, self.server.model, self.server.vocabulary)
        with self.server.asking(key, wanted) as asked:
            done = {i: result for i, result in self._results(asked, b"") if isinstance(result, Completion)}
        choices = [openai.generate_choice(index, done[index]) for index in sorted(done)]
        used = openai.usage(len(asked.prompt_ids), 0, list(done.values()))
        head = {"request_id": body.request_id or asked.id, "prompt_logprobs": None}
        self._send(200, head | {"choices": choices, "usage": used})

    def _results(self, asked: _Asked, ping: bytes) -> Iterator[tuple[int, Completion | Sampled]]:
        """Yield completions as they come, and in a stream their beginnings. Raises ConnectionError if the client has gone."""
        left, told = asked.wanted.n, time.monotonic()
        while left:
            for index, found in asked.updates.take(LOOK_S):
                result = found if isinstance(found, Sampled) else found.result()
                left -= isinstance(result, Completion)
                yield index, result
            if left and self._gone():
                raise ConnectionError("the client is gone")
            if left and self.streaming and time.monotonic() - told > PING_S:
                told = time.monotonic()
                self.wfile.write(ping)

    def _gone(self) -> bool:
        """Return whether the client has closed its side."""
        looking = select.poll()  # unlike select, it takes descriptors above 1,023
        looking.register(self.connection, select.POLLIN)
        return bool(looking.poll(0)) and self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""

    # --- writing --------------------------------------------------------------------------------------------------
    def _send(self, status: int, answer: dict[str, Any]) -> None:
        named = {"Content-Type": "application/json"}
        named |= {"Retry-After": "1"} if status == 429 else {}
        named |= {"Connection": "close"} if self.close_connection else {}
        self.answer(status, json.dumps(answer, allow_nan=False).encode(), named)

    def _begin_stream(self) -> None:
        self.streaming = self.close_connection = True  # its end is the end of the stream
        self.send_response(200)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "Connection": "close"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _event(self, data: dict[str, Any], name: str = "") -> None:
        head = f"event: {name}\n" if name else ""
        self.wfile.write(f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode())

    def _events(self, events: Iterable[dict[str, Any]]) -> None:
        """Send events under the name of their type, if they have one."""
        for event in events:
            self._event(event, event.get("type", ""))

    def _refuse(self, refusal: Refusal) -> None:
        """Tell an error in the shape of its interface."""
        theirs = getattr(self, "path", "").startswith(MESSAGES)
        answer = anthropic.error_of(refusal) if theirs else openai.error_of(refusal)
        try:
            if self.streaming:
                self._event(answer, "error" if theirs else "")
            else:
                self._send(refusal.status, answer)
        except OSError:  # the client is gone
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request at all: bad lines, too many headers, unknown methods."""
        self.close_connection = True
        status = 405 if code == 501 else code if code < 500 else 400
        self._refuse(Refusal(status, message or "the request could not be read"))


def _digest(token: str) -> bytes:
    """Return what is looked up instead of the token, so that the time it takes tells nothing of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
