"""Reads settings from a shell script's commands, without running it: its variables, their defaults and sums are worked out.

What only a run of the script would tell (`$1`, `$(date)`, a variable of the caller) stays in the value, and UNRESOLVED finds it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping

import yaml

from lockstep.config.section import Json

UNRESOLVED = re.compile(r"\$\{[^}]*\}?|\$\([^)]*\)?|\$\w+")
"""A variable or command in a value whose text the file does not have."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$(\w+)")
"""Its default has no variable in it: the innermost of nested ones."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?[A-Za-z_]\w*\+?=\(")
_COMMAND = re.compile(
    r"""(?:(?<!\S)\#.*               # a comment
    |"(?:\\.|[^"\\])*"|'[^']*'|\\.   # a quotation
    |\$\((?!\()(?:[^()]|\([^()]*\))*\)|[<>]&|&>
    |[^;&|])+""",
    re.DOTALL | re.VERBOSE,
)
_RUN = re.compile(r"\$\((?!\()\s*([^\s()]*)(?:[^()]|\([^()]*\))*\)")
_BEFORE = ("export", "declare", "local", "readonly", "env", "then", "else", "do")
"""Words that may stand before variables that are set."""
_OTHERS = re.compile(r"\$[@*]|\$\{\w+\[[@*]\]\}")
"""Options of the caller, or of an array, whose own lines are read."""
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
_HIDDEN, _SHOWN = str.maketrans("${}", "\0\1\2"), str.maketrans("\0\1\2", "${}")


def shell_settings(text: str) -> Iterator[tuple[str, Json]]:
    """Yield overrides (a.b=v, +a.b=v) and options (--a v) of a script's commands, its variables put in."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    variables = {"HOME": "~"}
    within = False  # an array of options
    for line in joined.splitlines():
        if array := _ARRAY.match(line):
            line, within = line[array.end() :], True
        if within:
            ended = line.count(")") > line.count("(")
            line = line.rstrip().removesuffix(")") if ended else line
            yield from _options(_words(_filled(line, variables)))
            within = not ended
            continue
        for command in _COMMAND.findall(line):
            words = _without_files(_words(_filled(command, variables)))
            while words and (words[0] in _BEFORE or _ASSIGNED.fullmatch(words[0])):
                if assigned := _ASSIGNED.fullmatch(words.pop(0)):
                    variables[assigned[1]] = assigned[2]
            yield from _options(words)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation over several lines
        return line.split()


def _without_files(words: list[str]) -> list[str]:
    """Leave out where a command writes its output: 2>&1, > log.txt."""
    kept: list[str] = []
    follows = False
    for word in words:
        if follows:
            follows = False
        elif redirection := re.match(r"(?:\d?>>?|&>>?)(.*)", word):
            follows = not redirection[1]
        else:
            kept.append(word)
    return kept


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Put in variables that the script itself sets, and work out $((a * b)). Others stay as they are."""

    def value(match: re.Match[str]) -> str:
        found = variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
        return found.strip("\"'").translate(_HIDDEN)  # hidden: what is put in is not looked through again

    def result(match: re.Match[str]) -> str:
        bare = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            return str(_arithmetic(ast.parse(bare.strip(), mode="eval").body))
        except (SyntaxError, ValueError):
            return re.sub(r"\s+", "", match[0])

    text = _RUN.sub(lambda match: f"\0({match[1]})", text)
    before = ""
    while text != before:
        before, text = text, _VARIABLE.sub(value, text)
    return re.sub(r"\$\(\((.*?)\)\)", result, text).translate(_SHOWN)


def _arithmetic(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _arithmetic(left) * _arithmetic(right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _arithmetic(left) + _arithmetic(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _arithmetic(left) - _arithmetic(right)
    raise ValueError("not whole numbers with + - *")


def _options(words: list[str]) -> Iterator[tuple[str, Json]]:
    words = [word for word in words if not _OTHERS.fullmatch(word)]
    # The script ends a launcher's options.
    launched = any(word.rpartition("/")[2] in _LAUNCHERS for word in words)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if override := re.fullmatch(r"(?:--(?=[\w.-]+=)|\+{1,2})?([A-Za-z_][\w.-]*)=(.*)", word, re.DOTALL):
            dashed = word.startswith("--")
            if dashed or "-" not in override[1]:
                yield override[1].replace("-", "_") if dashed else override[1], value_of(override[2])
        elif word.startswith("--") and len(word) > 2:
            values = []
            while position < len(words) and (not words[position].startswith("-") or _NUMBER.fullmatch(words[position])):
                if launched and words[position].endswith(".py"):
                    launched = False
                    break
                values.append(value_of(words[position]))
                position += 1
            name = word[2:].replace("-", "_")
            yield name, True if not values else values[0] if len(values) == 1 else list(values)


def value_of(text: str) -> Json:
    """Return the value that a text is in YAML; a date is a text."""
    try:
        found = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text
    if isinstance(found, str):
        return number_of(found)
    return found if found is None or isinstance(found, bool | int | float | list | dict) else text


def number_of(text: str) -> Json:
    """Return 1e-6, which YAML reads as a text, as the number that it is."""
    return float(text) if _NUMBER.fullmatch(text) and not text.isdecimal() else text
