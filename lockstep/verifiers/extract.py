r"""Extracts the answer from a reply: its last balanced \boxed{…}, else what the fallback reads.

It is one pass over at most REGION characters, with plain substring search and no regular expressions: time grows linearly
with the reply, whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

Fallback: TypeAlias = Literal["none", "last_number", "last_line"]
Method: TypeAlias = Literal["boxed", "last_number", "last_line", "pattern", "json_block", "code_block", "whole", "none"]

REGION = 4096
"""An answer is only looked for in this many characters at the end of the reply."""
MAX_DEPTH = 64
"""Deeper braces than this are no answer: the region is then read as if nothing were boxed."""
FINAL_SHARE = 0.2
"""boxed_in_final: the box starts in this last share of the reply."""

BOX = "\\boxed"
DIGITS = frozenset("0123456789")
"""ASCII only: other scripts' digits are not read as numbers."""
MINUS = dict.fromkeys(map(ord, "\u2212\u2013\ufe63\uff0d"), "-")
"""Minus sign, en dash, small and full-width hyphen-minus, all read as a minus."""

_CHANNEL, _MESSAGE, _FINAL = "<|channel|>", "<|message|>", "<|channel|>final"
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", _CHANNEL)
_HEADER = 96
"""Longest harmony header: `<|channel|>final <|constrain|>json<|message|>` and the like."""
_THINK, _END_THINK = "<think>", "</think>"
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|return|>", "<|end|>", "<end_of_turn>", "</s>", "<eos>")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a reply and how it was read. Example: Answer("42", "boxed", True)"""

    text: str | None
    """The text as written, outer whitespace removed; None if nothing was found; empty for an empty box."""
    method: Method
    boxed_in_final: bool = False
    """The box starts in the last 20 % of the reply."""


@dataclass(frozen=True, slots=True)
class Box:
    """A balanced \\boxed{…}."""

    start: int
    """Index of its backslash."""
    content: str


def read_answer(reply: str, fallback: Fallback) -> Answer:
    """Return the last balanced box of the reply's final part, else what `fallback` reads. Linear in len(reply)."""
    start, end = final_span(reply)
    region_start = max(start, end - REGION)
    region = reply[region_start:end]
    box = last_boxed(region)
    if box is not None:
        in_final = region_start + box.start >= (1 - FINAL_SHARE) * len(reply)
        return Answer(box.content.strip(), "boxed", in_final)
    match fallback:
        case "none":
            return Answer(None, "none")
        case "last_number":
            cut = region_start > start and reply[region_start - 1] in "0123456789,."
            number = last_number(region, first_may_be_cut=cut)
            return Answer(None, "none") if number is None else Answer(number, "last_number")
        case "last_line":
            line = _without_end_tokens(region).rpartition("\n")[2].strip()
            return Answer(line, "last_line") if line else Answer(None, "none")
        case _:
            assert_never(fallback)


def final_span(reply: str) -> tuple[int, int]:
    """Start and end of the part of the reply that may hold the answer: what comes after the thinking.

    A reply that thinks (harmony's analysis channel, <think>) and never gets to its final part has an empty one.
    """
    start, end = _harmony_final(reply)
    closed = reply.rfind(_END_THINK, start, end)
    if closed >= 0:
        start = closed + len(_END_THINK)
    reopened = reply.find(_THINK, start, end)
    if reopened >= 0:
        end = reopened
    return start, end


def _harmony_final(reply: str) -> tuple[int, int]:
    if _CHANNEL not in reply:
        return 0, len(reply)
    channel = reply.rfind(_FINAL)
    message = reply.find(_MESSAGE, channel, channel + _HEADER) if channel >= 0 else -1
    if message < 0:
        return len(reply), len(reply)
    start = message + len(_MESSAGE)
    ends = (reply.find(token, start) for token in _HARMONY_ENDS)
    return start, min((end for end in ends if end >= 0), default=len(reply))


def _without_end_tokens(region: str) -> str:
    while True:
        region = region.rstrip()
        token = next((token for token in _END_TOKENS if region.endswith(token)), "")
        if not token:
            return region
        region = region[: -len(token)]


def last_boxed(text: str) -> Box | None:
    r"""Return the balanced \boxed{…} that starts last, or None. One pass; `\{` and `\}` do not count as braces.

    An unclosed box is no answer: an earlier closed one counts. The inner one of nested boxes starts last.
    """
    if BOX not in text:
        return None
    best: Box | None = None
    open_braces: list[tuple[int, int]] = []  # (start of the box or -1, start of the content)
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\\":
            content = _box_content(text, i)
            if content:
                open_braces.append((i, content))
                i = content
            else:
                i += 2 if text.startswith(("{", "}"), i + 1) else 1
        else:
            if char == "{":
                open_braces.append((-1, i + 1))
            elif char == "}" and open_braces:
                start, content = open_braces.pop()
                if start >= 0 and (best is None or start > best.start):
                    best = Box(start, text[content:i])
            i += 1
        if len(open_braces) > MAX_DEPTH:
            return None
    return best


def _box_content(text: str, i: int) -> int:
    r"""Index after the brace if `\boxed{` stands at i (spaces before the brace allowed), else 0."""
    if not text.startswith(BOX, i):
        return 0
    i += len(BOX)
    while i < len(text) and text[i].isspace():
        i += 1
    return i + 1 if text.startswith("{", i) else 0


def last_number(text: str, *, first_may_be_cut: bool = False) -> str | None:
    r"""Return the last match of `-?[0-9][0-9,]*(?:\.[0-9]+)?`, trailing commas removed, by hand in one pass.

    `first_may_be_cut`: a number at index 0 goes on before the text and is not read.
    """
    text = text.translate(MINUS)
    found: str | None = None
    i = 0
    while i < len(text):
        if text[i] not in DIGITS:
            i += 1
            continue
        start = i - 1 if i > 0 and text[i - 1] == "-" else i
        while i < len(text) and (text[i] in DIGITS or text[i] == ","):
            i += 1
        if i + 1 < len(text) and text[i] == "." and text[i + 1] in DIGITS:
            i += 1
            while i < len(text) and text[i] in DIGITS:
                i += 1
        if start > 0 or not first_may_be_cut:
            found = text[start:i].rstrip(",")
    return found
