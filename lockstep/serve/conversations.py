"""Remembers clients' conversations: a follow-up request continues from the exact token ids that were sampled before."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.chat.chat import ChatFormat
from lockstep.chat.continuation import Continuation
from lockstep.chat.parser import CHANNEL, CLOSE, MESSAGE, OPEN
from lockstep.envs.calls import Call, read_calls
from lockstep.errors import ChatError
from lockstep.types import Message, TokenIds

MARKS = (OPEN, CLOSE, CHANNEL, MESSAGE, "<tool_call>")
"""Texts that begin or end something else than an answer."""
MOST_IDS = 4_000_000
"""Most token ids that are remembered for one client; the least recently used conversations are dropped first."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a reply makes. Example: ToolCall("add", '{"a": 1}', "call_1")"""

    name: str
    arguments: str
    """A JSON object as text."""
    id: str = ""
    """The client's name for it, under which its result comes back."""


@dataclass(frozen=True, slots=True)
class Said:
    """One turn of a chat, the same for all interfaces."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def identity(self) -> str:
        """Text that is the same for the same turn: white space around it and the form of JSON do not count."""
        calls = [[call.name, json.loads(call.arguments)] for call in self.calls]
        return json.dumps([self.role, self.text.strip(), calls], sort_keys=True)


@dataclass(slots=True)
class _Known:
    """The conversations of one key: ids up to the end of a reply, by the hash of the turns so far."""

    ids: OrderedDict[bytes, TokenIds] = field(default_factory=OrderedDict)
    total: int = 0


class Conversations:
    """Turns chats into ids, and remembers those of its replies by key. Used by many threads."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        try:
            self._continuation: Continuation | None = chat.continuation()
        except ChatError:  # a template without a place for earlier replies: each prompt is rendered as a whole
            self._continuation = None

    def render(self, key: str, turns: Sequence[Said], tools: str) -> tuple[TokenIds, int]:
        """Return the prompt's ids, and how many of them are those of an earlier prompt and its reply.

        The longest known beginning stays as it was sampled, and the turns after it are appended. Without one all turns are
        rendered. Raises ChatError for turns that the template refuses.
        """
        hashes = _hashes(turns, tools)
        messages = [self._message(turn) for turn in turns]
        with self._lock:
            known = self._known.get(key, _Known()).ids
            begun = [place for place in range(len(turns) - 1, 0, -1) if hashes[place - 1] in known]
            if not begun or self._continuation is None:
                return self.chat.render(messages, tools), 0
            self.chat.framed(messages)  # refuses what it would refuse without a known beginning
            name = hashes[begun[0] - 1]
            known.move_to_end(name)
            ids = known[name]
            return ids + self._continuation.after(ids[-1], messages[begun[0] :]), len(ids)

    def replied(self, key: str, turns: Sequence[Said], reply: Said, tools: str, ids: TokenIds) -> None:
        """Remember a reply: `ids` are those of the prompt and the reply."""
        name = _hashes([*turns, reply], tools)[-1]
        with self._lock:
            known = self._known.setdefault(key, _Known())
            known.total += len(ids) - len(known.ids.pop(name, ()))
            known.ids[name] = ids
            while known.total > MOST_IDS:
                known.total -= len(known.ids.popitem(last=False)[1])

    def forget(self, key: str) -> None:
        """Drop all conversations of a key."""
        with self._lock:
            self._known.pop(key, None)

    def read(self, ids: TokenIds, stop: Sequence[str], tools: str, call_id: str) -> Reply:
        """Read a reply: its answer, cut before a stop string; its thoughts; and its calls, if tools were offered.

        A reply with a call that cannot be read has none: the client gets its text as it is.
        """
        with self._lock:
            text, answer = self.chat.read(ids)
        found = min((at, one) for one in (*stop, "") if (at := answer.find(one) if one else len(answer)) >= 0)
        body = answer[: found[0]]
        blank = text[len(text.rstrip()) :]  # answers are stripped of it
        ended = found[1] or next((one for one in stop if one in blank), "")
        thoughts = text.strip().removesuffix(answer.strip()).strip()
        names = [tool["function"]["name"] for tool in json.loads(tools)] if tools else []
        calls = read_calls(body, "hermes", names) if names else ()
        good = [call for call in calls if isinstance(call, Call) and not isinstance(call.arguments, str)]
        if not good or len(good) < len(calls) or body.count("<tool_call>") > len(calls):
            return Reply(Said("assistant", body), thoughts, ended)
        made = tuple(ToolCall(c.name, json.dumps(c.arguments), f"{call_id}_{i}") for i, c in enumerate(good))
        head = body.partition("<tool_call>")[0].strip() if "<tool_call>" in body else ""
        return Reply(Said("assistant", head, made), thoughts, ended)

    def so_far(self, ids: TokenIds, stop: Sequence[str], tools: str) -> tuple[str, str]:
        """Return the answer and the thoughts of a reply under way, as far as more tokens do not change how they are read."""
        with self._lock:
            text, answer = self.chat.read(ids)
        ended = min((at for one in stop if (at := answer.find(one)) >= 0), default=None)
        body = settled(answer, (*stop, *MARKS)) if ended is None else answer[:ended].rstrip()
        if tools:
            whole = body[:1].isspace() or body.startswith(("{", "["))  # may be stripped, or be a call as a whole
            body = "" if whole else body.partition("<tool_call>")[0].rstrip()
        return body, "" if answer.strip() else settled(text, MARKS).lstrip()

    def _message(self, turn: Said) -> Message:
        """Write a turn as the template takes it: calls as text in the form in which replies make them."""
        role = self._continuation.role if turn.role == "tool" and self._continuation else turn.role
        calls = (
            f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
            for call in turn.calls
        )
        return Message(role=role, content="\n".join([*([turn.text] if turn.text or not turn.calls else []), *calls]))


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as clients see it."""

    said: Said
    thoughts: str
    stop: str
    """The stop string that ended it."""


def settled(text: str, marks: Sequence[str]) -> str:
    """Return a text without what the next tokens may change: the bytes of half a character, the beginning of a mark, white space.

    Example: settled("4 <tool", ["<tool_call>"]) is "4".
    """
    text = text.rstrip("\ufffd")
    begun = (size for mark in marks for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size]))
    return text[: len(text) - max(begun, default=0)].rstrip()


def _hashes(turns: Sequence[Said], tools: str) -> list[bytes]:
    """Return a hash for each turn, of the tools and all turns up to it."""
    result, before = [], hashlib.blake2b(tools.encode()).digest()
    for turn in turns:
        before = hashlib.blake2b(before + turn.identity.encode()).digest()
        result.append(before)
    return result
