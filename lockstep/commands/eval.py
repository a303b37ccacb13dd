"""`lockstep eval`: scores runs, checkpoints, adapters and models on held-out questions, beside their base.

It never trains. Weights are proven to be in the engine, and to be those that were saved, before anything is sampled.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, CorruptCheckpointError, EvaluationError

if TYPE_CHECKING:
    from lockstep.config.schema import EvalMode, EvalSet, Recipe
    from lockstep.scoring.score import Outcome
    from lockstep.scoring.targets import Target
    from lockstep.types import Score

RANGE = re.compile(r"([0-9.]*):([0-9.]*)")
ROLES = ("train", "id_probe", "ood_probe", "sanity")
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `eval TARGET...`."""
    parser = subparsers.add_parser("eval", help="score runs, checkpoints, adapters or models, their base beside them")
    add_target_arguments(parser)
    add_measuring_arguments(parser)
    base = parser.add_mutually_exclusive_group()
    base.add_argument(
        "--with-base", action="store_true",
        help="evaluate the base beside: the default of runs, checkpoints and adapters; for a model, the recipe's model",
    )  # fmt: skip
    base.add_argument("--no-base", action="store_true", help="do not evaluate the base beside")
    parser.add_argument(
        "--gpus", type=positive, metavar="N",
        help="score on N GPUs of this machine, or by N processes of a CPU, whatever the placement; the scores are the same",
    )  # fmt: skip
    parser.add_argument("--all-checkpoints", action="store_true", help="every intact checkpoint of a run, oldest first")
    parser.add_argument(
        "--expect", type=share_range, metavar="LO:HI", help="exit 7 if an accuracy is outside. Example: 0.5:0.7, 0.5:"
    )
    parser.add_argument(
        "--against", metavar="RUN[@STEP]",
        help="compare with the scores that this run stored, item by item, under its recipe: exit 7 beyond --limit. For an export",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=int, default=2, metavar="N", help="items whose mark may differ with --against (default 2)"
    )
    parser.add_argument(
        "--allow-mismatch", action="store_true", help="compare scores measured under different conditions, and say so"
    )
    parser.add_argument(
        "--fail-on-alarm", action="store_true", help="exit 7 if there is an alarm (weights not loaded?, …)"
    )


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of an evaluation."""
    parser.add_argument(
        "--mode", default="all", metavar="MODE[,MODE]",
        help="greedy, sampled, all, a mode's name in the recipe, or a fixed one: greedy_pass@1, avg@8, pass@8, maj@8 (T=0.6), "
        "nondet_proxy@8 (default all)",
    )  # fmt: skip
    parser.add_argument("--items", type=positive, metavar="N", help="problems, instead of the recipe's number")
    parser.add_argument("--role", choices=ROLES, help="this set alone, instead of the recipe's")
    parser.add_argument("--numerics", metavar="X", help="compute in these numerics (numerics.eval); part of the score")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the scores, instead of the run's own")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `eval`, `sample` and `probe` share."""
    parser.add_argument(
        "target",
        nargs="+",
        metavar="TARGET|a.b=c",
        help="run directory, checkpoint (runs/x/checkpoints/step_000010), adapter's folder, or model; name=TARGET names it; "
        "and overrides of the recipe",
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        action="extend",
        default=[],
        metavar="RECIPE|a.b=c",
        help="which task, as for train; needed for a model or adapter, else the run's own",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of the recipe")
    help_of_step = "a run's checkpoint, instead of the newest; 0 is its base"
    parser.add_argument("--step", type=int, metavar="N", help=help_of_step)


def run(args: argparse.Namespace) -> int:
    """Evaluate, store, print. Raises LockstepError: 7 if a score is outside of --expect or weights are not those saved."""
    from lockstep.scoring.against import best_lines, require_same, stored_by
    from lockstep.scoring.score import ScoreOptions, score_targets

    stored = stored_by(args.against) if args.against else []
    if args.against:
        args.recipe = args.recipe or [str(stored[0].path.parents[1] / "recipe.yaml")]
    if args.gpus:
        place = f"kind: colocated, gpus: {args.gpus}" if args.gpus > 1 else "kind: local"
        # An evaluation's engine reads the learner's weights, whatever the run's did.
        args.set = [*args.set, f"placement={{{place}}}", "sync.transport=shared"]
    targets = find_targets(args)
    for target in targets:  # all of them, before anything slow
        choose_modes(target.recipe, args.mode)
    outcomes, outside, alarms = [], [], []
    options = ScoreOptions(
        modes=lambda recipe, chosen: choose_modes(recipe, args.mode, chosen),
        sets=lambda recipe: choose_sets(recipe, args.role, args.items),
        out=args.out,
        base=not args.no_base,
        recipe_model=args.with_base or (args.allow_mismatch and not args.no_base),
        watch=Progress,
    )
    with closing(score_targets(targets, options)) as scored:  # it may have started workers
        for outcome in scored:
            lines, found = report(outcome, args.allow_mismatch, args.with_base)
            print("\n".join([*lines, *best_lines(outcome)]), flush=True)
            if stored:
                print("\n".join(require_same(outcome, stored, args.limit)), flush=True)
            outcomes.append(outcome)
            alarms += found
            outside += outside_of(outcome, args.expect) if args.expect else []
    if len(outcomes) > 1:
        lines, found = report_all(outcomes)
        print("\n".join(lines), flush=True)
        alarms += found
    if outside:
        low, high = args.expect
        raise EvaluationError("; ".join(outside), where=f"expected {low:.1%} to {high:.1%}")
    if alarms and args.fail_on_alarm:
        raise EvaluationError(f"{len(alarms)} alarms, the first: {alarms[0]}", where="--fail-on-alarm")
    return 0


def find_targets(args: argparse.Namespace) -> list[Target]:
    """Return every target that was named; with --all-checkpoints each checkpoint of a run is one."""
    from lockstep.scoring.targets import find_target

    words, overrides = split_arguments(args)
    overrides += [f"numerics.eval={args.numerics}"] if args.numerics else []
    found: list[Target] = []
    for word in words:
        name, path = named(word)
        steps = checkpoint_steps(path, args.step) if args.all_checkpoints else [args.step]
        before = len(found)
        for step in steps:
            try:
                target = find_target(path, args.recipe, overrides, step)
            except CorruptCheckpointError as error:
                if not args.all_checkpoints or (step == steps[-1] and len(found) == before):
                    raise
                print(f"warning: step {step} is left out: {error.what}")
                continue
            label = f"{name} at step {target.step}" if name and target.checkpoint else name or target.label
            found.append(dataclasses.replace(target, label=label, name=name))
    names = [target.label for target in found]
    if len(set(names)) < len(names):
        what = f"two targets have the same name: {max(names, key=names.count)}"
        raise ConfigError([what], fix="name each target: a=PATH b=PATH")
    refuse_one_file_for_two([target for target in found if args.out or target.run is None])
    return found


def refuse_one_file_for_two(targets: Sequence[Target]) -> None:
    """Raise ConfigError if two targets are not the same run and their scores would be called the same: one would be lost."""
    from lockstep.scoring.score import file_name

    owners: dict[str, tuple[Path | str, str]] = {}
    for target in targets:
        owner = target.run.resolve() if target.run else target.label
        file = file_name(target, "", 0 if target.run else target.step)
        other, label = owners.setdefault(file, (owner, target.label))
        if other != owner:
            what = f"the scores of {label} and {target.label} would have the same file name, and one would be lost"
            raise ConfigError([what], fix="name each target: a=PATH b=PATH")


def checkpoint_steps(path: str, step: int | None) -> list[int | None]:
    """Return the steps of a run's complete checkpoints, oldest first. Raises ConfigError for what is no run."""
    from lockstep.checkpoint.store import list_checkpoints
    from lockstep.track.rundir import is_run

    if step is not None:
        raise ConfigError(["--step and --all-checkpoints cannot be used together"], fix="leave one of them out")
    if not is_run(Path(path)):
        raise ConfigError([f"--all-checkpoints: {path} is not a run directory"], fix="give a run, such as runs/mine")
    found = list_checkpoints(Path(path))
    for info in found:
        if not info.complete:
            print(f"warning: step {info.step} is left out: {info.problem}")
    return [info.step for info in found if info.complete] or [None]


# --- what is printed ------------------------------------------------------------------------------------------------
def report(outcome: Outcome, mismatch: bool, with_base: bool) -> tuple[list[str], list[str]]:
    """Lines about one target (its proof, the table, alarms, notes, files), and the alarms alone."""
    from lockstep.evaluation.alarms import reply_alarms, untrained_alarm
    from lockstep.evaluation.table import comparison_table, table_lines
    from lockstep.scoring.against import label
    from lockstep.sync.record import proof_line

    target = outcome.target
    own = "of the model's own files" if target.recipe.warm_start is None else "of its warm start"
    identity = "as saved" if target.checkpoint or target.adapter else own
    alarms = [f"{label(score)}: {alarm}" for score in outcome.scores for alarm in reply_alarms(score)]
    alarms += outcome.alarms
    one = outcome.scores[0]
    where = one.conditions.numerics + (f", on {one.workers} workers" if one.workers > 1 else "")
    lines = [
        f"{target.label}: weights {outcome.proof.fingerprint}, {identity}, in {where}",
        proof_line(outcome.proof),
        *score_lines(outcome.scores),
        *(f"alarm: {alarm}" for alarm in alarms),
    ]
    if outcome.base:
        rows = comparison_table(outcome.base, outcome.scores, mismatch or with_base)
        lines += table_lines(rows)  # its own alarms are among them
        alarms += [row.comparison.warning for row in rows if row.comparison.warning]
        alarms += [alarm for row in rows if (alarm := untrained_alarm(row.base, row.trained))]
    return [*lines, *outcome.notes, *(f"stored: {path}" for path in outcome.files)], alarms


def report_all(outcomes: Sequence[Outcome]) -> tuple[list[str], list[str]]:
    """Several targets side by side, then what is suspiciously alike between them, and those alarms alone."""
    from lockstep.evaluation.alarms import identity_alarms
    from lockstep.evaluation.table import estimate_line
    from lockstep.scoring.against import label
    from lockstep.track.text import plain_table

    scored = [(outcome.target.label, score) for outcome in outcomes for score in outcome.scores]
    modes = list(dict.fromkeys(label(score) for _, score in scored))
    rows = [
        (label(score), name, score.conditions.weights, score.conditions.numerics, estimate_line(score.estimates[0]))
        for name, score in sorted(scored, key=lambda one: modes.index(label(one[1])))
    ]
    table = plain_table("all targets", ("set and mode", "target", "weights", "numerics", "accuracy"), rows)
    # A model and a fresh adapter over it are one base: they may well say the same.
    bases = {outcome.untrained: outcome for outcome in reversed(outcomes) if outcome.untrained}
    apart = [outcome for outcome in outcomes if bases.get(outcome.untrained, outcome) is outcome]
    alarms = identity_alarms([(outcome.target.label, score) for outcome in apart for score in outcome.scores])
    return [table, *(f"alarm: {alarm}" for alarm in alarms)], alarms


def score_lines(scores: Sequence[Score]) -> list[str]:
    """Return a row for each score and number: value, standard error and 95 % interval in per cent, and what one item is worth."""
    from lockstep.evaluation.intervals import item_points
    from lockstep.evaluation.table import error_of
    from lockstep.track.text import plain_table

    rows = [
        (
            score.conditions.task,
            score.conditions.mode,
            one.name,
            str(one.items),
            f"{one.value:.1%}{error_of(one.se)} [{one.low:.1%}, {one.high:.1%}]",
            f"{item_points(one.items):.3g} points",
            str(score.unscored),
            f"{score.truncated:.1%}",
            f"{score.mean_tokens:.1f}",
        )
        for score in scores
        for one in score.estimates
    ]
    columns = ("task", "mode", "number", "items", "accuracy ± s.e.", "1 item", "unscored", "truncated", "tokens")
    return plain_table("", columns, rows).split("\n")


def outside_of(outcome: Outcome, expected: tuple[float, float]) -> list[str]:
    """Return a sentence for each score of the target, not of its base, that is outside."""
    low, high = expected
    return [
        f"{outcome.target.label}: {score.conditions.mode} is {score.accuracy:.1%}"
        for score in outcome.scores
        if not low <= score.accuracy <= high
    ]


# --- arguments ------------------------------------------------------------------------------------------------------
def choose_modes(recipe: Recipe, names: str, chosen: EvalSet | None = None) -> list[EvalMode]:
    """Return the modes that `--mode` asks for, of a set its own; greedy, sampled and the fixed ones always exist.

    Raises ConfigError for a name that is none.
    """
    modes = (chosen.modes if chosen else []) or recipe.eval.modes
    found = [mode for name in names.split(",") for mode in _modes_called(modes, name.strip())]
    return list({mode.name: mode for mode in found}.values())


def _modes_called(modes: Sequence[EvalMode], name: str) -> list[EvalMode]:
    from pydantic import ValidationError

    from lockstep.config.evaluate import preset_mode
    from lockstep.config.schema import EvalMode

    if name == "all":
        return list(modes)
    if known := [mode for mode in modes if mode.name == name]:
        return known
    try:
        preset = preset_mode(name)
    except ValidationError as error:  # avg@1
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError([f"--mode {name}: {reason}"], fix="take 2 to 100,000 samples, or greedy_pass@1") from None
    if preset is not None:
        return [preset]
    match name:
        case "greedy":
            return [mode for mode in modes if mode.temperature == 0 and mode.samples == 1] or [EvalMode()]
        case "sampled":
            return [mode for mode in modes if mode.temperature > 0] or [EvalMode(name="sampled", temperature=1.0)]
        case _:
            names = dict.fromkeys(("greedy", "sampled", "all", *(m.name for m in modes), "avg@N", "pass@K", "maj@N"))
            raise ConfigError([f"--mode {name}: there is no such mode; there are {', '.join(names)}"])


def choose_sets(recipe: Recipe, role: str | None, items: int | None) -> list[EvalSet]:
    """Return the recipe's sets, or the one that `--role` asks for; `items` is for all of them."""
    from lockstep.config.schema import EvalSet

    sets = [one for one in recipe.eval.sets if role in (None, one.role)]
    sets = sets or [EvalSet.model_validate({"role": role, "items": recipe.eval.items})]
    return [one.model_copy(update={"items": items}) for one in sets] if items else sets


def split_arguments(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Targets and overrides. A word with = is an override, unless it is a file or names a target (name=path).

    Raises ConfigError without a target.
    """
    overrides = [word for word in args.target if "=" in word and not Path(word).exists() and not named(word)[0]]
    names = [word for word in args.target if word not in overrides]
    if not names:
        raise ConfigError(["no target was given"], fix="give a run, a checkpoint or a model as the first argument")
    return names, [*overrides, *args.set]


def one_target(args: argparse.Namespace, done: str) -> tuple[str, list[str]]:
    """Return the one target and the overrides. Raises ConfigError unless one target is given. `done`: what is done with it."""
    names, overrides = split_arguments(args)
    if len(names) > 1:
        what = f"{names[1]}: only one target can be {done} at a time"
        raise ConfigError([what], fix="leave it out; overrides have the form section.setting=value")
    return names[0], overrides


def named(word: str) -> tuple[str, str]:
    """("", word), or the name and the path of name=path: a name is neither a setting nor has one's dots, or the path exists."""
    from lockstep.config.schema import Recipe

    match = NAMED.fullmatch(word)
    if match is None or Path(word).exists():
        return "", word
    name, path = match[1], match[2]
    setting = name.split(".")[0] in Recipe.model_fields
    return (name, path) if not setting and ("." not in name or Path(path).exists()) else ("", word)


def positive(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def share_range(text: str) -> tuple[float, float]:
    """LO:HI as two shares, for argparse; an end that is left out is open."""
    match = RANGE.fullmatch(text)
    try:
        low, high = (float(match[1] or 0), float(match[2] or 1)) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if not 0 <= low <= high <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of accuracies: write 0.5:0.7, 0.5: or :0.7")
    return low, high


class Progress:
    """One line on a terminal that counts replies; silent where standard error is a file or a pipe."""

    def __init__(self, mode: str, step: int) -> None:
        self._title = f"{mode} at step {step}"
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown:
            end = "\r\033[K" if done == total else ""
            print(f"\r{self._title}: {done}/{total} replies{end}", end="", file=sys.stderr, flush=True)
