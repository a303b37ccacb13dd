"""Loads recipe files and dotted overrides into a Recipe, or reports every mistake at once.

    load(["recipes/smoke.yaml", "optimizer.lr=3e-6", "adapter.kind=lora"])

Later arguments win. Choosing another `kind` drops the settings of the old variant. `{}` resets a section or mapping.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from lockstep.config.help import SHORTHANDS, as_data, default_kind, groups, item_section, variants
from lockstep.config.mistakes import Attempt, explain, lookup, secrets
from lockstep.config.run_names import fill_name
from lockstep.config.schema import TAG, NoTask, Recipe, Section
from lockstep.config.text import At, Document, Value, dotted, one_line, parse, plain, quoted, read, to_yaml
from lockstep.errors import ConfigError
from lockstep.text import hide_secrets

BUILT_IN = Path(__file__).parents[2] / "recipes"
"""Recipes of the repository, known by their name without .yaml."""

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w@-]+)*")


def load(args: Sequence[str | Recipe], model: type[Recipe] = Recipe) -> Recipe:
    """Merge recipe files, built-in recipe names, recipes and `a.b.c=value` overrides from left to right, then validate.

    Raises ConfigError with every mistake: one line each with file:line, path, value, reason and the nearest name.
    """
    draft = _Draft(model)
    for arg in args:
        draft.take(arg)
    words = [arg if isinstance(arg, str) else f"recipe {arg.name}" for arg in args]
    where = quoted(hide_secrets(" ".join(words)), limit=100).strip('"')
    if draft.unread:  # what else looks wrong may be right once the file is read
        raise ConfigError(draft.mistakes, where=where)
    return _validate(model, draft.tree, draft.origins, [*draft.mistakes, *draft.dropped()], where)


CACHES = {
    "LOCKSTEP_CACHE": "lockstep",
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables that name caches, and their folders in paths.cache."""


def load_run(args: Sequence[str]) -> Recipe:
    """Load a recipe that is to be trained, with its name filled in: see `require_task`. Its caches are used from now on."""
    recipe = require_task(load(args), where=quoted(" ".join(args), limit=100).strip('"'))
    use_paths(recipe)
    return fill_name(recipe)


def use_paths(recipe: Recipe) -> None:
    """Set the variables that name caches, before anything that reads them is imported; those that are set stay."""
    for name, folder in CACHES.items() if recipe.paths.cache else ():
        if not os.environ.get(name):
            os.environ[name] = str(Path(recipe.paths.cache or "").expanduser().absolute() / folder)


def require_task(recipe: Recipe, where: str = "") -> Recipe:
    """Return the recipe of a run that is to be trained. Raises ConfigError for rl without a task.

    Supervised fine-tuning without a task measures its validation loss alone.
    """
    if "task" in recipe.model_fields_set:
        return recipe
    if recipe.loop == "rl":
        raise ConfigError(
            ["task: required: the recipe does not say which questions to ask"],
            where=where,
            fix="set a task, such as task={kind: file, data: train.jsonl} or task=reasoning_gym; see `lockstep config help task`",
        )
    if "enabled" in recipe.eval.model_fields_set and recipe.eval.enabled:
        raise ConfigError(
            ["eval.enabled=true is not possible: the recipe has no task to evaluate on"],
            fix="set a task, or leave eval.enabled out: the validation loss is measured anyway",
        )
    quiet = recipe.eval.model_copy(update={"enabled": False})
    return recipe.model_copy(update={"task": NoTask(), "eval": quiet})


def load_mapping(tree: Mapping[str, object], model: type[Recipe] = Recipe, where: str = "") -> Recipe:
    """Read a recipe from parsed data, such as a saved one. `where` names it in messages. Raises ConfigError as `load` does."""
    return _validate(model, _expanded(dict(tree)), {}, [], where)


def layer_of(section: Section) -> dict[str, Any]:
    """Return the settings that were given, and the kind of each variant, as data that can be put on other settings."""
    given = section.model_fields_set | ({TAG} & type(section).model_fields.keys())
    return {name: _as_layer(getattr(section, name)) for name in type(section).model_fields if name in given}


def _as_layer(value: object) -> Any:
    if isinstance(value, Section):
        return layer_of(value)
    if isinstance(value, list | tuple):
        return [_as_layer(item) for item in value]
    return to_jsonable_python(value)


def dump(recipe: Recipe) -> str:
    """Return every value that a run uses, as a recipe that loads to an equal object."""
    return to_yaml(recipe.model_dump(mode="json"))


def built_in() -> dict[str, Path]:
    """Return the recipes that come with the repository, by name."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


@dataclass
class _Draft:
    """A recipe while its layers are merged."""

    model: type[Recipe]
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[At, str] = field(default_factory=dict)
    """Place of each value: "file:line"; "" for the command line."""
    mistakes: list[str] = field(default_factory=list)
    unread: bool = False
    """A recipe file could not be read."""
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)

    def take(self, arg: str | Recipe) -> None:
        """Put one argument on top."""
        if isinstance(arg, Recipe):
            self._put(layer_of(arg), {})
            return
        path: Path | None = None
        try:
            if path := _file(arg):
                self._take_file(path)
            else:
                self._take_override(arg)
        except ConfigError as error:
            self.unread |= path is not None or "=" not in arg
            self.mistakes += error.mistakes

    def dropped(self) -> list[str]:
        """Return a mistake for each override that a later argument discarded: none is ignored silently."""
        return [
            f"{one_line(arg)}: dropped by a later argument (another {TAG}, or a new value for its section); put it after that"
            for parts, arg in self.overrides.items()
            if not lookup(self.tree, parts)[0]
        ]

    def _take_file(self, path: Path) -> None:
        document = read(path)
        self.mistakes += document.mistakes
        if document.value is None:
            raise ConfigError([f"{path}:1: empty; a recipe has at least one setting"])
        if not isinstance(document.value, dict):
            line, kind = document.lines[()], "a list" if isinstance(document.value, list) else quoted(document.value)
            raise ConfigError([f"{path}:{line}: a recipe is a mapping of settings (name: value), this is {kind}"])
        self._put(document.value, {at: f"{path}:{line}" for at, line in document.lines.items()})

    def _take_override(self, arg: str) -> None:
        head, _, text = arg.partition("=")
        if not text.strip():
            raise ConfigError([f"{one_line(arg)}: no value; write null for none and '\"\"' for an empty text"])
        try:
            # A name may begin with a field, {task}-{lr}, which YAML would read as a mapping.
            document = Document(text, {(): 1}) if head == "name" and text.startswith("{") else parse(text, "")
        except ConfigError as error:
            raise ConfigError(
                [f"{one_line(arg)}: {error.mistakes[0]}; text with special characters needs quotes"]
            ) from None
        self.mistakes += [f"{one_line(arg)}: {mistake}" for mistake in document.mistakes]
        parts = tuple(head.split("."))
        layer: dict[str, Any] = {parts[-1]: document.value}
        for part in reversed(parts[:-1]):
            layer = {part: layer}
        at: At = tuple(int(part) if part.isdecimal() else part for part in parts)
        self._put(layer, {(*at, *inner): "" for inner in document.lines})
        self.overrides[parts] = arg

    def _put(self, layer: dict[str, Any], origins: dict[At, str]) -> None:
        expanded = _expanded(layer)
        for section, setting in SHORTHANDS.items():
            if expanded.get(section) != layer.get(section):
                origins[(section, setting)] = origins[(section,)]
        self.tree = _merge_section(self.tree, expanded, self.model, ())
        self.origins |= origins


def _file(arg: str) -> Path | None:
    """Return the file that an argument names; None if it is an override. Raises ConfigError if it is neither."""
    path = Path(arg)
    try:
        exists, folder = path.exists(), path.is_dir()
    except OSError:  # longer than a file name may be
        exists, folder = False, False
    if exists and not folder:
        return path
    head, is_override, _ = arg.partition("=")
    if is_override and _OVERRIDE.fullmatch(head):
        return None
    if arg in built_in():
        return built_in()[arg]
    if folder:
        raise ConfigError([f"{one_line(arg)}: a folder, not a recipe file"])
    if is_override and "/" not in head:
        raise ConfigError([f"{one_line(arg)}: not an override; write section.setting=value, without spaces"])
    raise ConfigError([f"{one_line(arg)}: no such recipe file or built-in recipe{_hint(arg)}"])


def _hint(arg: str) -> str:
    """Guess the meaning of an argument that is neither a file nor an override."""
    if any(setting.path == arg for group in groups() for setting in group.settings):
        return f"; to change a setting, write {arg}=VALUE"
    path = Path(arg)
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        beside = []
    if near := get_close_matches(path.name, beside, n=1) or get_close_matches(f"{path.name}.yaml", beside, n=1):
        return f"; did you mean {path.parent / near[0]}?"
    near = get_close_matches(path.name, [*built_in(), *(one.name for one in built_in().values())], n=1)
    return f"; did you mean {near[0].removesuffix('.yaml')}?" if near else f"; built-in are: {', '.join(built_in())}"


def _expanded(layer: dict[str, Any]) -> dict[str, Any]:
    """Expand `model: NAME` to `model: {path: NAME}`."""
    written = {section: layer.get(section) for section in SHORTHANDS}
    return layer | {section: {SHORTHANDS[section]: text} for section, text in written.items() if isinstance(text, str)}


def _merge_section(old: dict[str, Any], new: dict[str, Any], section: type[Section] | None, at: At) -> dict[str, Any]:
    fields = section.model_fields if section else {}
    return old | {name: _merge(old.get(name), value, fields.get(name), (*at, name)) for name, value in new.items()}


def _merge(old: Value, new: Value, info: FieldInfo | None, at: At) -> Value:
    """Put `new` on top of `old`: mappings key by key, a list item by its number, everything else replaced."""
    if info is not None:
        new = _written_out(new, info)
    if not isinstance(new, dict) or not new:
        return new
    if all(key.isdecimal() for key in new) and (items := _items(old, info)) is not None:
        return _merge_items(items, new, item_section(info.annotation) if info else None, at)
    options = variants(info.annotation) if info else {}
    base = old if isinstance(old, dict) else _from_path(old, options)
    if info is None or len(options) < 2:
        return _merge_section(base, new, options.get(""), at)
    before = base.get(TAG, default_kind(info))
    after = new.get(TAG, before)
    if before != after:  # the old variant's keys go; what it did not know may have been meant for the new one
        known = _chosen(options, before)
        base = {key: value for key, value in base.items() if known and key not in known.model_fields}
    return _merge_section(base, new, _chosen(options, after), at)


def _from_path(text: Value, options: Mapping[str, type[Section]]) -> dict[str, Any]:
    """Expand `algorithm.loss: my.py:fn` to the section that it is short for, so that its settings can be put on top."""
    if isinstance(text, str) and (short := getattr(options.get(""), "SHORT", None)):
        return {short: text}
    return {}


def _written_out(value: Value, info: FieldInfo) -> Value:
    """Expand a text to the settings that it is short for: `health.clipping: off`, `algorithm: dapo`, `eval.modes: greedy`."""
    if not isinstance(value, str):
        return value
    options = variants(info.annotation)
    if value in options and TAG in options[value].model_fields:
        return {TAG: value}
    if "python" in options and ".py:" in value:
        return {TAG: "python", "path": value}
    item = item_section(info.annotation)
    if item is not None and (named := getattr(item, "named", None)):
        modes = [named(word.strip()) for word in value.split(",")]
        return value if None in modes else modes
    short = getattr(options.get(""), "SHORT", None)
    has_others = isinstance(info.get_default(call_default_factory=True), Section)
    return {short: value} if short and has_others else value


def _merge_items(items: list[Value], new: dict[str, Value], section: type[Section] | None, at: At) -> list[Value]:
    merged = list(items)
    for key, value in new.items():
        index = int(key) if len(key) < 9 else len(items)
        if index >= len(items):
            raise ConfigError([f"{dotted((*at, key))}: no such item; {dotted(at)} has {len(items)}, counted from 0"])
        item = merged[index]
        if isinstance(value, dict) and isinstance(item, dict):
            value = _merge_section(item, value, section, (*at, key))
        merged[index] = value
    return merged


def _items(old: Value, info: FieldInfo | None) -> list[Value] | None:
    """Return the list whose items are meant: the one given so far, else the default of a setting that is a list."""
    if isinstance(old, list):
        return old
    if old is None and info and get_origin(info.annotation) in (list, tuple):
        return list(to_jsonable_python(info.get_default(call_default_factory=True)))
    return None


def _chosen(options: Mapping[str, type[Section]], kind: object) -> type[Section] | None:
    return options.get(kind) if isinstance(kind, str) else None


def _with_kinds(tree: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Fill in what the place of a section says where the recipe is silent.

    Its `kind`, so that errors are those of one variant; and other defaults of the place that are not the section's own:
    `algorithm: {kind: dapo, loss: {clip_low: 0.1}}` keeps DAPO's clip_high.
    """
    fields = section.model_fields
    return {name: _with_kind(value, fields[name]) if name in fields else value for name, value in tree.items()}


def _with_kind(value: Any, info: FieldInfo) -> Any:
    if isinstance(value, list) and (item := item_section(info.annotation)):
        return [_with_kinds(entry, item) if isinstance(entry, dict) else entry for entry in value]
    if not isinstance(value, dict):
        return value
    options = variants(info.annotation)
    if kind := default_kind(info):
        value = {TAG: kind} | value
    section = _chosen(options, value.get(TAG)) if len(options) > 1 else options.get("")
    default = info.get_default(call_default_factory=True)
    if type(default) is section:
        value = as_data(default) | value
    return _with_kinds(value, section) if section else value


def _validate(
    model: type[Recipe], tree: dict[str, Any], origins: dict[At, str], mistakes: list[str], where: str
) -> Recipe:
    plain_tree, refused = plain(tree)
    data = _with_kinds(plain_tree, model) if isinstance(plain_tree, dict) else {}
    attempt = Attempt(model, tree, data, refused, origins)
    mistakes = [hide_secrets(line) for line in mistakes]
    try:
        # as JSON, because strict JSON is what a recipe means: no number for a text, but a list for a tuple
        recipe = model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError([*mistakes, *explain(attempt, error)], where=where) from None
    if refused:
        mistakes = [*mistakes, *explain(attempt, None)]
    if mistakes := [*mistakes, *secrets(attempt)]:
        raise ConfigError(mistakes, where=where)
    return recipe
