"""Searches for settings by a word that is not a full path: a synonym, another system's name, or the last part of a path.

Used by `lockstep config help WORD` and for unknown command-line options.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from lockstep.config.help import groups, setting_line
from lockstep.config.mistakes import ELSEWHERE

WORDS: Mapping[str, list[str]] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
"""Common words of reinforcement learning, each with the settings that it means, the nearest first."""
SHOWN = 12


def find(word: str) -> list[str]:
    """Return help lines of the settings that a word means, under a line that says so. Empty if nothing is like it."""
    lines: dict[str, str] = {}
    for group in groups():
        for one in group.settings:
            lines.setdefault(one.path, setting_line(one))
    meant = [path for path in dict.fromkeys(_meant(word, list(lines))) if path in lines][:SHOWN]
    if not meant:
        return []
    sections = dict.fromkeys(path.rpartition(".")[0] for path in meant)
    more = ", ".join(f"lockstep config help {name}" for name in sections if name)
    head = f"no setting starts with {word!r}; these are nearest" + (f" (all of a section: {more})" if more else "")
    return [f"{head}:", *(lines[path] for path in meant)]


def nearest(word: str) -> list[str]:
    """Return paths that a word means, then those that are spelled like it, each once."""
    known = {name for group in groups() for name in (group.path, *(one.path for one in group.settings)) if name}
    meant = [path for path in _meant(word, sorted(known)) if path in known]
    return list(dict.fromkeys([*meant, *difflib.get_close_matches(word, sorted(known), n=3)]))[:3]


def _meant(word: str, paths: list[str]) -> Iterator[str]:
    """Yield synonyms, settings with this name in other systems, those that end with it, and those in such a section."""
    plain = word.lower().replace("_", " ").strip()
    for known in (plain, plain.removesuffix("s"), plain.replace(" ", "")):
        yield from WORDS.get(known, ())
    leaf = plain.replace(" ", "_").replace("-", "_").rpartition(".")[2]
    yield from ELSEWHERE.get(leaf, ())
    yield from sorted((path for path in paths if path.rpartition(".")[2] == leaf), key=_order)
    yield from (path for path in paths if leaf in path.split("."))


def _order(path: str) -> tuple[int, bool]:
    """Order shallow settings first, and of those the optimizer's."""
    return path.count("."), not path.startswith("optimizer.")
