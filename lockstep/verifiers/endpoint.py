"""One question to an OpenAI-compatible chat endpoint, asked again when that may help, within a bounded time."""

from __future__ import annotations

import datetime
import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
MAX_BODY = 1 << 20
_AGAIN = (408, 409, 425, 429)
"""And 5xx."""


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
        self._client = httpx.Client(headers=headers, timeout=seconds, limits=limits, follow_redirects=False)
        self._slots = threading.BoundedSemaphore(at_once)

    def ask(self, body: Mapping[str, Any], read: Callable[[str], T | None]) -> T:
        """What `read` makes of the answer's text; None from it means that the answer is no use. Raises Unanswered, Refused."""
        give_up = time.monotonic() + self._patience
        last = "never asked"
        for attempt in range(self._attempts):
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)
            try:
                with self._slots:
                    status, headers, text = self._post(body, give_up)
                if status == 200:
                    found = read(_content(text))
                    if found is not None:
                        return found
                    last = "its answer has no verdict in the form that was asked for"
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
            if attempt + 1 < self._attempts:
                time.sleep(wait)
        raise Unanswered(self._without_key(f"no verdict after {attempt + 1} attempts; the last: {last}"))

    def _post(self, body: Mapping[str, Any], give_up: float) -> tuple[int, httpx.Headers, str]:
        """Raises httpx.HTTPError; ReadTimeout also for an answer that comes too slowly, ValueError for one too long."""
        ends = min(give_up, time.monotonic() + self._seconds)
        left = max(0.001, ends - time.monotonic())
        with self._client.stream("POST", self._url, json=dict(body), timeout=left) as response:
            data = b""
            for part in response.iter_bytes():
                data += part
                if len(data) > MAX_BODY:
                    raise ValueError("its answer is too long")
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("too slow")
            return response.status_code, response.headers, data.decode("utf-8", "replace")

    def _without_key(self, text: str) -> str:
        """An endpoint may say the key back."""
        return text.replace(self._key, "[key]") if self._key else text


def _content(text: str) -> str:
    """The message's text. Raises ValueError if the answer is no chat completion."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"its answer is no chat completion ({type(error).__name__})") from error
    if not isinstance(content, str):
        raise ValueError("its answer has no text")
    return content


def _retry_after(value: str) -> float:
    """Seconds that the endpoint asks for, as a number or a date; 0 if it says nothing."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
