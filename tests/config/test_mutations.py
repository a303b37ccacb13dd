"""Thousands of mutated recipes, made from valid ones by rules: each is refused, each message names the path, none loads torch.

The work is done by this file run as a script, so that a fresh process shows what it imports.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.help import groups
from lockstep.config.load import dump, load, load_mapping
from lockstep.errors import ConfigError
from tests.config.full_recipes import (
    BASES,
    FULL,
    FULL_ADAPTER,
    FULL_ALGORITHMS,
    FULL_FILE,
    FULL_NOISE,
    FULL_OPTIMIZERS,
    FULL_PYTHON,
    FULL_SFT,
    FULL_TASKS,
    FULL_VERIFIERS,
    IMPOSSIBLE,
    Tree,
)

At = tuple[str | int, ...]
SETTINGS = {setting.path: setting for group in groups() for setting in group.settings}
NULLABLE = {setting.path for group in groups() for setting in group.settings if "null" in setting.type}
"""Kinds of a section may have a setting of the same name, which null is right for in some."""


@dataclass(frozen=True)
class Mutation:
    tree: Tree
    """The recipe."""
    path: str
    """What the message must name."""
    more: str = ""
    """Lines after it."""

    @property
    def text(self) -> str:
        return yaml.dump(self.tree, Dumper=yaml.CSafeDumper, sort_keys=False) + self.more


def mutations() -> list[Mutation]:
    """All mutations in a fixed order, each recipe once."""
    return list({repr((mutation.tree, mutation.more)): mutation for mutation in _mutations()}.values())


def _mutations() -> Iterator[Mutation]:
    yield from _mutated(FULL, ())
    for other in (FULL_FILE, FULL_PYTHON):
        yield from _mutated(other, ("task",))
    yield from _mutated(FULL_ADAPTER, ("adapter",))
    for other in FULL_ALGORITHMS:
        yield from _mutated(other, ("algorithm",))
    for other in FULL_OPTIMIZERS:
        yield from _mutated(other, ("optimizer",))
    yield from _mutated(FULL_SFT, ("sft",))
    yield from _mutated(FULL_NOISE, ("noise",))
    for other in FULL_TASKS:
        yield from _mutated(other, ("task",))
    for other in FULL_VERIFIERS[:-1]:
        yield from _mutated(other, ("task", "verifier"))
    for overrides, path in IMPOSSIBLE:
        tree = copy.deepcopy(FULL)
        for at, value in overrides.items():
            _set(tree, tuple(at.split(".")), value)
        yield Mutation(tree, path)
    for key in ("steps", "rollout", "seed"):
        yield Mutation(FULL, key, f"{key}: 1\n")


def _mutated(base: Tree, under: At) -> Iterator[Mutation]:
    for at, value in _nodes(base, ()):
        if at[: len(under)] != under or (at[0] == "health" and _once(_pattern(at)) != _pattern(at)):
            continue  # the rules of health have the same settings each: one rule stands for all
        parent, key = at[:-1], at[-1]
        if isinstance(key, str):
            wrong = key[:-1] if len(key) > 2 else f"{key}e"
            tree = copy.deepcopy(base)
            section = _get(tree, parent)
            section[wrong] = section.pop(key)
            yield _mutation(tree, (*parent, wrong))
        for bad in _bad_values(_pattern(at), value):
            tree = copy.deepcopy(base)
            _set(tree, at, bad)
            yield _mutation(tree, at)


def _bad_values(path: str, value: Any) -> list[Any]:
    setting = SETTINGS.get(path)
    bad = [] if path in NULLABLE else [None]
    below = [-1, -0.5] if setting and ">" in setting.allowed else []
    match value:
        case bool():
            return ["maybe", 3, [True], *bad]
        case int():
            return ["many", 1.5, True, [3], {"a": 1}, float("nan"), *below[:1], *bad]
        case float():
            return ["much", True, [0.5], float("inf"), *below[1:], *bad]
        case str():
            return [3, ["a"], {"a": "b"}, *bad]
        case list():
            return ["?!", 3, *bad]  # a name may stand for a list of one
        case dict():
            return [3, [1], True, *bad]
        case _:
            return [[[{"a": {}}]]]


def _nodes(value: Any, at: At) -> Iterator[tuple[At, Any]]:
    """Every section and setting with its path; the keys of a mapping that is one setting belong to the user."""
    if at:
        yield at, value
    setting = SETTINGS.get(_pattern(at))
    if isinstance(value, dict) and (setting is None or setting.type.startswith("section")):
        for key, inner in value.items():
            yield from _nodes(inner, (*at, key))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _nodes(inner, (*at, index))


def _get(tree: Any, at: At) -> Any:
    for part in at:
        tree = tree[part]
    return tree


def _set(tree: Tree, at: At, value: Any) -> None:
    _get(tree, at[:-1])[at[-1]] = value


def _dotted(at: At) -> str:
    return ".".join(str(part) for part in at)


def _pattern(at: At) -> str:
    return ".".join("N" if isinstance(part, int) else part for part in at)


def _mutation(tree: Tree, at: At) -> Mutation:
    return Mutation(tree, _dotted(at))


def complaint(mutation: Mutation, file: Path) -> str:
    """What is wrong with how a mutation is refused; "" if it is refused well."""
    file.write_text(mutation.text)
    try:
        load([str(file)])
    except ConfigError as error:
        heads = [line.removeprefix(f"{file}:").partition(": ")[2] or line for line in error.mistakes]
        named = any(
            head.startswith(tuple(f"{mutation.path}{mark}" for mark in ":=. ")) for head in [*heads, *error.mistakes]
        )
        odd = [
            line for line in error.mistakes if not line.isprintable() or "adapter.lora." in line or "list[str]" in line
        ]
        if named and not odd and error.exit_code == 2:
            return ""
        return f"{mutation.path} is not named well in {error.mistakes}"
    return f"{mutation.path}: accepted\n{mutation.text}"


def complaints(every: int) -> tuple[int, list[str]]:
    """The number of mutations that were tried, one in `every`, and what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = islice(mutations(), 0, None, every)
        found = [complaint(mutation, Path(folder) / "mutated.yaml") for mutation in chosen]
    return len(found), [text for text in found if text]


def _once(path: str) -> str:
    """Verifiers, data and one-reply tasks stand in several places, as the same sections: one place stands for all."""
    path = re.sub(
        r"^task\.verifier\.parts\.N\.verifier\.|^task\.questions\.verifier\.(parts\.N\.verifier\.)?",
        "task.verifier.",
        path,
    )
    path = re.sub(r"^(sft\.data|sft\.validation|task\.questions\.data)\.", "task.data.", path)
    path = re.sub(r"^health\.[a-z_]+\.(tier|limit|steps|within)$", r"health.clipping.\1", path)
    return re.sub(r"^task\.questions\.", "task.", path)


def test_every_setting_is_mutated(tmp_path: Path) -> None:
    """The recipes that are mutated are valid and have every setting but those of other variants."""
    covered = {_once(_pattern(at)) for tree in BASES for at, _ in _nodes(tree, ())}
    assert {_once(path) for path in SETTINGS} - covered == set()
    for tree in BASES:
        file = tmp_path / "full.yaml"
        file.write_text(yaml.safe_dump(tree))
        assert dump(load([str(file)])) == dump(load_mapping(tree))


@pytest.mark.parametrize("every", [41, pytest.param(7, marks=pytest.mark.slow)])
def test_every_mutation_is_refused_by_its_path_and_none_loads_torch(every: int) -> None:
    root = Path(__file__).parents[2]
    # Not traced for coverage, which other tests give: over these thousands of recipes that takes minutes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment["PYTHONPATH"] = str(root)
    result = subprocess.run(
        [sys.executable, __file__, str(every)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) >= 4000 // every


if __name__ == "__main__":
    total, bad = complaints(int(sys.argv[1]))
    heavy = sorted({"torch", "transformers", "numpy", "peft"} & sys.modules.keys())
    print(f"{total} recipes refused, {len(bad)} badly, heavy imports: {heavy}", *bad[:5], sep="\n")
    sys.exit(bool(bad or heavy))
