"""Records the user's part of a run: the commit of their repository, and hashes and copies of the files that the recipe names.

    runs/<name>/code/  project.diff (changes since the commit)  1_grader.py  2_train.jsonl …

When the run is resumed, a file that has changed since is reported and copied again.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.models.cache import sha256_of
from lockstep.text import hide_secrets
from lockstep.track.facts import SECRET_TEXT, code_facts, project_diff
from lockstep.track.files import write_atomic
from lockstep.track.rundir import RunDirectory
from lockstep.user_code import code_files, named_file, texts_of

COPIED_BYTES = 1_000_000
"""Larger files are hashed, not copied; a longer diff is cut."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that a recipe names. Example: Source("grader.py", "9f…", 812, "code/1_grader.py")"""

    path: str
    sha256: str
    bytes: int
    copy: str | None
    """Path of the copy in the run directory; None for a large file."""


def require_clean(folder: Path, runs_dir: str, asked: str = "--require-clean") -> None:
    """Raise ConfigError unless `folder` is in a git repository without changes; the folder of the runs does not count.

    `asked`: the beginning of the message.
    """
    facts = code_facts(folder, skip=runs_dir)
    if facts["commit"] is None:
        raise ConfigError(
            [f"{asked}: {folder} is not in a git repository: {facts['why']}"],
            fix="put the folder into a git repository and commit its files",
        )
    if facts["changed"]:
        changed = [line[3:] for line in facts["changed"]]
        more = f" and {facts['changed_files'] - 5} more" if facts["changed_files"] > 5 else ""
        raise ConfigError(
            [f"{asked}: these files are not committed: {', '.join(changed[:5])}{more}"],
            fix="commit or stash the changes; lockstep train without --require-clean starts anyway and stores them as a diff",
        )


def keep_sources(run: RunDirectory, settings: object, runs_dir: str) -> list[str]:
    """Record the user's repository and the files that the settings name in the run. Returns warnings about changed files."""
    known = run.manifest().get("sources")  # [] of a recipe that names no file
    before = {one["path"]: one["sha256"] for one in known or ()}
    folder = run.path / "code"
    folder.mkdir(exist_ok=True)
    sources = [_source(path, run.path, number) for number, path in enumerate(_files(settings), start=1)]
    changed = [one for one in sources if before.get(one.path, one.sha256) != one.sha256]
    for one in sources:
        if one.copy is not None and (known is None or one in changed):
            home = run.path / one.copy
            shutil.copyfile(one.path, home if known is None else home.with_name(f"attempt{run.attempt}_{home.name}"))
    project = code_facts(Path.cwd(), skip=runs_dir)
    if known is None and project.get("diff_sha256") and (diff := project_diff(Path.cwd(), skip=runs_dir)):
        lines = (SECRET_TEXT.sub("***", hide_secrets(line)) for line in diff[:COPIED_BYTES].splitlines(keepends=True))
        write_atomic(folder / "project.diff", "".join(lines).encode("utf-8", "backslashreplace"))
    facts: dict[str, object] = {"sources": [asdict(one) for one in sources], "project": project}
    if known is not None:
        facts = {f"sources_of_attempt_{run.attempt}": facts["sources"]} if changed else {}
    run.add_to_manifest(facts)
    return [
        f"{one.path} has changed since the run began ({before[one.path][:8]} then, {one.sha256[:8]} now): "
        "what it decides differs before and after this step"
        for one in changed
    ]


def _files(settings: object) -> list[Path]:
    """Return code that settings name with what it imports from its folder, and other files that they name, each once."""
    data = [path for text in texts_of(settings) if (path := named_file(text))]
    return list(dict.fromkeys([*code_files(texts_of(settings)), *data]))


def _source(path: Path, run: Path, number: int) -> Source:
    size = path.stat().st_size
    copy = f"code/{number}_{path.name}" if size <= COPIED_BYTES else None
    return Source(str(path), sha256_of(path), size, copy)
