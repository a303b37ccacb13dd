"""Finds the files that a command needs: searches its arguments, recipes, overrides and runs for paths of this machine.

Relative paths stay the same on the other machine, where the command starts in its own folder. Other files are put under
inputs/, and the arguments and recipes that are sent point there; `paths` maps them back.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import COMMIT
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.load import built_in
from lockstep.config.text import parse, read, to_yaml
from lockstep.errors import ConfigError, HostError
from lockstep.models.cache import cache_root, sha256_of
from lockstep.track.files import write_atomic
from lockstep.track.places import FOLDER, is_run, run_of
from lockstep.user_code import code_files

SECRET = (
    ".env*",
    ".netrc",
    ".git-credentials",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "credentials*",
    "token",
    "*.token",
)
"""Names of files that are never sent."""
SKIPPED = frozenset({".git", "__pycache__", "wandb", ".venv", ".cache"})
OWN_WORDS = frozenset({"kind", "name", "dataset", "allow"})
"""Settings that are no paths, even if a file has the name."""
ADAPTER = ("adapter_config.json", "adapter_base.json")
LARGE = 1 << 20
"""Files of this size and more are hashed once, as long as their size and time stay."""


@dataclass
class Inputs:
    """Everything that a command needs on the other machine."""

    argv: list[str] = field(default_factory=list)
    """Its words as they are said there."""
    files: dict[str, Path] = field(default_factory=dict)
    """File here by its name in the folder there."""
    texts: dict[str, str] = field(default_factory=dict)
    """Content of recipes and the like that name other paths there."""
    paths: dict[str, str] = field(default_factory=dict)
    """Path here by path there, of what is called otherwise there."""


def inputs_of(argv: Sequence[str], *, project: bool = False) -> Inputs:
    """Search the words of a command. `project`: all files of this git repository too. Raises ConfigError, HostError."""
    search = _Search(list(argv))
    search.inputs.argv = [search.word(word, before) for word, before in zip(argv, ["", *argv], strict=False)]
    if project:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = (
            subprocess.run(listed, capture_output=True, check=False).stdout.decode(errors="surrogateescape").split("\0")
        )
        for name in names:
            if name and Path(name).is_file() and not _secret(Path(name)):
                search.inputs.files.setdefault(name, Path(name))
    return search.inputs


@dataclass
class _Search:
    argv: list[str]
    inputs: Inputs = field(default_factory=Inputs)
    places: dict[Path, str] = field(default_factory=dict)

    def word(self, word: str, before: str = "") -> str:
        """Return a word of the command line as it is said there."""
        if before in ("--mode", "--step", "--items", "--role", "--numerics", "--expect", "--allow", "--name"):
            return word
        if before == "--against" and not Path(word).exists():
            run, at, step = word.rpartition("@")
            return f"{self.text(run, recipe=True)}{at}{step}" if at else word
        head, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            if head == "runs_dir":
                return f"{head}={self._runs(value)}"
            if head.startswith("paths."):
                return f"{head}=null"
            if head.rpartition(".")[2] in OWN_WORDS:
                return word
            if self._path(value) is not None:
                return f"{head}={self.text(value)}"
            try:
                tree = parse(value, "").value
            except ConfigError:
                return word  # the command itself says what is wrong
            said = self.tree(tree, head) if isinstance(tree, dict | list) else tree
            return word if said == tree else f"{head}={json.dumps(said)}"
        if before != "--out" and word in built_in() and not Path(word).exists():
            return word
        return self.text(word, recipe=True)

    def tree(self, value: Any, key: str = "") -> Any:
        """Return settings in which paths are those of the other machine."""
        if isinstance(value, dict) and key == "paths":  # disks of this machine, whose content is not meant
            return dict.fromkeys(value)
        if isinstance(value, dict):
            return {name: self.tree(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.tree(inner, key) for inner in value]
        if key == "runs_dir" and isinstance(value, str):
            return self._runs(value)
        return self.text(value) if isinstance(value, str) and key not in OWN_WORDS else value

    def text(self, text: str, *, recipe: bool = False) -> str:
        """Return a text as it is said there, and collect the files that it names, if it names any."""
        path = self._path(text)
        if path is None:
            return text
        spec = text[len(str(path)) :] if text.startswith(str(path)) else ""  # the object of file.py:object
        if (run := run_of(path)) is not None:
            return f"{self._run(run, run, [path])}/{FOLDER}/{path.resolve().name}"
        return self._place(path, recipe=recipe) + spec

    def _path(self, text: str) -> Path | None:
        """Return the file or folder here that a text names; None for any other text."""
        if not text or len(text) > 1000 or "\n" in text:
            return None
        try:
            for name in (text, text.rpartition(":")[0] if ".py:" in text else ""):
                path = Path(name).expanduser()
                if name and path.exists() and path.resolve() not in (Path.cwd(), *Path.cwd().parents):
                    return path
        except (OSError, ValueError, RuntimeError):  # a text, not a path
            return None
        return None

    def _runs(self, text: str) -> str:
        path = Path(os.path.expanduser(text))  # noqa: PTH111  # as recipes do: an unknown ~user stays
        return self._name(path) if _leads_out(path) else text

    def _name(self, path: Path) -> str:
        """Return the name there of a path here."""
        if path in self.places:
            return self.places[path]
        name = str(path)
        if _leads_out(path):  # the last two parts stay: scores of models are called after them
            name = "/".join(["inputs", str(len(self.places) + 1), *path.resolve().parts[-2:]]).replace("//", "/")
            self.inputs.paths[name] = str(path)
        self.places[path] = name
        return name

    def _place(self, path: Path, *, recipe: bool) -> str:
        if path.is_dir() and is_run(path):
            return self._run(path, path, self._checkpoints(path))
        known = path in self.places
        name = self._name(path)
        if known:
            return name
        if path.is_dir():
            for inner in _files(path):
                self._add(f"{name}/{inner.relative_to(path)}", inner, rewritten=inner.name in ADAPTER)
        elif path.suffix == ".py":
            for one in code_files([f"{path}:"]):
                self._add(str(Path(name).parent / one.relative_to(path.parent)), one)
        else:
            self._add(name, path, rewritten=recipe and path.suffix in (".yaml", ".yml"))
        return name

    def _run(self, run: Path, given: Path, checkpoints: list[Path]) -> str:
        known = given in self.places
        name = self._name(given)
        if not known:
            for file in ("recipe.yaml", "manifest.json"):
                self._add(f"{name}/{file}", run / file, rewritten=file == "recipe.yaml")
            for score in sorted((run / "scores").rglob("*.json")):
                self._add(f"{name}/{score.relative_to(run)}", score)
        for folder in checkpoints:
            for inner in _files(folder):
                self._add(f"{name}/{FOLDER}/{folder.resolve().name}/{inner.relative_to(folder)}", inner)
        return name

    def _checkpoints(self, run: Path) -> list[Path]:
        whole = [info for info in list_checkpoints(run) if info.complete]
        if "--all-checkpoints" in self.argv:
            return [info.path for info in whole]
        words = [part for word in self.argv for part in (word.split("=", 1) if word.startswith("--step=") else [word])]
        step = words[words.index("--step") + 1 :][:1] if "--step" in words else []
        return [info.path for info in whole if str(info.step) in step] if step else [info.path for info in whole[-1:]]

    def _add(self, name: str, path: Path, *, rewritten: bool = False) -> None:
        if _secret(path):
            what = "this file is not sent: its name says that it holds secrets"
            raise HostError(what, where=str(path), fix="copy what the command needs into a file with another name")
        self.inputs.files[name] = path
        if not rewritten or (path.parent / COMMIT).exists():  # a checkpoint's own files are hashed
            return
        tree = json.loads(path.read_text()) if path.suffix == ".json" else read(path).value
        said = self.tree(tree)
        if said != tree and isinstance(said, dict):
            self.inputs.texts[name] = json.dumps(said) if path.suffix == ".json" else to_yaml(said)


def _leads_out(path: Path) -> bool:
    return path.is_absolute() or str(path).startswith("~") or ".." in path.parts


def _secret(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in SECRET)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, links as what they lead to; names of secrets and tools' own folders are left out."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED:
                yield from _files(path)
        elif path.is_file() and not _secret(path):
            yield path


class Hashes:
    """SHA-256 of files; large ones are read once, as long as size and time of change stay."""

    def __init__(self) -> None:
        self._path = cache_root() / "hashes.json"
        try:
            self._known: dict[str, list[Any]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._known = {}

    def of(self, path: Path) -> str:
        stat = path.stat()
        if stat.st_size < LARGE:
            return sha256_of(path)
        key, state = str(path.resolve()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        if self._known.get(key, [])[:3] != state:
            self._known[key] = [*state, sha256_of(path)]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(self._known))
        return str(self._known[key][3])
