"""Finds the token positions of the assistant's turns in a rendered chat, for training on replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from lockstep.errors import ChatError
from lockstep.types import Message, TokenIds

Span: TypeAlias = tuple[int, int]
"""First token and the one after the last."""


class Render(Protocol):
    def __call__(self, turns: Sequence[Message], *, generate: bool) -> TokenIds: ...


def spans_by_template(ids: TokenIds, marked: tuple[TokenIds, tuple[bool, ...]], replies: int) -> list[Span]:
    """Return the spans that the template marks by {% generation %}, one per reply; `marked` is the result of
    `Template.marked`.

    Raises ChatError if the ids differ from `ids`, or the number of spans from that of the replies.
    """
    marked_ids, mask = marked
    if marked_ids != ids:
        raise ChatError(
            "the chat template gives different ids when the assistant mask is requested",
            where="chat template",
            fix="remove the {% generation %} blocks from the template, or give the tokenizer another one",
        )
    spans = runs_of_true(mask)
    if len(spans) != replies:
        # transformers drops or stretches spans whose first or last character has no token; never train on those.
        raise ChatError(
            f"the chat template marks {len(spans)} spans with {{% generation %}}, but the chat has {replies} assistant turns",
            where="chat template",
            fix="give each assistant turn one generation block with text in it; look for empty replies in the data",
        )
    return spans


def runs_of_true(mask: Sequence[bool]) -> list[Span]:
    """Return maximal runs of True. Example: [F, T, T, F, T] gives [(1, 3), (4, 5)]."""
    borders = [i for i, (before, on) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if before != on]
    return list(zip(borders[::2], borders[1::2], strict=True))


def spans_by_prefix(
    render: Render, turns: Sequence[Message], reply: int, ids: TokenIds, stop_ids: Sequence[int]
) -> Span:
    """Return the span of turn `reply`: the difference between the chat up to it and its prompt, cut after the first end token.

    The cut leaves out the template's text after the end token (ChatML: a line break), which sampling never produces. Raises
    ChatError if the prompt or the chat up to the reply is not a prefix of the whole.
    """
    prompt = render(turns[:reply], generate=True)
    upto = render(turns[: reply + 1], generate=False)
    if ids[: len(upto)] != upto or upto[: len(prompt)] != prompt:
        raise ChatError(
            f"the prompt of assistant turn {reply} is not a prefix of the rendered chat: "
            "training would see different ids before the reply than sampling",
            where=f"turn {reply}",
            fix="train on chats whose only assistant turn is the last, or use a template with {% generation %}",
        )
    end = next((i + 1 for i in range(len(prompt), len(upto)) if upto[i] in stop_ids), len(upto))
    return len(prompt), end
