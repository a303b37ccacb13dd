"""Reads YAML text into plain data with the line of every value, and writes it.

YAML 1.2's core types (3e-6 is a number, `no` is text), one document, no key twice, no tags, no aliases: every reader
understands a recipe alike, and no small file can expand to gigabytes.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from lockstep.errors import ConfigError

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
At: TypeAlias = tuple[str | int, ...]
"""Path of a value. Example: ("eval", "modes", 0, "name"), written eval.modes.0.name."""

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_INT_BITS = 1024
"""Bits of the largest finite float; longer numbers are refused."""


@dataclass
class Document:
    """One parsed text. `value` is None for an empty text."""

    value: Value
    lines: dict[At, int] = field(default_factory=dict)
    """Line of each value, counted from 1; a mapping's value has the line of its key."""
    mistakes: list[str] = field(default_factory=list)
    """Mistakes after which reading goes on: keys written twice, keys that are not text."""


def read(path: Path) -> Document:
    """Parse a file. Raises ConfigError (one line, file:line) if it cannot be read as YAML of at most 1 MB in UTF-8."""
    try:
        # a pipe without a writer would be waited for
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError([f"{path}: not a regular file; save the recipe as a file"])
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    if len(data) > MAX_BYTES:
        raise ConfigError([f"{path}: larger than 1 MB, which no recipe is"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}:{line}: not UTF-8 (byte {error.start}); save the file as UTF-8"]) from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Parse YAML text. `source` is a file name for messages, "" for a value given on the command line.

    Raises ConfigError (one line) for text that is not YAML, and for tags, aliases and deep nesting.
    """
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        reasons = [part for part in (error.context, error.problem) if part]
        mark = error.problem_mark or error.context_mark
        raise _refusal(source, mark.line + 1 if mark else 1, ", ".join(reasons)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refusal(source, line, f"character {error.character:#x} is not allowed") from None
    except (
        ValueError,
        OverflowError,
    ) as error:  # PyYAML lets chr() and int() fail on \UFFFFFFFF and on %YAML 1.(many digits)
        raise _refusal(source, 1, str(error)) from None
    document = Document(None)
    if node is not None:
        document.value = _value(node, (), document, source)
    return document


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML that `parse` reads back to an equal value, and that YAML 1.1 readers read alike."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def to_line(value: Mapping[str, Any]) -> str:
    """Return YAML on one line, in braces, that `parse` reads back to an equal value."""
    text = yaml.dump(
        dict(value), Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return str(text).rstrip("\n")


def plain(value: object) -> tuple[Value, dict[At, str]]:
    """Return a copy made of JSON data, and the reason for each value that is not JSON data (None in the copy)."""
    refused: dict[At, str] = {}
    return _plain(value, (), refused), refused


def dotted(at: At) -> str:
    """Return a path as text: eval.modes.0.name. A part that is not a name is quoted."""
    return ".".join(str(part) if re.fullmatch(r"[\w@-]+", str(part)) else quoted(part) for part in at)


def value_at(tree: object, path: str) -> Any:
    """Return the value of a dotted path in mappings within mappings; None if there is none."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def quoted(value: object, limit: int = 60) -> str:
    """Return a value as a recipe would have it, on one printable line, shortened."""
    match value:
        case None | bool():
            text = "null" if value is None else str(value).lower()
        case float() if not math.isfinite(value):
            text = ".nan" if math.isnan(value) else str(value).replace("inf", ".inf")
        case int() if value.bit_length() > MAX_INT_BITS:
            text = f"(a number of {value.bit_length()} bits)"
        case str():
            text = f'"{value[: limit + 1]}"'
        case list() | tuple():
            text = "[" + ", ".join(quoted(item) for item in value[:limit]) + "]"
        case dict():
            text = "{" + ", ".join(f"{key}: {quoted(item)}" for key, item in list(value.items())[:limit]) + "}"
        case _:
            text = str(value)
    return one_line(text if len(text) <= limit else f"{text[: limit - 1]}…")


def one_line(text: str) -> str:
    """Return text with every line break, control character and lone surrogate written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Loader(yaml.SafeLoader):
    """Composes nodes; the values are made by `_scalar`, so none of PyYAML's YAML 1.1 constructors runs."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's name and type; filled by _CORE below
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not allowed; repeat the value"
        elif getattr(event, "tag", None) is not None:
            problem = "tags (!name) are not allowed"
        elif self.depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or `_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Write text of several lines as a block; with control characters in double quotes, the only style that keeps them."""
        style = '"' if not data.replace("\n", "").isprintable() else "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


_CORE = (
    ("tag:yaml.org,2002:null", r"|~|null|Null|NULL", ["", "~", "n", "N"]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("tag:yaml.org,2002:float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)
for _tag, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})\Z"), _first)


def _refusal(source: str, line: int, reason: str) -> ConfigError:
    return ConfigError([f"{source}:{line}: {one_line(reason)}" if source else f"not a YAML value: {one_line(reason)}"])


def _value(node: yaml.Node, at: At, document: Document, source: str) -> Value:
    document.lines[at] = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*at, index), document, source) for index, item in enumerate(node.value)]
    mapping: dict[str, Value] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        prefix = f"{source}:{line}: " if source else ""
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            written = quoted(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "(a list or mapping)"
            document.mistakes.append(f"{prefix}{dotted(at) or 'recipe'}: key {written} is not text; put it in quotes")
            continue
        if key in mapping:
            first = document.lines[(*at, key)]
            document.mistakes.append(f"{prefix}{dotted((*at, key))}: written twice, first in line {first}")
            continue
        mapping[key] = _value(value_node, (*at, key), document, source)
        document.lines[(*at, key)] = line
    return mapping


def _scalar(node: yaml.ScalarNode) -> Value:
    text = str(node.value)
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if text[:2] in ("0o", "0x"):
            return int(text, 0)
        case "int" if len(text) < MAX_INT_BITS:
            return int(text)
        case "int" | "float":
            return float(re.sub(r"\.(?=[inIN])", "", text))
        case _:
            return text


def _plain(value: object, at: At, refused: dict[At, str]) -> Value:
    reason = "not data that a recipe can hold; use text, numbers, true, false, null, lists and mappings"
    match value:
        case _ if len(at) > MAX_DEPTH:
            reason = f"nested deeper than {MAX_DEPTH} levels"
        case None | bool():
            return value
        case int() if value.bit_length() > MAX_INT_BITS:
            reason = "must be a finite number"
        case float() if not math.isfinite(value):
            reason = "must be a finite number"
        case str() if not _encodable(value):
            reason = "half of a surrogate pair is not text"
        case int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(item, (*at, index), refused) for index, item in enumerate(value)]
        case Mapping():
            for key in value:
                if not isinstance(key, str) or not _encodable(key):
                    refused[(*at, str(key))] = "the key is not text; put it in quotes"
            return {k: _plain(v, (*at, k), refused) for k, v in value.items() if isinstance(k, str) and _encodable(k)}
    refused[at] = reason
    return None


def _encodable(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)
