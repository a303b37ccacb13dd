"""Sends one question to an OpenAI-compatible chat endpoint, with retries within a bounded time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import email.utils
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

from lockstep.verifiers.base import CANCEL

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
MAX_BODY = 1 << 20
_LOOK = 0.1
"""Seconds between looks at the deadline and at CANCEL."""
_AGAIN = (408, 409, 425, 429)
"""And 5xx."""
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""By process: a fork has none."""


class Unanswered(Exception):
    """No usable answer in all attempts."""


class Refused(Exception):
    """The endpoint says that asking again is no use: a wrong key, address or request."""


class ChatEndpoint:
    """Used by several threads; at most `at_once` requests are under way."""

    def __init__(self, url: str, key: str | None, seconds: float, attempts: int, patience: float, at_once: int) -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        self._key, self._seconds, self._attempts, self._patience = key, seconds, attempts, patience
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=at_once)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False)
        self._slots = threading.BoundedSemaphore(at_once)

    def ask(self, body: Mapping[str, Any], read: Callable[[str], T | None]) -> T:
        """Ask until `read` makes something of the answer's text, and return that; None asks again. Raises Unanswered, Refused."""
        give_up = time.monotonic() + self._patience
        last = "never asked"
        for attempt in range(self._attempts):
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)
            try:
                status, headers, text = self._post(body, give_up)
                if status == 200:
                    found = read(_content(text))
                    if found is not None:
                        return found
                    last = "the endpoint's answer has no verdict in the form that was asked for"
                elif status in _AGAIN or status >= 500:
                    last = f"HTTP {status}"
                    wait = max(wait, _retry_after(headers.get("retry-after", "")))
                else:
                    raise Refused(self._without_key(f"HTTP {status}: {text[:200]}"))
            except httpx.HTTPError as error:
                last = type(error).__name__
            except ValueError as error:
                last = str(error)
            if time.monotonic() + wait > give_up:
                break
            if attempt + 1 < self._attempts and (CANCEL.get() or threading.Event()).wait(wait):
                last = "cancelled"
                break
        raise Unanswered(self._without_key(f"no verdict after {attempt + 1} attempts; the last: {last}"))

    def _post(self, body: Mapping[str, Any], give_up: float) -> tuple[int, httpx.Headers, str]:
        """Make one request. Raises httpx.HTTPError; ValueError for an answer that is too long, too slow, or no longer wanted.

        It is made in another thread: however slowly the endpoint sends whatever it sends, the wait ends at the deadline.
        """
        ends = min(give_up, time.monotonic() + self._seconds)
        if not self._slots.acquire(timeout=max(0.0, give_up - time.monotonic())):
            raise ValueError("other requests took all the time")
        try:
            request = asyncio.run_coroutine_threadsafe(self._exchange(dict(body)), _event_loop(os.getpid()))
            while True:
                try:
                    return request.result(_LOOK)
                except concurrent.futures.TimeoutError:
                    cancel = CANCEL.get()
                    cancelled = cancel is not None and cancel.is_set()
                    if cancelled or time.monotonic() > ends:
                        request.cancel()
                        raise ValueError("cancelled" if cancelled else f"no answer in {self._seconds:g} s") from None
        finally:
            self._slots.release()

    async def _exchange(self, body: dict[str, Any]) -> tuple[int, httpx.Headers, str]:
        async with self._client.stream("POST", self._url, json=body) as response:
            data = b""
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MAX_BODY:
                    raise ValueError("the endpoint's answer is too long")
            return response.status_code, response.headers, data.decode("utf-8", "replace")

    def _without_key(self, text: str) -> str:
        """Remove the key from a text: an endpoint may repeat it."""
        return text.replace(self._key, "[key]") if self._key else text


def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of this process's requests, in a thread that ends with it; one, however many threads ask first."""
    if process not in _LOOPS:
        mine = asyncio.new_event_loop()
        if _LOOPS.setdefault(process, mine) is mine:
            threading.Thread(target=mine.run_forever, name="lockstep-endpoint", daemon=True).start()
        else:
            mine.close()
    return _LOOPS[process]


def _content(text: str) -> str:
    """Return the message's text. Raises ValueError if the answer is no chat completion."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"the endpoint's answer is not a chat completion ({type(error).__name__})") from error
    if not isinstance(content, str):
        raise ValueError("the endpoint's answer has no text (message.content is not a string)")
    return content


def _retry_after(value: str) -> float:
    """Seconds that the endpoint asks for, as a number or a date; 0 if it says nothing."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)  # the zone -0000: UTC, of an unknown place
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
