"""Applies a chat template, checks its messages, and finds what it supports, such as tools and generation marks."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.chat.limits import beyond_limits
from lockstep.config.schema import Chat
from lockstep.errors import DEFECT, ChatError
from lockstep.types import Message, TokenIds
from lockstep.user_code import describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIXED_DATE = date(2024, 7, 26)
"""Stands for today in templates that print the date, so that a run can be repeated on another day."""

ROLES = ("system", "user", "assistant", "tool")
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?:'([^'\n]*)'|"([^"\n]*)")\s*\)""")
_DATE_ANY = re.compile(r"strftime_now\s*\(")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROBE_REPLY = "lockstepprobereply"
"""Stands for a reply where only the text around it is wanted."""
_LONGEST_TEMPLATE = 1_000_000
_TOOLS = re.compile(r"\btools\b")
_EXPLAINED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The Hermes convention, in the words of Qwen's chat template."""
_within_limits: set[tuple[str, str, bool, str]] = set()
"""Templates, roles, switch and variables that were rendered within limits."""


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the tokenizer's chat template. Raises ChatError if there is none."""
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        if "default" not in template:
            names = ", ".join(sorted(template))
            raise ChatError(
                f"the tokenizer has chat templates {names}, but none is called default",
                where=where(tokenizer),
                fix="name one of them default, or save the tokenizer with only one",
            )
        template = template["default"]
    if not isinstance(template, str) or not template:
        raise ChatError(
            "the tokenizer has no chat template, so there is no way to tell how this model marks turns",
            where=where(tokenizer),
            fix="choose the instruct version of the model, or put a chat_template.jinja beside its tokenizer files",
        )
    if len(template) > _LONGEST_TEMPLATE:
        raise ChatError(
            f"the chat template has {len(template):,} characters, more than {_LONGEST_TEMPLATE:,}",
            where=where(tokenizer),
            fix="give the tokenizer a shorter chat template",
        )
    return template


def where(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's name for messages."""
    return f"tokenizer {tokenizer.name_or_path or '(unnamed)'}"


def freeze_date(template: str, place: str = "chat template") -> str:
    """Replace strftime_now("…") by the text of FIXED_DATE. Raises ChatError if the format is not written out."""

    def literal(match: re.Match[str]) -> str:
        spec = match.group(1) if match.group(1) is not None else match.group(2)
        try:
            text = FIXED_DATE.strftime(spec)
        except (ValueError, MemoryError) as error:
            raise ChatError(
                f"strftime_now has {spec!r}, which is not a date format: {error}",
                where=place,
                fix="correct this date format in the template",
            ) from error
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    frozen = _DATE_CALL.sub(literal, template)
    if _DATE_ANY.search(frozen):
        raise ChatError(
            "the chat template prints today's date by a call that Lockstep cannot replace: prompts would change from day to day",
            where=place,
            fix="edit the template: write a constant date instead of strftime_now",
        )
    return frozen


def has_generation(template: str) -> bool:
    """Return whether the template itself marks what the assistant says, by {% generation %}."""
    return _GENERATION.search(template) is not None


def check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> None:
    """Refuse template variables that would change how the template is applied instead of what it sees."""
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
    if taken := sorted(reserved & set(kwargs)):
        raise ChatError(
            f"{', '.join(taken)} cannot be set: apply_chat_template of the tokenizer has parameters of these names",
            where="chat.template_kwargs",
            fix="remove these names",
        )


def frame(chat: Chat, messages: Sequence[Message]) -> tuple[list[Message], int]:
    """Put the recipe's system text, examples and suffix around a task's turns.

    Returns the turns and how many of them come before the task's own (a task's system text counts with those before).
    The suffix goes on the last user turn and on the examples'. Raises ChatError for turns that make no chat.
    """
    check_messages(messages)
    own_system = [m for m in messages if m["role"] == "system"]
    if any(m["role"] == "system" for m in messages[len(own_system) :]):
        raise ChatError("a system turn comes after other turns", where="messages", fix="put the system turn first")
    if chat.system is not None and own_system:
        raise ChatError(
            "both the recipe and the task give a system text",
            where="chat.system",
            fix="remove one: chat.system in the recipe, or the system turn in the task's messages",
        )
    turns = list(own_system) if chat.system is None else [Message(role="system", content=chat.system)]
    for example in chat.examples:
        turns.append(Message(role="user", content=example.user + chat.suffix))
        turns.append(Message(role="assistant", content=example.assistant))
    rest = list(messages[len(own_system) :])
    asked = [i for i, m in enumerate(rest) if m["role"] == "user"]
    if not asked:
        raise ChatError("the messages have no user turn", where="messages", fix="add a user turn with the question")
    rest[asked[-1]] = Message(role="user", content=rest[asked[-1]]["content"] + chat.suffix)
    return turns + rest, len(turns)


def check_messages(messages: Sequence[object]) -> None:
    """Raise ChatError unless every turn has a known role and text that can be encoded: they come from users' files."""
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatError(
                f"a turn must have exactly the fields role and content, but this one is {message!r}",
                where=place,
                fix="give each turn only these two fields",
            )
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ChatError(f"the role {role!r} is unknown", where=place, fix=f"use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ChatError(
                f"the content is not text but of type {type(content).__name__}",
                where=place,
                fix="give the content as text",
            )
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ChatError(
                f"the content is not valid Unicode at character {error.start} (a lone surrogate)",
                where=place,
                fix="repair the row, for example with text.encode('utf-8', 'replace').decode()",
            ) from error


def control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern that matches the text of any special token; None if there is none."""
    special = sorted((str(t) for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in special)) if special else None


def refuse_control_tokens(pattern: re.Pattern[str] | None, messages: Sequence[Message]) -> None:
    """Raise ChatError if a turn's text spells a special token: read as one, it could fake or end a turn."""
    for i, message in enumerate(messages):
        if pattern is not None and (found := pattern.search(message["content"])):
            raise ChatError(
                f"the {message['role']} turn contains {found.group()!r}, which this tokenizer reads as a control token",
                where=f"turn {i}",
                fix="remove this text from the data or from the recipe's chat section",
            )


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer, the text of its chat template, and the recipe's variables for it."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    """The template in force (with a fixed date, where it would print today's)."""
    kwargs: Mapping[str, object]

    def text(self, turns: Sequence[Message], *, generate: bool, tools: str = "") -> str:
        """Return the rendered text; `generate` opens the assistant's turn at the end. `tools`: as in ChatFormat.render."""
        return str(self._apply(turns, tools, tokenize=False, add_generation_prompt=generate))

    def ids(self, turns: Sequence[Message], *, generate: bool, tools: str = "") -> TokenIds:
        """Return the ids of the rendered text. Raises ChatError if a class's own way to ids gives others than this."""
        ids = self.encode(self.text(turns, generate=generate, tools=tools))
        if self._plain:
            return ids
        direct = self._apply(turns, tools, tokenize=True, return_dict=False, add_generation_prompt=generate)
        if ids != tuple(direct):
            raise ChatError(
                "this tokenizer's apply_chat_template gives ids that differ from those of the text that it renders",
                where=where(self.tokenizer),
                fix=DEFECT,
            )
        return ids

    @property
    def _plain(self) -> bool:
        """True if the tokenizer has transformers' own apply_chat_template, which encodes the rendered text as `encode` does."""
        from transformers import PreTrainedTokenizerBase as Base

        return getattr(self.tokenizer.apply_chat_template, "__func__", None) is Base.apply_chat_template

    def marked(self, turns: Sequence[Message], tools: str = "") -> tuple[TokenIds, tuple[bool, ...]]:
        """Return the chat's ids, and which of them {% generation %} blocks hold, as transformers reports it."""
        out = self._apply(turns, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return tuple(out["input_ids"]), tuple(bool(mark) for mark in out["assistant_masks"])

    def encode(self, text: str) -> TokenIds:
        """Return the ids of rendered text. The template has written every special token itself, so none is added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def end_of_turn(self) -> int | None:
        """Return the special token that the template writes after a reply; None if it writes none."""
        probe = [Message(role="user", content="a"), Message(role="assistant", content=PROBE_REPLY)]
        _, found, tail = self.text(probe, generate=False).rpartition(PROBE_REPLY)
        if not found:
            raise ChatError(
                "the chat template leaves out the assistant's turns",
                where=where(self.tokenizer),
                fix="give the tokenizer another chat template",
            )
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return next((i for i in self.encode(tail) if i in special), None)

    def _apply(self, turns: Sequence[Message], tools: str, **how: bool) -> Any:
        """Call the tokenizer's apply_chat_template; `how` are its switches. The only call of it.

        Raises ChatError if the template refuses the turns, or exceeds the limits of lockstep.chat.limits: these hold for the
        first rendering of each sequence of roles.
        """
        # Typed as Any: its result is text, a list or a mapping, by its switches; the callers above know which.
        call: Any = self.tokenizer.apply_chat_template
        kwargs = {**self.kwargs, **({"tools": json.loads(tools)} if tools else {})}
        plain, roles = [dict(turn) for turn in turns], ", ".join(turn["role"] for turn in turns)
        generate = how.get("add_generation_prompt", False)
        kind = (self.source, roles, generate, str(kwargs))
        if kind not in _within_limits:
            text = partial(
                call, plain, chat_template=self.source, tokenize=False, add_generation_prompt=generate, **kwargs
            )
            if exceeded := beyond_limits(text):
                raise ChatError(
                    f"rendering the chat template exceeded the limits: {exceeded}",
                    where=where(self.tokenizer),
                    fix="give the tokenizer another chat template",
                )
            if len(_within_limits) > 10_000:  # chats of clients have no end of kinds
                _within_limits.clear()
            _within_limits.add(kind)
        try:
            return call(plain, chat_template=self.source, **how, **kwargs)
        except Exception as error:  # a template may raise whatever Python can
            raise ChatError(
                f"the chat template refused turns of {roles}: {describe(error, None)}",
                where=where(self.tokenizer),
                fix="change chat.system, chat.examples or the task's messages to what this model's template accepts",
            ) from error


def shows_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return _TOOLS.search(template) is not None


def with_tools(turns: Sequence[Message], tools: str) -> list[Message]:
    """Return the turns with the tools, a JSON list of function schemas, explained at the end of their system text."""
    text = _EXPLAINED.format(tools="\n".join(json.dumps(tool) for tool in json.loads(tools)))
    if turns and turns[0]["role"] == "system":
        return [Message(role="system", content=f"{turns[0]['content']}\n\n{text}"), *turns[1:]]
    return [Message(role="system", content=text), *turns]
