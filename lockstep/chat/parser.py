"""Separates the answer of a reply from the reasoning before it, whose end each model family marks in its own way.

A verifier sees only the answer, so that it never takes a number from the reasoning; records keep the whole reply. A reply
whose reasoning has no end mark has no answer.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, assert_never

Parser: TypeAlias = Literal["none", "think", "harmony"]
OPEN, CLOSE = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
FINAL = "final"
_SEGMENT_END = re.compile(r"<\|(?:start|end|return|call|channel)\|>")
_SEGMENT = re.compile(r"<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")


def parser_of(template: str) -> Parser:
    """Return the parser for replies under this chat template: harmony channels (gpt-oss), think tags (Qwen3, R1), or none."""
    if CHANNEL in template:
        return "harmony"
    return "think" if CLOSE in template or OPEN in template else "none"


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends within a thought, so that the reply begins in it."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def answer_of(text: str, parser: Parser, *, opened: bool = False) -> str:
    """Return the part of a reply, control tokens included, that a verifier sees. `opened`: the prompt ended within a thought."""
    match parser:
        case "none":
            return text
        case "think":
            return _after_thoughts(text, opened=opened)
        case "harmony":
            return _final_channel(text)
        case _:
            assert_never(parser)


def _after_thoughts(text: str, *, opened: bool) -> str:
    """Return the text after the last closed thought, up to one that is opened again and never closed."""
    _, closed, rest = text.rpartition(CLOSE)
    if not closed and opened:
        return ""
    return rest.partition(OPEN)[0].strip()


def _final_channel(text: str) -> str:
    """Return the messages of the channel `final`; without any channel the whole text before the next control token."""
    if CHANNEL not in text:
        return _SEGMENT_END.split(text.rpartition(MESSAGE)[2], maxsplit=1)[0].strip()
    finals = [match.end() for match in _SEGMENT.finditer(text) if match[1] == FINAL]
    return "\n".join(_SEGMENT_END.split(text[start:], maxsplit=1)[0].strip() for start in finals)
