"""Decides whether two questions are the same, by hashes of their texts without differences of spacing, case and Unicode form."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from lockstep.types import Message, Prompt


def normalised_question(messages: Sequence[Message]) -> str:
    """Return the contents of all turns, NFKC, case folded, whitespace runs as one space. Equal texts are the same question."""
    text = "\n".join(message["content"] for message in messages)
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split())


def question_digest(messages: Sequence[Message]) -> bytes:
    """Return the SHA-256 of the normalised question: the same on every machine, in every run."""
    return hashlib.sha256(normalised_question(messages).encode("utf-8", "surrogatepass")).digest()


def raw_digest(messages: Sequence[Message]) -> bytes:
    """Return the SHA-256 of the turns as they are, roles included."""
    text = json.dumps([[message["role"], message["content"]] for message in messages], separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def data_hash(prompts: Sequence[Prompt]) -> str:
    """Return 16 hex digits of SHA-256 over the ids, messages and answers, in order."""
    items = [[p.id, [[m["role"], m["content"]] for m in p.messages], p.answer] for p in prompts]
    return hashlib.sha256(json.dumps(items, separators=(",", ":")).encode()).hexdigest()[:16]
