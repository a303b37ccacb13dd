"""Finds the files of a source on this machine, downloading them from the hub if necessary, or its generator."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from lockstep.config.data import FILE_SUFFIXES, Data
from lockstep.config.text import parse
from lockstep.data.hub import read_card
from lockstep.data.presets import PRESETS, completed
from lockstep.errors import ConfigError, DataError
from lockstep.text import did_you_mean

SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in file and folder names that tell a file's split, as in the datasets library."""

MOST_FILES = 100_000
"""Largest number of files in a local folder; a folder with more is not a data set."""


@dataclass(frozen=True, slots=True)
class Located:
    """Location of rows. Example: Located("gsm8k", "openai/gsm8k@e53f048 main/train", (Path("…/train-0000.parquet"),))"""

    name: str
    """Short name, with which the rows' ids begin."""
    origin: str
    """Source as a person would cite it."""
    files: tuple[Path, ...] = ()
    """In the order in which they are read."""
    labels: tuple[str, ...] = ()
    """Name of each file: its path in the repository or folder, or as it was given."""
    generator: str | None = None
    """Generator, file.py:function, instead of files."""
    commit: str | None = None
    """Commit of a hub data set."""
    data: Data | None = field(default=None, compare=False)
    """The settings with the preset's source, subset and split filled in."""


def locate(data: Data, where: str) -> Located:
    """Find the files of a source, and fetch them if necessary. `where` is the setting that errors name.

    An existing file or folder wins over a hub id of the same name. Raises DataError, which names the right form or the
    nearest name.
    """
    text = data.source
    if ".py:" in text:
        return Located(Path(text.rpartition(":")[0]).stem, text, generator=text, data=data)
    if text.startswith("hf://"):
        return _of_hf_path(text, data, where)
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, an unknown user's home
        raise DataError(f"{text[:100]!r} is not a valid path: {error}", where=where, fix="correct the path") from error
    if is_folder:
        return _of_folder(path, data, where)
    if is_file:
        if path.suffix.lower() not in FILE_SUFFIXES:
            raise DataError(
                f"files of type {path.suffix or '(no suffix)'} cannot be read",
                where=text,
                fix=f"give a file that ends in {_or(FILE_SUFFIXES)}",
            )
        return Located(path.stem, text, (path,), (text,), data=data)
    filled = completed(data)
    in_folder = bool(path.suffix) and path.parent != Path() and path.parent.is_dir()
    looks_local = text.startswith((".", "/", "~")) or text.lower().endswith(FILE_SUFFIXES)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", filled.source) and not looks_local and not in_folder:
        return _of_hub(filled, where)
    raise _no_such(text, path, where)


def _no_such(text: str, path: Path, where: str) -> DataError:
    """Return the error for a text that is not a file, folder, preset or hub id."""
    if text.lower().endswith(FILE_SUFFIXES) or (path.suffix and path.parent != Path() and path.parent.is_dir()):
        parent = path.parent
        while not parent.is_dir():
            parent = parent.parent
        beside = sorted(p.name for p in parent.iterdir() if p.suffix.lower() in FILE_SUFFIXES or p.is_dir())
        wanted = path.relative_to(parent).parts[0]
        near = get_close_matches(wanted, beside, n=3, cutoff=0.3)
        nearest = f"; nearest: {_or([str(parent / name) for name in near])}" if near else ""
        return DataError(
            f"there is no file {text}{nearest}",
            where=where,
            fix=f"give an existing path (a relative one starts at {Path.cwd()}), or a hub file as hf://datasets/ORG/NAME/{path.name}",
        )
    if text.startswith((".", "/", "~")):
        return DataError(
            f"there is no folder {text}",
            where=where,
            fix=f"give an existing path (a relative one starts at {Path.cwd()})",
        )
    org, _, rest = text.partition("/")
    name, _, subset = rest.partition("/")
    if subset:
        return DataError(
            f"{text} is neither a folder here nor a hub id, which has the form ORG/NAME",
            where=where,
            fix=f"for a subset set source={org}/{name} and subset={subset}; for a file set source=hf://datasets/{text}",
        )
    names = {known.lower(): preset for preset, record in PRESETS.items() for known in (preset, record.source)}
    near = get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {names[near[0]]} ({PRESETS[names[near[0]]].source})?" if near else ""
    return DataError(
        f"{text} is neither a file or folder here nor a hub id, which has the form ORG/NAME{hint}",
        where=where,
        fix=f"give ORG/NAME, a path to {_or(FILE_SUFFIXES)}, file.py:function, or a preset ({', '.join(PRESETS)})",
    )


def _of_folder(path: Path, data: Data, where: str) -> Located:
    names = _files_below(path, where)
    chosen = choose_files(names, read_card(path), data, f"{where}={data.source}")
    files = tuple(path / name for name in chosen)
    return Located(path.resolve().name, data.source, files, chosen, data=data)


def _files_below(folder: Path, where: str) -> list[str]:
    """Return the paths of all files in a folder, without hidden ones. Raises DataError if they are too many to be a data set."""

    def unreadable(error: OSError) -> None:
        raise DataError(
            f"this folder cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="make it readable, or give another folder",
        )

    names: list[str] = []
    for root, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(root).relative_to(folder)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
        if len(names) > MOST_FILES:
            raise DataError(
                f"{folder} holds more than {MOST_FILES:,} files",
                where=where,
                fix="give a folder that has only the data set's files",
            )
    return sorted(names)


def _of_hub(data: Data, where: str) -> Located:
    from lockstep.data.hub import fetch, open_repo

    repo = open_repo(data.source, data.revision, where)
    chosen = choose_files(repo.names, repo.card, data, f"{where}={data.source}")
    place = "/".join(part for part in (data.subset, data.split or "train") if part)
    origin = f"{data.source}@{repo.commit[:12]} {place}"
    name = data.preset or data.source.rpartition("/")[2].lower()
    return Located(name, origin, fetch(repo, chosen), chosen, commit=repo.commit, data=data)


def _of_hf_path(text: str, data: Data, where: str) -> Located:
    from lockstep.data.hub import fetch, open_repo

    org, name, *rest = text.removeprefix("hf://datasets/").split("/")
    name, _, revision = name.partition("@")
    repo = open_repo(f"{org}/{name}", revision or None, where)
    pattern = "/".join(rest).rstrip("/")
    if not pattern:
        chosen = choose_files(repo.names, repo.card, data, text)
    else:
        readable = [known for known in repo.names if known.lower().endswith(FILE_SUFFIXES)]
        chosen = tuple(known for known in readable if known == pattern or known.startswith(pattern + "/"))
        chosen = chosen or tuple(known for known in readable if fnmatch.fnmatchcase(known, pattern))
        if not chosen:
            near = get_close_matches(pattern, readable, n=3, cutoff=0.3) or readable[:3]
            nearest = f"; nearest: {_or([f'hf://datasets/{org}/{name}/{known}' for known in near])}" if near else ""
            raise DataError(
                f"the data set has no file {pattern} of type {_or(FILE_SUFFIXES)}{nearest}",
                where=text,
                fix="correct the path",
            )
    origin = f"hf://datasets/{org}/{name}@{repo.commit[:12]}/{pattern}"
    label = PurePosixPath(pattern).stem if pattern.lower().endswith(FILE_SUFFIXES) else name.lower()
    return Located(label, origin, fetch(repo, chosen), chosen, commit=repo.commit, data=data)


def choose_files(names: Sequence[str], card: str, data: Data, where: str) -> tuple[str, ...]:
    """Return the files of a subset and split: by the configs of the data card, else by words in folder and file names.

    Without such names all files are train. Raises DataError naming the subsets or splits that there are.
    """
    readable = sorted(name for name in names if name.lower().endswith(FILE_SUFFIXES) and _is_data(name))
    if not readable:
        raise DataError(
            f"the source has no file of type {_or(FILE_SUFFIXES)}",
            where=where,
            fix="give a source with such a file; if the hub has only a loading script, try revision=refs/convert/parquet",
        )
    configs = _configs(card, where)
    if configs:
        splits = _patterns(_config(configs, data.subset, where), where)
        by_split = {split: _matching(readable, patterns) for split, patterns in splits.items()}
    else:
        by_split = _by_words(_in_subset(readable, data.subset, where))
    split = data.split or ("train" if "train" in by_split or len(by_split) != 1 else next(iter(by_split)))
    if not by_split.get(split):
        raise DataError(
            f"there is no split {split!r}{_near(split, [name for name, files in by_split.items() if files])}",
            where=where,
            fix="set split to one of the data set's splits",
        )
    return by_split[split]


def _is_data(name: str) -> bool:
    """Return whether a .json file may hold rows: repositories have others that describe them."""
    known = ("dataset_infos.json", "dataset_info.json", "state.json", "manifest.json")
    return not name.endswith((*known, ".manifest.json"))


def _configs(card: str, where: str) -> Sequence[Mapping[str, object]]:
    """Return the list `configs` of a data card's front matter; [] if there is none.

    Raises DataError for configs that cannot be read: without them other files might be taken.
    """
    front = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", card, re.DOTALL)
    if front is None:
        return []
    try:
        tree = parse(front[1], "README.md").value
    except ConfigError as error:
        if not re.search(r"^configs[ \t]*:", front[1], re.MULTILINE):
            return []  # a card is written by hand, and the files are there without it
        raise DataError(
            f"`configs` in the data set's README.md cannot be read: {error.mistakes[0]}",
            where=where,
            fix="name the data files themselves: source=hf://datasets/ORG/NAME/PATH",
        ) from error
    configs = tree.get("configs") if isinstance(tree, dict) else None
    found = configs if isinstance(configs, list) else []
    return [config for config in found if isinstance(config, dict) and config.get("data_files")]


def _config(configs: Sequence[Mapping[str, object]], subset: str | None, where: str) -> Mapping[str, object]:
    names = [str(config.get("config_name", "default")) for config in configs]
    if subset is None and "default" in names:
        subset = "default"
    if subset is None and len(names) == 1:
        subset = names[0]
    if subset is None:
        raise DataError(
            f"the data set has {len(names)} subsets, and none was chosen: {', '.join(names[:20])}",
            where=where,
            fix="set subset to one of them",
        )
    if subset not in names:
        raise DataError(
            f"there is no subset {subset!r}{_near(subset, names)}",
            where=where,
            fix="set subset to one of the data set's subsets",
        )
    return configs[names.index(subset)]


def _patterns(config: Mapping[str, object], where: str) -> dict[str, list[str]]:
    """Return the file patterns by split."""
    base = str(config.get("data_dir") or "").strip("/")
    files = config["data_files"]
    entries = (
        files if isinstance(files, list) and all(isinstance(entry, dict) for entry in files) else [{"path": files}]
    )
    found: dict[str, list[str]] = {}
    for entry in entries:
        path = entry.get("path")
        paths = [one for one in (path if isinstance(path, list) else [path]) if isinstance(one, str)]
        if not paths:
            raise DataError(
                "`configs` in the data set's README.md names no files",
                where=where,
                fix="name the data files themselves: source=hf://datasets/ORG/NAME/PATH",
            )
        found.setdefault(str(entry.get("split", "train")), []).extend(f"{base}/{one}" if base else one for one in paths)
    return found


def _matching(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        name for name in names if any(name == p or fnmatch.fnmatchcase(name, p.replace("**/", "*")) for p in patterns)
    )


def _in_subset(names: Sequence[str], subset: str | None, where: str) -> Sequence[str]:
    if subset is None or (subset == "default" and not any(name.startswith("default/") for name in names)):
        return names
    inside = [name for name in names if subset in PurePosixPath(name).parts[:-1]]
    if not inside:
        folders = sorted({part for name in names for part in PurePosixPath(name).parts[:-1]})
        raise DataError(
            f"there is no subset {subset!r}{_near(subset, folders)}", where=where, fix="correct subset, or leave it out"
        )
    return inside


def _by_words(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[^a-z]+", PurePosixPath(name).name.lower())
        words += [part.lower() for part in PurePosixPath(name).parts[:-1]]
        split = next((split for split, known in SPLITS.items() if any(word in known for word in words)), "")
        found.setdefault(split, []).append(name)
    if set(found) == {""}:
        return {"train": tuple(found[""])}
    return {split: tuple(files) for split, files in found.items() if split}


def _near(name: str, known: Sequence[str]) -> str:
    return "; " + did_you_mean(name, known, f"there are: {', '.join(known[:20]) or 'none'}", cutoff=0.5)


def _or(names: Sequence[str]) -> str:
    return " or ".join(([", ".join(names[:-1])] if len(names) > 1 else []) + [names[-1]])
