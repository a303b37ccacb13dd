"""`lockstep attempt`: records an experiment in git. `start` makes a branch and a tag before a run, `finish` writes an entry into
the notes after it. Optional: no other command needs it.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from subprocess import SubprocessError

from lockstep.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `attempt start NAME` and `attempt finish RUN`."""
    parser = subparsers.add_parser("attempt", help="keep your git history in step with your runs")
    actions = parser.add_subparsers(dest="attempt_action", metavar="ACTION", required=True)
    start = actions.add_parser(
        "start", help="make the branch attempt-NAME, and the tag attempt-NAME-start on its commit"
    )
    start.add_argument("name", metavar="NAME", help="such as 27-higher-clip")
    start.add_argument(
        "--runs-dir", default="runs", metavar="DIR", help="folder of the runs, which need not be committed"
    )
    finish = actions.add_parser("finish", help="note a run, and propose the commit that records it")
    finish.add_argument("run", metavar="RUN", type=Path)


def run(args: argparse.Namespace) -> int:
    """Start or finish an attempt. Raises ConfigError if the repository is not ready for it."""
    if args.attempt_action == "start":
        print("\n".join(start(args.name, Path.cwd(), args.runs_dir)))
    else:
        print("\n".join(finish(args.run)))
    return 0


def start(name: str, folder: Path, runs_dir: str) -> list[str]:
    """Make branch and tag in the repository of `folder`, and return lines about them.

    Raises ConfigError for a name that git would refuse or has already, and if something is not committed.
    """
    from lockstep.track.facts import code_facts, git, git_trouble
    from lockstep.track.provenance import require_clean

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError([f"{name!r} is not a valid name of an attempt"], fix="use letters, digits, - and _")
    require_clean(folder, runs_dir, asked="an attempt begins with everything committed")
    branch, tag = f"attempt-{name}", f"attempt-{name}-start"
    try:
        if git(folder, "branch", "--list", branch).strip() or git(folder, "tag", "--list", tag).strip():
            raise ConfigError([f"{branch} or {tag} already exists"], fix="choose another name")
        git(folder, "switch", "--create", branch)
        git(folder, "tag", tag)
    except (OSError, SubprocessError) as error:
        raise ConfigError(
            [f"git failed: {git_trouble(error)}"], fix="run git status, correct what it shows, then try again"
        ) from error
    commit = str(code_facts(folder)["commit"])[:12]
    return [
        f"branch {branch}, tag {tag} at {commit}",
        f"  train:  lockstep train RECIPE name={name} {shlex.quote(f'runs_dir={runs_dir}')} --require-clean",
        f"  finish: lockstep attempt finish {shlex.quote(f'{runs_dir}/{name}')}",
    ]


def finish(path: Path) -> list[str]:
    """Write the run's entry into the notes, and return the commands that record it; nothing is committed here."""
    from lockstep.scoring.notes import summary, write_note
    from lockstep.track.rundir import RunDirectory

    found = RunDirectory.open(path)
    notes = write_note(found)
    return [
        f"noted in {notes}; write down what you learnt, then",
        f"  git add --force {shlex.quote(str(notes))}",
        f"  git commit -m {shlex.quote(summary(found))}",
    ]
