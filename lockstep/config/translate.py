"""Translates settings of verl, OpenRLHF and TRL into a recipe by foreign_settings.yaml, and reports what became of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

from lockstep.config.foreign_settings import SYSTEMS, Entry, Foreign, Missing, System, entry_of, table
from lockstep.config.foreign_shell import UNRESOLVED
from lockstep.config.load import load_mapping
from lockstep.config.schema import Recipe
from lockstep.config.section import Json
from lockstep.config.text import quoted, to_yaml, value_at
from lockstep.config.translate_rules import RULES
from lockstep.errors import ConfigError
from lockstep.text import did_you_mean

Fate: TypeAlias = Literal[
    "translated", "default there", "nothing to set", "no counterpart", "no effect there", "unknown"
]
FATES: Mapping[Fate, str] = {
    "translated": "translated",
    "default there": "not in the file: defaults there that differ from those here",
    "nothing to set": "nothing to set here",
    "no counterpart": "without a counterpart",
    "no effect there": "without effect there: left out",
    "unknown": "unknown: not in the table, left out",
}


KINDS: Mapping[str, str] = {"adapter": "lora", "task": "file", "placement": "colocated"}
"""Variants of sections that any setting of theirs asks for."""


@dataclass(frozen=True, slots=True)
class Field:
    """One setting there, and what became of it."""

    name: str
    value: Json
    fate: Fate
    said: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A recipe and the account of every setting."""

    tree: dict[str, Any]
    fields: tuple[Field, ...]

    def text(self) -> str:
        """Return the recipe as YAML, and below it as comments what became of each setting."""
        lines = [to_yaml(self.tree)]
        for fate, title in FATES.items():
            rows = [one for one in self.fields if one.fate == fate]
            lines += (
                [f"# {title}:", *(f"#   {one.name} = {quoted(one.value)}: {one.said}" for one in rows)] if rows else []
            )
        return "\n".join(lines) + "\n"


def translate(system: System, settings: Mapping[str, Json], ranks: int | None = None) -> Translation:
    """Translate the settings of a file. Raises ConfigError if the recipe that follows from them is none.

    `ranks` processes train together (TRL); none takes what the file says of them.
    """
    given: dict[str, Json] = {}
    spelled: dict[str, str] = {}
    fields: list[Field] = []
    for name, value in settings.items():
        try:
            entry = entry_of(system, name)
        except KeyError:
            fields.append(Field(name, value, "unknown", _hint(system, name)))
            continue
        key = name if entry.name.startswith("?") or "*" in entry.name else entry.name
        if key in given and given[key] != value:
            said = f"{name} is the same setting, and its value was taken"
            fields.append(Field(spelled[key], given[key], "no counterpart", said))
        given[key], spelled[key] = value, name
    foreign = Foreign(system, given, ranks)
    tree: dict[str, Any] = {}
    defaults: list[tuple[Field, dict[str, Json]]] = []
    made: list[tuple[Field, dict[str, Json]]] = []
    silent = (entry.name for entry in table()[system] if "there" in entry.model_fields_set and entry.name not in given)
    for key in [*silent, *given]:
        entry = entry_of(system, key)
        field, found = _translated(foreign, entry, key)
        for path, value in found.items():
            _put(tree, path, value)
        if key in given:
            field = replace(field, name=spelled[key])
            made = [(_overwritten(one, theirs, field.name, found), theirs) for one, theirs in made]
            made.append((field, found))
        elif field.fate == "no counterpart":
            fields.append(field)
        elif found:
            defaults.append((replace(field, fate="default there"), found))
    fields += [field for field, _ in made]
    for section, kind in KINDS.items():
        if section in tree:
            tree[section].setdefault("kind", kind)
    recipe = _checked(tree, fields, f"the recipe translated from {SYSTEMS[system]}")
    kept = _telling(tree, recipe, [found for _, found in defaults])
    fields += [field for field, found in defaults if found in kept]
    tree = _without(tree, (path for _, found in defaults if found not in kept for path in found))
    order = list(Recipe.model_fields)
    return Translation(dict(sorted(tree.items(), key=lambda item: order.index(item[0]))), tuple(fields))


def _overwritten(field: Field, ours: Mapping[str, Json], later: str, theirs: Mapping[str, Json]) -> Field:
    """Return a field with a note of those of its settings that a later one sets to another value."""
    paths = [path for path, value in ours.items() if path in theirs and theirs[path] != value]
    if not paths:
        return field
    said = f"{later} sets {', '.join(paths)}, too, and its value was taken"
    if len(paths) == len(ours):
        return replace(field, fate="no counterpart", said=said)
    return replace(field, said=f"{field.said}; but {said}")


def _checked(tree: dict[str, Any], fields: Iterable[Field], where: str) -> Recipe:
    """Return the recipe. Raises ConfigError, which also says what has no counterpart: it may be why there is none."""
    try:
        return load_mapping(tree, where=where)
    except ConfigError as error:
        lost = [f"{one.name}={quoted(one.value)}: {one.said}" for one in fields if one.fate == "no counterpart"]
        raise ConfigError([*error.mistakes, *lost], where=error.where, fix=error.fix) from None


def _without(tree: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the tree without some settings, and without sections that are then empty."""
    gone = set(paths)

    def kept(section: Mapping[str, Any], at: str) -> dict[str, Any]:
        inner = {name: kept(one, f"{at}{name}.") if isinstance(one, dict) else one for name, one in section.items()}
        return {name: one for name, one in inner.items() if f"{at}{name}" not in gone and one != {}}

    return kept(tree, "")


def _telling(tree: Mapping[str, Any], recipe: Recipe, defaults: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return those defaults of the other system without which the recipe would be another."""
    full = recipe.model_dump(mode="json")
    try:
        bare = load_mapping(_without(tree, chain(*defaults))).model_dump(mode="json")
        kept = [found for found in defaults if any(value_at(full, path) != value_at(bare, path) for path in found)]
        rest = chain(*(found for found in defaults if found not in kept))
        return kept if load_mapping(_without(tree, rest)) == recipe else list(defaults)
    except ConfigError:
        return list(defaults)


def _translated(foreign: Foreign, entry: Entry, name: str) -> tuple[Field, dict[str, Json]]:
    """Return what became of one setting, and the settings here that follow from it."""
    value = foreign[name]
    if entry.idle:
        return Field(name, value, "no effect there", entry.idle), {}
    for other, allowed in entry.when.items():
        if not _holds(foreign[other], allowed):
            return Field(name, value, "no effect there", f"{other} is {quoted(foreign[other])}"), {}
    for other, reason in entry.unless.items():
        if foreign[other] is True:
            return Field(name, value, "no counterpart", reason), {}
    try:
        found = _found(foreign, entry, value)
        if found and (unknown := UNRESOLVED.search(f"{value} {list(found.values())}")):
            raise Missing(f"the file does not say what {unknown[0]} is: write the value in its place")
    except Missing as missing:
        return Field(name, value, "no counterpart", str(missing)), {}
    if found:
        ours = ", ".join(f"{path}={quoted(one)}" for path, one in found.items())
        return Field(name, value, "translated", f"{ours} ({entry.unit})" if entry.unit else ours), found
    return Field(name, value, "nothing to set", entry.here or entry.unit or "as it is here"), {}


def _found(foreign: Foreign, entry: Entry, value: Json) -> dict[str, Json]:
    if entry.rule:
        return RULES[entry.rule](foreign, value)
    key = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if key in entry.values:
        meant = entry.values[key]
        if isinstance(meant, str) and meant.startswith("!"):
            raise Missing(meant[1:])
        return dict(meant) if isinstance(meant, dict) else {entry.ours: meant}
    if entry.missing:
        raise Missing(entry.missing)
    if entry.values and isinstance(value, str):
        raise Missing(f"known are {', '.join(entry.values)}")
    if not entry.ours or value is None:
        return {}
    if entry.times:
        factors = [sum(map(foreign.number, [part] if isinstance(part, str) else part)) for part in entry.times]
        value = round(foreign.number(entry.name) * math.prod(factors))
    return {entry.ours: value}


def _holds(value: Json, allowed: list[Json] | Literal["set", "positive"]) -> bool:
    match allowed:
        case "set":
            return value is not None
        case "positive":
            return isinstance(value, int | float) and value > 0
        case _:
            return value in allowed


def _put(tree: dict[str, Any], path: str, value: Json) -> None:
    section, _, rest = path.partition(".")
    if rest:
        inner = tree.setdefault(section, {})
        _put(inner, rest, value)
    elif isinstance(value, dict) and isinstance(tree.get(section), dict):
        tree[section] |= value
    else:
        tree[section] = value


def _hint(system: System, name: str) -> str:
    names = [known for entry in table()[system] for known in (entry.name, *entry.old) if known[0] != "?"]
    return did_you_mean(name, names, f"no setting of {SYSTEMS[system]} that is known here", cutoff=0.8)
