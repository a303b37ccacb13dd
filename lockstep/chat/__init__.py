"""Converts messages to token ids and back, by the tokenizer's own chat template."""

from __future__ import annotations

from lockstep.chat.chat import ChatFormat, check_length

__all__ = ["ChatFormat", "check_length"]
