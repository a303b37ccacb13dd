"""`lockstep runs`: lists runs, adds notes and tags, archives runs, deletes what is no longer needed, shows the best scores."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.track.listing import Listed

ACTIONS = {
    "list": "list runs (the default)",
    "best": "show the best known score for each task, mode and set of questions",
    "note": "fill in the entry of runs in NOTES.md",
    "tag": "give a run tags",
    "untag": "take tags from a run",
    "archive": "leave runs out of the list",
    "unarchive": "list them again",
    "gc": "list what is no longer needed, or delete it",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `runs [ACTION] [RUN...]`."""
    parser = subparsers.add_parser("runs", help="list runs; note, tag, archive or clean them; show the best scores")
    _add_options(parser, "filter")
    parser.set_defaults(dir=Path("runs"), filter=[], more_filters=[], all=False)
    actions = parser.add_subparsers(dest="runs_action", metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text)
        _add_options(action, "more_filters")  # of its own: it would replace those before the action
        if name in ("tag", "untag"):
            action.add_argument("run", metavar="RUN")
            action.add_argument("tags", nargs="+", metavar="TAG")
        elif name in ("note", "archive", "unarchive"):
            action.add_argument("runs", nargs="+", metavar="RUN")
        elif name == "gc":
            action.add_argument("--yes", action="store_true", help="delete; without it, only say what would be deleted")


def _add_options(parser: argparse.ArgumentParser, filters: str) -> None:
    """Add what may stand before and after the action; a default there would replace what was given before."""
    nothing = argparse.SUPPRESS
    parser.add_argument("--dir", type=Path, default=nothing, metavar="DIR", help="folder of the runs (default runs)")
    parser.add_argument(
        "--filter",
        dest=filters,
        action="append",
        default=nothing,
        metavar="TEXT|a.b=v",
        help="runs whose name, state or tag has this text, or whose setting has this value; may be given several times",
    )
    parser.add_argument("--all", action="store_true", default=nothing, help="archived runs, too")


def run(args: argparse.Namespace) -> int:
    """Do one action. Raises RunDirectoryError for a run that is not there."""
    from lockstep.track.listing import annotate, list_runs
    from lockstep.track.rundir import RunDirectory

    filters = [*args.filter, *args.more_filters]
    match args.runs_action:
        case None | "list" | "best" | "gc" as action:
            every = list_runs(args.dir)
            wanted = [one for one in every if all(matches(one, text) for text in filters)]
            found = [one for one in wanted if args.all or not one.archived]
            if action == "gc":
                lines = collect(wanted, really=args.yes)
            else:
                lines = best(found, args.dir) if action == "best" else listing(found, args.dir)
            print("\n".join([*lines, *([] if wanted else _unset(every, filters))]))
        case "tag" | "untag":
            _tag(_path(args, args.run), args.tags, add=args.runs_action == "tag")
        case "note":
            from lockstep.scoring.notes import write_note

            for path in (_path(args, name) for name in args.runs):
                print(f"{path}: noted in {write_note(RunDirectory.open(path))}")
        case _:
            archived = args.runs_action == "archive"
            for path in (_path(args, name) for name in args.runs):
                annotate(path, archived=archived)
                print(f"{path}: {'archived; lockstep runs --all lists it' if archived else 'back in the list'}")
    return 0


def matches(one: Listed, text: str) -> bool:
    """Return whether a run has the text in its name, state or tags, or the value in its setting (a.b=value)."""
    path, equals, wanted = text.partition("=")
    if equals:
        return _same(setting(one.recipe, path), wanted)
    return any(text in word for word in (one.path.name, one.state, *one.tags))


def _same(found: str | None, wanted: str) -> bool:
    """Return whether two values are the same text or number: 1e-3 is 0.001."""
    try:
        return found is not None and float(found) == float(wanted)
    except ValueError:
        return found == wanted


def _unset(every: Sequence[Listed], texts: Sequence[str]) -> list[str]:
    """Return a line for each filter whose setting no run has."""
    paths = [text.partition("=")[0] for text in texts if "=" in text]
    unknown = [path for path in paths if all(setting(one.recipe, path) is None for one in every)]
    return [f"  no run has a setting {path}; names, states and tags are given alone, without =" for path in unknown]


def setting(recipe: Mapping[str, Any], path: str) -> str | None:
    """Return a setting as text, as a recipe writes it; a section with variants is its kind; None if there is none."""
    from lockstep.config.text import value_at

    head, _, name = path.rpartition(".")
    section = value_at(recipe, head) if head else recipe
    if not isinstance(section, Mapping) or name not in section:
        return None
    found = section[name]
    if isinstance(found, Mapping):
        found = found.get("kind")
    return "null" if found is None else str(found).lower() if isinstance(found, bool) else str(found)


def listing(runs: Sequence[Listed], folder: Path) -> list[str]:
    """Return the lines of a list of runs."""
    from lockstep.track.text import one_line, plain_table

    if not runs:
        return [f"no runs in {folder}" + (" that match" if folder.is_dir() else "")]
    rows = [
        (
            one.path.name,
            one.state + (", archived" if one.archived else ""),
            f"{one.step}/{one.steps}" if one.steps else "",
            "" if one.reward is None else f"{one.reward:.3f}",
            "" if one.best is None else f"{one.best[1]:.1%} {one.best[0]} @{one.best[2]}",
            one.began[:16].replace("T", " "),
            ",".join(one.tags),
        )
        for one in runs
    ]
    table = plain_table("", ("run", "state", "step", "reward", "best score", "began (UTC)", "tags"), rows)
    reasons = [(one.path.name, one.reason.splitlines()[0]) for one in runs if one.reason and one.state != "running"]
    notes = [f"{name}: {one_line(reason, 100)}" for name, reason in reasons]
    return [*table.split("\n"), *([""] if notes else []), *notes]


def best(runs: Sequence[Listed], folder: Path) -> list[str]:
    """Return the highest stored score of each set of items and mode, with its interval and its run."""
    from lockstep.evaluation.table import score_line
    from lockstep.scoring.against import best_of
    from lockstep.track.text import plain_table

    top = best_of(one.path for one in runs)
    if not top:
        return [f"no run in {folder} has a score"]
    rows = [(key[0], key[1], key[2][:8], score_line(score), score.source) for key, score in sorted(top.items())]
    return plain_table("", ("task", "mode", "items", "best known", "from"), rows).split("\n")


def collect(runs: Sequence[Listed], *, really: bool) -> list[str]:
    """Return what is removed of these runs, or would be."""
    from lockstep.track.listing import removable, remove

    lines, total = [], 0
    for one in list(removable(runs)):
        gone = not really or remove(one)
        word = "would remove" if not really else "removed" if gone else "left, a process writes there:"
        total += one.bytes if gone else 0
        lines.append(f"{word} {one.path} ({one.bytes / 2**20:,.1f} MiB): {one.why}")
    if not lines:
        return ["nothing to remove: no failed start, no archived run with several checkpoints"]
    return [*lines, f"{total / 2**20:,.1f} MiB" + ("" if really else "; the same command with --yes deletes it")]


def _path(args: argparse.Namespace, name: str) -> Path:
    return Path(name) if "/" in name else args.dir / name


def _tag(path: Path, given: Sequence[str], *, add: bool) -> None:
    from lockstep.config.text import value_at
    from lockstep.track.listing import annotate
    from lockstep.track.rundir import RunDirectory

    run = RunDirectory.open(path)
    kept = [tag for tag in run.manifest().get("tags", []) if add or tag not in given]
    tags = [*kept, *(tag for tag in given if add and tag not in kept)]
    annotate(path, tags=tags)
    print(f"{path}: tags {', '.join(tags) or 'none'}")
    own = value_at(run.settings(), "track.tags") or []
    if not add and (fixed := [tag for tag in given if tag in own]):
        print(f"{', '.join(fixed)}: given by the run's recipe (track.tags), which is never changed")
