"""Reads foreign_settings.yaml, the table that maps settings of verl, OpenRLHF and TRL to those of Lockstep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import yaml
from pydantic import Field, TypeAdapter

from lockstep.config.section import Json, Section
from lockstep.config.text import quoted

TABLE = Path(__file__).with_name("foreign_settings.yaml")
System: TypeAlias = Literal["verl", "openrlhf", "trl"]
SYSTEMS: Mapping[System, str] = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL"}


class Missing(Exception):
    """A value that has no counterpart here, and what to do."""


class Entry(Section):
    """One setting of another system, see the top of foreign_settings.yaml."""

    ours: str = ""
    there: Json = None
    values: dict[str, Json] = Field(default={})
    times: list[str | list[str]] = Field(default=[])
    when: dict[str, list[Json] | Literal["set", "positive"]] = Field(default={})
    unless: dict[str, str] = Field(default={})
    rule: str = ""
    unit: str = ""
    here: str = ""
    missing: str = ""
    idle: str = ""
    old: list[str] = Field(default=[])
    name: str = ""
    source: str = ""

    def is_named(self, name: str) -> bool:
        """Return whether a setting of this name is meant. A name may be a pattern, or after ? a regular expression."""
        if self.name.startswith("?"):
            return re.fullmatch(self.name[1:], name) is not None
        return name in (self.name, *self.old) or ("*" in self.name and fnmatchcase(name, self.name))


class Group(Section):
    """Settings that stand in the same file of their system."""

    source: str
    settings: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Foreign:
    """The settings of a file by the table's names, with the defaults of their system behind them."""

    system: System
    given: Mapping[str, Json]
    ranks: int | None = None
    """Processes that train together; none takes the number that the launcher was given."""

    @property
    def processes(self) -> int | None:
        """Processes that train together, if anything says it."""
        if self.ranks is not None or self.system != "trl":
            return self.ranks
        whole, each, nodes = self["num_processes"], self["nproc_per_node"], self["nnodes"]
        if isinstance(whole, int) or not isinstance(each, int):
            return whole if isinstance(whole, int) else None
        return each * (nodes if isinstance(nodes, int) else 1)

    def __getitem__(self, name: str) -> Json:
        return self.given[name] if name in self.given else entry_of(self.system, name).there

    def number(self, name: str) -> float:
        """Return a setting as a number; `ranks` is one. Raises Missing for any other value."""
        value = (self.processes or 1) if name == "ranks" else self[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Missing(f"{name} = {quoted(value)} is not a number: work the value out and set it")
        return value


@cache
def table() -> dict[System, list[Entry]]:
    """Return the entries of each system in the table's order."""
    read = TypeAdapter(dict[System, list[Group]]).validate_python(yaml.safe_load(TABLE.read_text("utf-8")))
    return {
        system: [
            entry.model_copy(update={"name": name, "source": group.source})
            for group in groups
            for name, entry in group.settings.items()
        ]
        for system, groups in read.items()
    }


def entry_of(system: System, name: str) -> Entry:
    """Return the entry of a setting: its own, else the first pattern that fits. Raises KeyError if there is none."""
    found = [entry for entry in table()[system] if entry.is_named(name)]
    exact = [entry for entry in found if name in (entry.name, *entry.old)]
    for entry in [*exact, *found]:
        return entry
    raise KeyError(name)
