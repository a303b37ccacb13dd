"""Turns validation errors into one line for each mistake in a recipe: path, value, reason, nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from lockstep.config.foreign_settings import SYSTEMS, table
from lockstep.config.help import groups, item_annotation, variants
from lockstep.config.schema import TAG, Recipe, Section
from lockstep.config.text import At, Value, dotted, one_line, quoted
from lockstep.text import hide_secrets, secret_in

OURS: Mapping[str, tuple[str, ...]] = {
    ours: tuple(names)
    for ours, names in yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_text("utf-8")).items()
}
"""Our settings, and the nearest names in other systems (TRL, verl, OpenRLHF, slime, prime-rl)."""

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    name: tuple(ours for ours, names in OURS.items() if name in names) for names in OURS.values() for name in names
}
"""The settings of ours that a name of another system may mean."""

MEANT: Mapping[str, str] = {"gpu": "cuda"}
"""Values that people write, and ours: by spelling alone another one is nearer (cpu)."""

SHOWN = 100
"""Number of mistakes that are explained; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A recipe that did not validate."""

    model: type[Recipe]
    given: Mapping[str, object]
    """Recipe as it was written."""
    data: Mapping[str, Value]
    """Recipe as it was validated: JSON data, every default `kind` filled in, null for refused values."""
    refused: Mapping[At, str]
    """Values that are not data at all, with the reason."""
    origins: Mapping[At, str]
    """Place of each value: "file:line"; "" for the command line."""


@dataclass(frozen=True, slots=True)
class _Mistake:
    at: At
    reason: str
    in_branch: bool = False
    """True for a mistake in one alternative of a value that may have several types."""
    shows_value: bool = True


def explain(attempt: Attempt, error: ValidationError | None) -> list[str]:
    """Return one line for each mistake. Example: "r.yaml:3: optimizer.lrr=1: no such setting; did you mean optimizer.lr?"."""
    details = error.errors(include_url=False) if error else []
    found = [_mistake(attempt, detail) for detail in details[:SHOWN] if detail["loc"]]
    paths = {mistake.at for mistake in found}
    grouped = {at: [_Mistake(at, reason)] for at, reason in attempt.refused.items()}
    for mistake in found:
        vague = mistake.in_branch and any(at != mistake.at and at[: len(mistake.at)] == mistake.at for at in paths)
        if mistake.at not in attempt.refused and not vague:
            grouped.setdefault(mistake.at, []).append(mistake)
    lines = [_line(attempt, mistakes) for mistakes in grouped.values()]
    lines += [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    lines += _broken_rules(attempt, {str(at[0]) for at in (*attempt.refused, *(d["loc"] for d in details if d["loc"]))})
    return lines or [one_line(detail["msg"]) for detail in details]


def secrets(attempt: Attempt) -> list[str]:
    """Return one line for each address that holds what looks like a secret: recipes are stored, shown and passed on."""
    return [
        f"{_prefix(attempt, at)}{dotted(at)}: {name} in an address looks like a secret, and a recipe is stored and shown; "
        "take it out, and give it as an environment variable (a judge's key_env names one)"
        for at, name in _addresses(attempt.data, ())
    ]


def _addresses(value: object, at: At) -> Iterator[tuple[At, str]]:
    if isinstance(value, str) and (name := secret_in(value)):
        yield at, name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _addresses(item, (*at, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _addresses(item, (*at, index))


def _line(attempt: Attempt, mistakes: list[_Mistake]) -> str:
    at = mistakes[0].at
    reason = " or ".join(dict.fromkeys(mistake.reason for mistake in mistakes))
    found, value = lookup(attempt.given, at)
    value = hide_secrets(value) if isinstance(value, str) else value
    shown = f"={quoted(value)}" if found and mistakes[0].shows_value else ""
    return f"{_prefix(attempt, at)}{dotted(at)}{shown}: {reason}"


def _prefix(attempt: Attempt, at: At) -> str:
    for length in range(len(at), 0, -1):
        if at[:length] in attempt.origins:
            return f"{attempt.origins[at[:length]]}: " if attempt.origins[at[:length]] else ""
    return ""


def lookup(tree: object, at: At) -> tuple[bool, object]:
    """Return whether a value is there, and the value; a number in a path may be written as text."""
    for part in at:
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list | tuple) and str(part).isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return False, None
    return True, tree


def _mistake(attempt: Attempt, detail: ErrorDetails) -> _Mistake:
    """Follow pydantic's location through schema and tree, without parts that the recipe lacks (variant tags, branch labels)."""
    at: At = ()
    annotation: Any = attempt.model
    section: type[Section] | None = None
    in_branch = False
    for part in detail["loc"]:
        options = variants(annotation)
        if len(options) > 1:
            annotation = options[str(part)]
        elif options:
            (section,) = options.values()
            field = section.model_fields.get(str(part))
            annotation, at = (field.annotation if field else None), (*at, part)
        elif lookup(attempt.given, (*at, part))[0]:
            annotation, section, at = item_annotation(annotation), None, (*at, part)
        else:
            in_branch = isinstance(part, str) and part != "[key]"
    if detail["type"] == "extra_forbidden":
        foreign = "" if at[-1] in ELSEWHERE else _foreign(at, lookup(attempt.given, at)[1])
        return _Mistake(at, foreign or _no_such(attempt.model, at, section))
    value = lookup(attempt.given, at)[1]
    keys = [str(key) for key in value] if isinstance(value, Mapping) else []
    if detail["type"] == "union_tag_not_found" and (near := _close(TAG, keys)):
        return _Mistake((*at, near[0]), f"no such setting; did you mean {dotted((*at, TAG))}?")
    if detail["type"].startswith("union_tag"):
        at = (*at, TAG)
    reason = _reason(detail, annotation, lookup(attempt.given, at)[1])
    return _Mistake(at, reason, in_branch, shows_value=detail["type"] != "value_error")


def _reason(detail: ErrorDetails, annotation: Any, value: object) -> str:
    context = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return "required" if isinstance(detail["loc"][-1], str) else "has too few items"
        case "union_tag_not_found":
            return "required"
        case "value_error":
            return one_line(str(context["error"]))
        case "union_tag_invalid" | "literal_error":
            expected = str(context.get("expected_tags", context.get("expected"))).replace(" or ", ", ")
            choices = re.findall(r"[^', ]+", expected)
            is_key = detail["loc"][-1] == "[key]"
            meant = MEANT.get(_folded(value), "")
            near = [meant] if meant in choices else _close(detail["input"] if is_key else value, choices, 0.5)
            return f"{'the key ' if is_key else ''}must be {' or '.join(choices)}{_did_you_mean(near)}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "must be a whole number"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
        case "string_type":
            quote = isinstance(value, int | float)
            return f"must be text; put it in quotes: '\"{quoted(value)}\"'" if quote else "must be text"
        case "list_type" | "tuple_type":
            return "must be a list" + (f": write [{value}]" if isinstance(value, str) and value.isalnum() else "")
        case "dict_type" | "model_type" | "model_attributes_type":
            kinds = [kind for kind in variants(annotation) if kind]
            if isinstance(value, str) and value.endswith(".py") and "python" in kinds:
                name = "grade" if detail["loc"][-1] == "verifier" else "NAME"
                return f"must name the function or class in that file: {value}:{name}"
            if isinstance(value, str) and kinds:
                return f"must be {' or '.join(kinds)}{_did_you_mean(_close(value, kinds, 0.5))}"
            return "must be a mapping of settings"
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            sign = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
            return "must be " + " and ".join(f"{sign[key]} {bound:.12g}" for key, bound in context.items())
        case "string_pattern_mismatch":
            if "\\.py:" in context["pattern"]:
                return "must be file.py:NAME, with the name of the function or class in that file"
            return f"must match {context['pattern']}"
        case "string_too_short" | "too_short":
            return "must not be empty"
        case "too_long":
            return f"must have {context['max_length']} items, has {context['actual_length']}"
        case _:
            return one_line(detail["msg"][0].lower() + detail["msg"][1:])


def _foreign(at: At, value: object) -> str:
    """Return the reason for a setting by its whole name in another system, or for a mapping of such; "" if it is none."""
    meant = [text for name in _leaves(dotted(at), value) if (text := _meaning(name))]
    if not meant:
        return ""
    more = f"; and {len(meant) - 3} more: `lockstep config translate` takes the whole file" if len(meant) > 3 else ""
    return f"no such setting; {'; '.join(meant[:3])}{more}"


def _leaves(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name


def _meaning(name: str) -> str:
    """Return what a dotted name means, whole (actor_rollout_ref.rollout.n) or its end (rollout.n); "" if it is not known."""
    if "." not in name:  # plain names: aliases.yaml
        return ""
    named = [(s, one, known) for s, entries in table().items() for one in entries for known in (one.name, *one.old)]
    whole = [(system, entry) for system, entry, known in named if known == name]
    ends = [(system, entry) for system, entry, known in named if known.endswith(f".{name}")]
    for system, entry in [*whole, *ends][:1]:
        if entry.ours:
            return f"{name} of {SYSTEMS[system]} is {entry.ours} here" + (f" ({entry.unit})" if entry.unit else "")
        if why := entry.missing or entry.here:
            return f"{name} of {SYSTEMS[system]} has no counterpart: {why}"
    return ""


def _no_such(model: type[Recipe], at: At, section: type[Section] | None) -> str:
    """Return the reason with near names: ours for another system's, those beside it, the same name, similar names."""
    leaf, parent = str(at[-1]), at[:-1]
    names = list(section.model_fields) if section else []
    beside = [dotted((*parent, name)) for name in _close(leaf, names)]
    others = [g.title for g in groups(model) if g.variant and dotted(at) in (s.path for s in g.settings)]
    if others and section:
        return f"no such setting with {TAG}: {section.model_fields[TAG].default}; it belongs to {' or '.join(others)}"
    alias, same, similar = _elsewhere(dotted(at), model)
    near = list(dict.fromkeys([*alias, *beside, *same])) or similar
    if not near and names and len(names) <= 12:
        return f"no such setting; known here: {', '.join(names)}"
    return "no such setting" + _did_you_mean(near)


def _elsewhere(path: str, model: type[Recipe]) -> tuple[list[str], list[str], list[str]]:
    """Return settings with this name in other systems, settings and sections of the same name, and those of a similar one."""
    leaf = path.rpartition(".")[2]
    known = [*(s.path for g in groups(model) for s in g.settings), *(g.path for g in groups(model) if g.path)]
    leaves = {name: name.rpartition(".")[2] for name in known if name != path and not name.endswith(f".{TAG}")}
    alias = [ours for ours in ELSEWHERE.get(leaf, ()) if ours in known]
    same = sorted((name for name, last in leaves.items() if last == leaf), key=lambda name: name.count("."))
    near = _close(leaf, sorted(set(leaves.values())), 0.8)
    return alias, same, [*_close(path, list(leaves), 0.75), *(name for name, last in leaves.items() if last in near)]


def _close(word: object, names: list[str], cutoff: float = 0.6) -> list[str]:
    plain = {_folded(name): name for name in names}
    return [plain[near] for near in difflib.get_close_matches(_folded(word), list(plain), n=2, cutoff=cutoff)]


def _folded(word: object) -> str:
    return str(word).lower().replace("-", "_")


def _did_you_mean(names: list[str]) -> str:
    return f"; did you mean {' or '.join(list(dict.fromkeys(names))[:3])}?" if names else ""


def _broken_rules(attempt: Attempt, bad: set[str]) -> Iterator[str]:
    """Yield every rule between settings that does not hold; rules that read a section with a mistake are skipped.

    pydantic itself stops at the first rule, and runs none while a field is wrong.
    """
    model = attempt.model
    fields: dict[str, Any] = {n: (field.annotation, field) for n, field in model.model_fields.items() if n not in bad}
    good = {name: value for name, value in attempt.data.items() if name in fields}
    recipe = model.model_construct(**dict(create_model("Parts", __base__=Section, **fields).model_validate(good)))
    for name in bad & recipe.__dict__.keys():
        del recipe.__dict__[name]
    for name, rule in model.__pydantic_decorators__.model_validators.items():
        try:
            if rule.info.mode == "after":
                getattr(recipe, name)()
        except ValueError as error:
            named = re.split(r"[ :=]", str(error), maxsplit=1)[0]  # a message begins with the path of a setting
            yield f"{_prefix(attempt, tuple(named.split('.')))}{one_line(str(error))}"
        except AttributeError:
            if not bad:
                raise
