"""Lists all settings with their help: for `lockstep config help`, docs/settings.md, editors, and the nearest names in errors."""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Tag
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from lockstep.config.schema import TAG, Recipe, Section
from lockstep.config.section import meanings

ITEM = "N"
"""Stands for the number of a list item in the path of a setting: eval.modes.N.name."""

SHORTHANDS = {"model": "path"}
"""A section that may be written as one text, and the setting which that text is."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Example: Setting("eval.every", "integer", "10", ">= 1", "Steps between evaluations; …")"""

    path: str
    type: str
    default: str
    """Default as JSON, or "required"."""
    allowed: str
    """Range or choices, "" if the type says it all."""
    help: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One variant of a section whose variants share their settings, with the defaults that are its own.

    Example: Kind("dr_grpo", "Dr.GRPO (arXiv 2503.20783): …", ("advantage.divide_by_std=false", …))
    """

    name: str
    help: str
    defaults: tuple[str, ...]
    """Defaults of its own, as overrides below the section; empty if all are the shared ones."""


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of one section, of one variant of it, or those that all its variants share."""

    path: str
    """"" for the top level."""
    variant: str
    """The value of `kind` that chooses it; "" for a section without variants, and for what all variants share."""
    help: str
    settings: tuple[Setting, ...]
    kinds: tuple[Kind, ...] = ()
    """The variants that share these settings; empty for any other group."""

    @property
    def title(self) -> str:
        named = self.variant if self.path.endswith(ITEM) else f"{TAG}: {self.variant}"  # entries of a list have no kind
        return f"{self.path} ({named})" if self.variant else self.path


def variants(annotation: Any) -> dict[str, type[Section]]:
    """Return the sections that a value may be: none for a plain value, {"": section}, or one for each `kind` or pydantic tag."""
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    tagged = {
        mark.tag: typing.get_args(option)[0]
        for option in options
        for mark in getattr(option, "__metadata__", ())
        if isinstance(mark, Tag)
    }
    if tagged:
        return tagged
    sections = [option for option in options if inspect.isclass(option) and issubclass(option, Section)]
    if len(sections) < 2:
        return {"": sections[0]} if sections else {}
    return {section.model_fields[TAG].default: section for section in sections}


def default_kind(field: FieldInfo) -> str:
    """Return a section's variant when `kind` is not given; "" where there are no variants."""
    return getattr(field.get_default(call_default_factory=True), TAG, "") if len(variants(field.annotation)) > 1 else ""


def common_section(options: Mapping[str, type[Section]]) -> type[Section] | None:
    """Return the section whose settings all variants inherit, if there is one."""
    (first, *others) = options.values()
    bases = [base for base in first.__mro__[1:] if issubclass(base, Section) and base is not Section]
    return next((base for base in bases if all(issubclass(other, base) for other in others)), None)


def own_defaults(section: type[Section], base: type[Section]) -> dict[str, Any]:
    """Return the inherited settings of `section` whose defaults are not those of `base`, as a recipe would have them.

    Example: {"advantage": {"divide_by_std": False}, "aggregation": "seq-mean-token-sum-norm"}
    """
    found: dict[str, Any] = {}
    for name, field in base.model_fields.items():
        shared = field.get_default(call_default_factory=True)
        default = section.model_fields[name].get_default(call_default_factory=True)
        if default != shared:
            data = as_data(default)
            if isinstance(data, dict) and type(default) is type(shared):
                data.pop(TAG, None)
            found[name] = data
    return found


def as_data(default: Any) -> Any:
    """Return a default as JSON data; for a section its `kind`, if it has one, and the settings that differ from that kind's."""
    if not isinstance(default, Section):
        return to_jsonable_python(default)
    tag = {TAG: getattr(default, TAG)} if TAG in type(default).model_fields else {}
    return tag | default.model_dump(mode="json", exclude_defaults=True)


def item_annotation(annotation: Any) -> Any:
    """Return the type of a list's items; None if it is not a list."""
    (item, *_) = typing.get_args(annotation) if typing.get_origin(annotation) is list else (None,)
    return typing.get_args(item)[0] if typing.get_origin(item) is typing.Annotated else item


def item_section(annotation: Any) -> type[Section] | None:
    """Return the section that each item of a list is; None if it is not a section."""
    item = item_annotation(annotation)
    return item if inspect.isclass(item) and issubclass(item, Section) else None


@functools.cache
def groups(model: type[Section] = Recipe) -> tuple[Group, ...]:
    """Return every section in the order of the schema, each once."""
    found: dict[tuple[str, str], Group] = {}
    for group in _groups(model, "", "", model.__doc__ or "", frozenset()):
        found.setdefault((group.path, group.variant), group)
    return tuple(found.values())


def help_lines(prefix: str = "") -> list[str]:
    """Return one line for each setting whose path starts with `prefix`, under a line for its section. Empty if there is none.

    Columns: path, type, default, allowed, meaning. Settings that all kinds of a section share come once, then a line for each
    kind with the defaults of its own.
    """
    lines: list[str] = []
    for group in groups():
        chosen = [s for s in group.settings if s.path.startswith(prefix)]
        kinds = group.kinds if f"{group.path}.{TAG}".startswith(prefix) else ()
        if (chosen or kinds) and group.path:
            lines += ["", f"{group.title}: {group.help}"]
        lines += map(setting_line, chosen)
        lines += [
            f"    {group.path}.{TAG}={kind.name:<22} {kind.help} Its own defaults: {', '.join(kind.defaults) or 'none'}."
            for kind in kinds
        ]
    return lines[1:] if lines and not lines[0] else lines


def setting_line(one: Setting) -> str:
    """Return a setting as a line of help."""
    return f"  {one.path:<32} {one.type:<18} {one.default:<22} {one.allowed:<20} {one.help}".rstrip()


def schema_json() -> str:
    """Return the JSON schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for section in SHORTHANDS.keys() & schema["properties"].keys():
        schema["properties"][section] = {"anyOf": [{"type": "string"}, schema["properties"][section]]}
    return json.dumps(schema, indent=2, ensure_ascii=False)


def settings_markdown(model: type[Section] = Recipe) -> str:
    """Return docs/settings.md, which `python -m lockstep.config.help > docs/settings.md` updates."""
    lines = [
        "# Settings",
        "",
        "<!-- Generated from the modules of lockstep/config by `python -m lockstep.config.help`; do not edit. -->",
        "",
        "A recipe is a YAML file with the settings that differ from these defaults. On the command line a setting is written",
        "with its path: `lockstep train recipe.yaml optimizer.lr=3e-6`. Later arguments win. Where a section has variants,",
        "`kind` chooses one; choosing another drops the settings of the old one. An empty mapping (`task.settings={}`) goes",
        f"back to the defaults. `{ITEM}` stands for the number of a list item, from 0: `eval.modes.1.temperature=0.7`.",
        "`model: NAME` is short for `model.path`.",
    ]
    for group in groups(model):
        lines += ["", f"## {group.title or 'Top level'}", "", group.help]
        if group.settings:
            lines += ["", "| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
        lines += [_row(setting) for setting in group.settings]
        if group.kinds:
            lines += ["", "Every kind has these settings, with these defaults:", ""]
            lines += ["| kind | meaning | defaults of its own |", "|---|---|---|"]
        own = (", ".join(f"`{default}`" for default in kind.defaults) or "none" for kind in group.kinds)
        lines += [f"| `{kind.name}` | {kind.help} | {names} |" for kind, names in zip(group.kinds, own, strict=True)]
    return "\n".join(lines) + "\n"


def _groups(
    section: type[Section], path: str, variant: str, text: str, known: frozenset[str], place: Section | None = None
) -> Iterator[Group]:
    """Yield the group of a section without the settings in `known`, then those of the sections within.

    `place`: the default of the setting that holds the section; its values replace the section's own defaults.
    """
    properties = _properties(section)
    settings: list[Setting] = []
    inner: list[Group] = []
    for name, field in section.model_fields.items():
        at = f"{path}.{name}" if path else name
        children = variants(field.annotation)
        if name in known or (name == TAG and variant):
            continue
        own = meanings(section).get(name, "").replace("\n", " ")
        if not children or ("" in children and type(None) in typing.get_args(field.annotation)):
            settings.append(_setting(at, field, properties[name], own, place))
        if len(children) > 1:
            settings.append(
                Setting(f"{at}.{TAG}", "choice", default_kind(field), ", ".join(children), _meaning(field, own))
            )
        default = field.get_default(call_default_factory=True)
        if (
            "" in children
            and isinstance(default, Section)
            and any(f.is_required() for f in children[""].model_fields.values())
        ):
            inner += _groups(children[""], at, "", own, frozenset(), default)
        else:
            inner += _variant_groups(children, at)
        for kind, item in variants(item_annotation(field.annotation)).items():
            if TAG not in item.model_fields:  # those with a kind are listed where they stand alone
                inner += _groups(item, f"{at}.{ITEM}", kind, _text(item), frozenset())
    if settings or not known:
        yield Group(path, variant, text, tuple(settings))
    yield from inner


@functools.cache
def _properties(section: type[Section]) -> dict[str, Any]:
    """Return the JSON schemas of a section's settings: a section stands in many places, and each schema takes milliseconds."""
    return dict(section.model_json_schema()["properties"])


def _variant_groups(children: Mapping[str, type[Section]], at: str) -> Iterator[Group]:
    """Yield the groups of each variant; settings that all inherit come first, and once."""
    base = common_section(children) if len(children) > 1 else None
    known: frozenset[str] = frozenset()
    if base is not None:
        known = frozenset(base.model_fields)
        (shared, *inner) = _groups(base, at, "", _text(base), frozenset())
        kinds = tuple(
            Kind(kind, _text(child), _overrides(own_defaults(child, base))) for kind, child in children.items()
        )
        yield replace(shared, kinds=kinds)
        yield from inner
    for kind, child in children.items():
        yield from _groups(child, at, kind, _text(child), known)


def _overrides(tree: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Flatten {"loss": {"kind": "clip", "clip_high": 0.28}} to loss.kind=clip, loss.clip_high=0.28."""
    found: list[str] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found += _overrides(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}")
    return tuple(found)


def _meaning(field: FieldInfo, own: str) -> str:
    """Return the meaning of a setting's variants before its own; variants that share their settings are listed apart."""
    children = variants(field.annotation)
    kinds = "; ".join(f"{kind}: {_text(child).rstrip('.')}" for kind, child in children.items())
    common = common_section(children)
    if common is not None and all(
        child.model_fields.keys() - {TAG} <= common.model_fields.keys() for child in children.values()
    ):
        kinds = "A name for one choice of the settings below; what each chooses is listed there"
    return f"{kinds}. {own}" if own else kinds


def _text(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "").replace("\n", " ")


def _setting(
    path: str, field: FieldInfo, schema: dict[str, Any], meaning: str, place: Section | None = None
) -> Setting:
    default = "required"
    if place is not None or not field.is_required():
        value = getattr(place, path.rpartition(".")[2]) if place else field.get_default(call_default_factory=True)
        default = json.dumps(to_jsonable_python(value), ensure_ascii=False)
    return Setting(path, _type(schema), default, _allowed(schema), meaning)


def _type(schema: dict[str, Any]) -> str:
    options = schema.get("anyOf") or ([] if "discriminator" in schema else schema.get("oneOf"))
    if options:
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if "enum" in schema or "const" in schema:
        return "choice"
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])} {_type(schema['prefixItems'][0])}s"
        case "array":
            return f"list of {_type(schema['items'])}"
        case str() as name:
            return {"string": "text", "boolean": "true or false", "object": "mapping"}.get(name, name)
        case _:
            return "section" if "$ref" in schema else "any"


def _allowed(schema: dict[str, Any]) -> str:
    """Return the range or choices in words."""
    words: list[str] = []
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        words.append(", ".join(str(choice) for choice in choices))
    for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
        words += [f"{sign} {schema[key]}"] if key in schema else []
    words += [f"matches {schema['pattern']}"] if "pattern" in schema else []
    words += (
        ["not empty"] if schema.get("minLength") or (schema.get("minItems") and "prefixItems" not in schema) else []
    )
    for option in schema.get("anyOf", []):
        words += [_allowed(option)]
    for key, word in (("items", "each"), ("propertyNames", "keys")):
        words += [f"{word} {inner}"] if key in schema and (inner := _allowed(schema[key])) else []
    for inner in dict.fromkeys(_allowed(item) for item in schema.get("prefixItems", [])):
        words += [f"each {inner}"] if inner else []
    return ", ".join(word for word in words if word)


def _row(setting: Setting) -> str:
    default = setting.default if setting.default == "required" else f"`{setting.default}`"
    allowed = f"`{setting.allowed}`" if "matches " in setting.allowed else setting.allowed
    cells = (f"`{setting.path}`", setting.type, default, allowed, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(settings_markdown(), end="")
