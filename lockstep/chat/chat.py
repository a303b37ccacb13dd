"""ChatFormat, the only class that turns messages into token ids, and sampled ids into text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from lockstep.chat.continuation import Continuation, alike
from lockstep.chat.mask import spans_by_prefix, spans_by_template
from lockstep.chat.parser import CHANNEL, CLOSE, OPEN, Parser, answer_of, opens_thought, parser_of
from lockstep.chat.template import (
    FIXED_DATE,
    Template,
    check_kwargs,
    control_pattern,
    frame,
    freeze_date,
    has_generation,
    refuse_control_tokens,
    shows_tools,
    template_of,
    where,
    with_tools,
)
from lockstep.chat.token_bytes import TokenBytes
from lockstep.config.schema import Chat
from lockstep.errors import ChatError
from lockstep.types import Message, Prompt, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatFormat:
    """A tokenizer's chat template with a recipe's system text, examples and suffix.

    `generation_eos` is generation_config.eos_token_id of the model: the ids at which its makers stop a reply.
    Raises ChatError if the tokenizer has no template, or nothing ends a reply.
    """

    template: Template
    stop_ids: TokenIds
    """Every id that ends a reply: the tokenizer's and the generation config's end tokens, and the template's own."""
    template_hash: str
    """16 hex digits; equal hashes and equal messages give equal ids."""
    prefix: TokenIds
    """Ids with which every prompt begins."""
    notes: tuple[str, ...]
    """Remarks about this template for the log."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_eos: int | Sequence[int] | None = None
    ) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        raw = template_of(tokenizer)
        self.template = Template(tokenizer, freeze_date(raw, where(tokenizer)), chat.template_kwargs)
        check_kwargs(tokenizer, chat.template_kwargs)
        self.parser: Parser = parser_of(self.template.source) if chat.parser == "auto" else chat.parser
        self._special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special_ids = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._marked = self.parser != "none" and not self._special.isdisjoint((OPEN, CLOSE, CHANNEL))
        self._control = control_pattern(tokenizer)
        self.stop_ids = self._stop_ids(generation_eos)
        self.template_hash = self._hash()
        self.notes = self._notes(dated=self.template.source != raw)
        self.prefix = self._common_prefix()
        self._prepared: dict[str, tuple[Prompt, TokenIds]] = {}
        self._opened = self.parser == "think" and self._opens_thought()

    def unframed(self) -> ChatFormat:
        """Return the format without the recipe's own texts, for clients that write whole chats."""
        settings = self.chat.model_copy(update={"system": None, "examples": [], "suffix": ""})
        return ChatFormat(self.tokenizer, settings, self.stop_ids)

    def render(self, messages: Sequence[Message], tools: str = "") -> TokenIds:
        """Return the ids of the prompt: system, examples, the task's turns with the suffix, and the opening of the reply.

        `tools` is a JSON list of function schemas; a template that shows no tools gets them as part of the system text. Raises
        ChatError if the turns are not a valid chat, contain a control token, are refused by the template, or if the ids would
        begin with two BOS tokens.
        """
        turns = self.framed(messages)
        if tools and not shows_tools(self.template.source):
            turns, tools = with_tools(turns, tools), ""
        return self._ids(turns, generate=True, tools=tools)

    def framed(self, messages: Sequence[Message]) -> list[Message]:
        """Return system text, examples and the task's turns. Raises ChatError if they are not a valid chat to reply to."""
        turns, _ = frame(self.chat, messages)
        if turns[-1]["role"] == "assistant":
            raise ChatError(
                "the last turn is the assistant's, so there is nothing to reply to",
                where="messages",
                fix="end the messages with a user turn",
            )
        return turns

    def render_prompt(self, prompt: Prompt) -> TokenIds:
        """Run `render` on a task's prompt; its errors name the prompt."""
        known = self._prepared.get(prompt.id)
        if known is not None and known[0] == prompt:
            return known[1]
        try:
            return self.render(prompt.messages, prompt.tools)
        except ChatError as error:
            raise ChatError(error.what, where=f"prompt {prompt.id}, {error.where}", fix=error.fix) from error

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Run `render_prompt` on prompts that will be asked for next, and remember what it returned until the next call."""
        self._prepared = {prompt.id: (prompt, self.render_prompt(prompt)) for prompt in prompts}

    def doubtful(self, prompt: Prompt, room: float) -> bool:
        """Return whether `render` may refuse a prompt's own text or need more than `room` ids; ids are never more than bytes."""
        text = "\n".join(message["content"] for message in prompt.messages)
        spelled = self._control is not None and self._control.search(text) is not None
        return spelled or len(text.encode("utf-8", "surrogatepass")) > room

    def shared_prefix(self, ids: TokenIds) -> int:
        """Return the number of leading ids of a prompt that every prompt has: system text and examples."""
        size = len(self.prefix)
        return size if size < len(ids) and ids[:size] == self.prefix else 0

    def continuation(self) -> Continuation:
        """Return the rule by which observations follow a reply."""
        return Continuation(self.template, self.stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a whole reply for people and records, without its end token and other special tokens except those
        that mark thoughts. Text is never turned back into ids.
        """
        end = len(ids) - 1 if ids and ids[-1] in self.stop_ids else len(ids)
        return self._text(ids[:end], special=self._marked)

    def shown(self, ids: Sequence[int]) -> str:
        """Return ids as text, special tokens shown."""
        return self._text(ids, special=True)

    def answer(self, ids: Sequence[int]) -> str:
        """Return the graded part of a reply: all of it, or the text after the thoughts ("" if these never end)."""
        return self._graded(self._text(ids, special=self._marked))

    def read(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return `decode` and `answer` of a reply, decoded once if both are of the same text."""
        (found,) = self.read_many([ids])
        return found

    def read_many(self, replies: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
        """Return `read` of each reply."""
        hidden = frozenset() if self._marked else self._special_ids
        ends = [bool(ids) and ids[-1] in self.stop_ids and ids[-1] not in hidden for ids in replies]
        whole = self._texts(replies)
        cut = iter(self._texts([ids[:-1] for ids, end in zip(replies, ends, strict=True) if end]))
        return [(next(cut) if end else text, self._graded(text)) for text, end in zip(whole, ends, strict=True)]

    def _graded(self, text: str) -> str:
        """Return the answer in the text of a reply, whose special tokens are shown if they mark thoughts."""
        text = answer_of(text, self.parser, opened=self._opened)
        for token in self._special if self._marked else ():
            text = text.replace(token, "")
        return text

    def _texts(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Return `_text` of each reply, special tokens shown if they mark thoughts."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self.tokenizer)
        if (kind.decode, getattr(kind, "_decode", None)) != (Fast.decode, Fast._decode):
            return [self._text(ids, special=self._marked) for ids in many]
        if self._token_bytes is not None:
            return self._token_bytes.decode(many)
        # what its decode calls for each, while spaces are not cleaned up; all together on all cores
        return list(self.tokenizer.backend_tokenizer.decode_batch(many, skip_special_tokens=not self._marked))

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        """Decoder of replies that does as the fast tokenizer, if that is simple."""
        from tokenizers.decoders import ByteLevel

        fast = self.tokenizer.backend_tokenizer
        return TokenBytes(fast, special=self._marked) if isinstance(fast.decoder, ByteLevel) else None

    def _text(self, ids: Sequence[int], *, special: bool) -> str:
        array = np.asarray(ids, np.int64)  # of a list transformers looks at the type of each id
        text = self.tokenizer.decode(array, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        if not isinstance(text, str):
            raise ChatError(f"decode returned {type(text).__name__}, not text", where=where(self.tokenizer))
        return text

    def _opens_thought(self) -> bool:
        """Return whether the template opens a thought for the reply, tested on a chat that does not mention thoughts."""
        ids = self.template.ids([Message(role="user", content="a")], generate=True)
        return opens_thought(self.shown(ids))

    def preview(self, messages: Sequence[Message], tools: str = "") -> str:
        """Return the prompt as the model sees it, special tokens shown, under a line with its length and end tokens."""
        ids = self.render(messages, tools)
        ends = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in self.stop_ids)
        head = f"prompt of {len(ids)} tokens, template {self.template_hash}, a reply ends at {ends}"
        lines = self.shown(ids).split("\n")
        return "\n".join([head, *(f"note: {note}" for note in self.notes), *(f"| {line}" for line in lines)])

    def trained_mask(
        self, messages: Sequence[Message], *, last_only: bool = False, tools: str = ""
    ) -> tuple[TokenIds, tuple[bool, ...]]:
        """Return the ids of a whole chat, framed as `render` frames a prompt, and a mask of those that are trained.

        Trained are the task's assistant turns, or only the last of them, each up to its end token; the recipe's examples are
        not. A template with {% generation %} marks them itself; for others an assistant turn is the difference between the chat
        up to it and its prompt.

        Raises ChatError if no assistant turn ends the chat, or if prompts are not prefixes of the chat (templates that rewrite
        earlier turns): training would then see other ids than sampling.
        """
        turns, before = frame(self.chat, messages)
        if turns[-1]["role"] != "assistant":
            raise ChatError(
                "the last turn is not the assistant's, so there is no reply to train on",
                where="messages",
                fix="end the messages with an assistant turn",
            )
        if tools and not shows_tools(self.template.source):
            added = with_tools(turns, tools)
            turns, tools, before = added, "", before + len(added) - len(turns)
        render = partial(self._ids, tools=tools)
        ids = render(turns, generate=False)
        replies = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        chosen = replies[-1:] if last_only else [reply for reply in replies if reply >= before]
        if has_generation(self.template.source):
            spans = spans_by_template(ids, self.template.marked(turns, tools), len(replies))
            spans = [span for reply, span in zip(replies, spans, strict=True) if reply in chosen]
        else:
            spans = [spans_by_prefix(render, turns, reply, ids, self.stop_ids) for reply in chosen]
        trained = [False] * len(ids)
        for start, end in spans:
            trained[start:end] = [True] * (end - start)
        return ids, tuple(trained)

    def _common_prefix(self) -> TokenIds:
        """Return the common prefix of two unlike prompts, without its last token, which the question's first could change."""
        try:
            one, other = (self.render(({"role": "user", "content": text},)) for text in ("0", "What?"))
        except ChatError:  # a template that refuses such a chat: nothing is shared, and prompts report the fault
            return ()
        return one[: max(0, alike(one, other) - 1)]

    def _ids(self, turns: Sequence[Message], *, generate: bool, tools: str = "") -> TokenIds:
        refuse_control_tokens(self._control, [*turns, Message(role="tools", content=tools)])
        ids = self.template.ids(turns, generate=generate, tools=tools)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == (bos, bos):
            raise ChatError(
                f"the prompt begins with two BOS tokens ({self.tokenizer.bos_token})",
                where=where(self.tokenizer),
                fix="remove one of the two tokens from the chat template",
            )
        return ids

    def _stop_ids(self, generation_eos: int | Sequence[int] | None) -> TokenIds:
        named = generation_eos if isinstance(generation_eos, (list, tuple)) else [generation_eos]
        if wrong := [one for one in named if one is not None and type(one) is not int]:
            raise ChatError(
                f"generation_config.json names {wrong[0]!r} as eos_token_id, which is not the number of a token",
                where=where(self.tokenizer),
                fix="correct eos_token_id in generation_config.json, or delete that file",
            )
        found = {one for one in named if isinstance(one, int)}
        found.update(i for i in (self.tokenizer.eos_token_id, self.template.end_of_turn()) if isinstance(i, int))
        if not found:
            raise ChatError(
                "no token ends a reply: tokenizer, generation config and chat template have no end token",
                where=where(self.tokenizer),
                fix="set eos_token in the tokenizer",
            )
        return tuple(sorted(found))

    def _hash(self) -> str:
        added = self.tokenizer.added_tokens_decoder
        parts = {
            "template": self.template.source,
            "system": self.chat.system,
            "examples": [[example.user, example.assistant] for example in self.chat.examples],
            "suffix": self.chat.suffix,
            "kwargs": self.chat.template_kwargs,
            "vocabulary": len(self.tokenizer),
            "bos": self.tokenizer.bos_token_id,
            "eos": self.tokenizer.eos_token_id,
            "special": sorted([i, str(token)] for i, token in added.items() if token.special),
        }
        if self.parser != "none":
            parts["parser"] = self.parser
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _notes(self, *, dated: bool) -> tuple[str, ...]:
        notes = []
        if dated:
            notes.append(f"the template prints today's date; {FIXED_DATE} replaces it, so that runs can be repeated")
        if self.parser != "none":
            notes.append(f"replies are read by the parser {self.parser}: thoughts are recorded and not graded")
        bos = self.tokenizer.bos_token_id
        if bos is not None:
            plain = self.tokenizer("a")["input_ids"]
            ids = self.template.ids([Message(role="user", content="a")], generate=True)
            if plain[:1] == [bos] and ids[:1] != (bos,):
                notes.append(
                    f"the tokenizer puts {self.tokenizer.bos_token} before plain text but the template does not: "
                    "prompts have none, as wherever this template is served"
                )
        return tuple(notes)


def check_length(prompt_id: str, tokens: int, max_tokens: int, context: int) -> None:
    """Raise ChatError if `tokens` ids of prompt leave no room for `max_tokens` of reply in a model's `context`."""
    if tokens + max_tokens > context:
        raise ChatError(
            f"{tokens} tokens of prompt and {max_tokens} of reply exceed the model's context of {context} tokens",
            where=f"prompt {prompt_id}",
            fix=f"lower max_tokens to {context - tokens} or less, or drop the prompt"
            if tokens < context
            else "drop or shorten the prompt: it alone fills the context",
        )
