"""Renders the ids that follow a reply in a chat of several turns. They are appended; earlier ids are never tokenised again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.chat.template import PROBE_REPLY, Template, check_messages, control_pattern, where
from lockstep.errors import ChatError
from lockstep.types import Message, TokenIds

_TOOL = re.compile(r"""['"]tool['"]|tool_response""")


class Continuation:
    """Turns observations into ids, as the template writes them after a reply.

    The chat so far is not rendered again: a template that rewrites earlier turns (Qwen3 drops their thoughts) would then give
    other ids than those that were sampled. Only the new turns are rendered, after a placeholder for the reply, and the
    template's text after the placeholder is appended. Raises ChatError if the template leaves the reply out.
    """

    role: str
    """Role that carries the result of a tool: tool if the template knows it, else user."""
    notes: tuple[str, ...]
    """Remarks about this template in chats of several turns, for the log."""

    def __init__(self, template: Template, stop_ids: TokenIds) -> None:
        self._template, self._stop_ids = template, stop_ids
        self._control = control_pattern(template.tokenizer)
        self.role = "tool" if _TOOL.search(template.source) and self._shows_tool_results() else "user"
        self._closing = self._closing_ids()
        self.notes = self._notes()

    def after(self, last: int, observation: Sequence[Message]) -> TokenIds:
        """Return the ids from the end of a reply, whose last id is `last`, to the opening of the next one.

        They begin with the end of the turn, unless `last` has ended it: a reply that was cut off is closed like any other. A
        space is put into text that contains a control token. Raises ChatError for turns that are not a valid chat.
        """
        check_messages(observation)
        ids = self._template.encode(self._tail([self._said(message) for message in observation]))
        return ids[len(self._closing) :] if last in self._stop_ids else ids

    def _said(self, message: Message) -> Message:
        role = self.role if message["role"] == "tool" else message["role"]
        text = message["content"]
        if self._control is not None:
            text = self._control.sub(lambda found: f"{found.group()[0]} {found.group()[1:]}", text)
        return Message(role=role, content=text)

    def _tail(self, observation: Sequence[Message]) -> str:
        """Return the template's text after a reply when these turns follow it."""
        probe = [Message(role="user", content="a"), Message(role="assistant", content=PROBE_REPLY), *observation]
        _, found, tail = self._template.text(probe, generate=True).partition(PROBE_REPLY)
        if not found:
            raise ChatError(
                "the chat template leaves out the assistant's earlier turns, so no chat of several turns is possible",
                where=where(self._template.tokenizer),
                fix="give the tokenizer another chat template",
            )
        return tail

    def _closing_ids(self) -> TokenIds:
        """Return the ids between a reply and the next turn, up to the token that ends the reply; empty if nothing ends it."""
        one, other = (
            self._template.encode(self._tail([Message(role="user", content=text)])) for text in ("0", "What?")
        )
        ends = [i for i in range(alike(one, other)) if one[i] in self._stop_ids]
        return one[: ends[0] + 1] if ends else ()

    def _shows_tool_results(self) -> bool:
        try:
            return "42" in self._tail([Message(role="tool", content="42")])
        except ChatError:  # it wants its own form of tool results: they are given as the user's turns
            return False

    def _notes(self) -> tuple[str, ...]:
        chat = [Message(role="user", content="a"), Message(role="assistant", content=f"<think>x</think>{PROBE_REPLY}")]
        then = [*chat, Message(role="user", content="b")]
        alone, inside = (self._template.text(turns, generate=False).partition(PROBE_REPLY)[0] for turns in (chat, then))
        if alone == inside and "<think>" in inside:
            return ()
        return (
            "the template rewrites earlier replies (their thoughts are dropped). Here they stay as they were sampled, in "
            "sampling and in training: ids are only ever appended",
        )


def alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
