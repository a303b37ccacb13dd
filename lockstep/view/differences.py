"""Differences between two runs: settings, code, packages and machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.config.help import groups
from lockstep.track.rundir import RunDirectory

FACTS = ("lockstep", "code", "packages", "python", "platform", "cpu", "gpu", "cuda", "threads", "formula")
"""Entries of the manifest that are compared; the others differ between any two runs."""
ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of two runs. `kind` is "setting" or "environment"."""

    kind: str
    path: str
    first: str
    second: str
    same: bool
    help: str


def differences(first: RunDirectory, second: RunDirectory) -> list[Setting]:
    """Compare recipes and manifests, value by value. Raises RunDirectoryError for a recipe that is none."""
    helps = {setting.path: setting.help for group in groups() for setting in group.settings}
    recipes = _flat(first.settings()), _flat(second.settings())
    manifests = _manifest(first), _manifest(second)
    return [*_compare("setting", *recipes, helps), *_compare("environment", *manifests, {})]


def _compare(kind: str, first: dict[str, str], second: dict[str, str], helps: Mapping[str, str]) -> Iterator[Setting]:
    for path in dict.fromkeys([*first, *second]):
        a, b = first.get(path, ABSENT), second.get(path, ABSENT)
        yield Setting(kind, path, a, b, a == b, helps.get(path, ""))


def _manifest(run: RunDirectory) -> dict[str, str]:
    manifest = run.manifest()
    return _flat({key: manifest.get(key) for key in FACTS})


def _flat(tree: object, path: str = "") -> dict[str, str]:
    """Return each leaf by its dotted path; items of lists by their position."""
    match tree:
        case Mapping():
            items = [(str(key), value) for key, value in tree.items()]
        case list():
            items = [(str(place), value) for place, value in enumerate(tree)]
        case _:
            return {path: str(tree)}
    if not items:
        return {path: "none"}
    return {k: v for key, value in items for k, v in _flat(value, f"{path}.{key}" if path else key).items()}
