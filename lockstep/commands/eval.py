"""`lockstep eval`: score a run, a checkpoint or a model on held-out problems, its base beside it.

It never trains. Weights are proven to be in the engine, and to be those that were saved, before anything is sampled.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from lockstep.config.schema import EvalMode, Recipe
    from lockstep.evaluate.plan import EvalPlan
    from lockstep.loops.target import Rig, Target
    from lockstep.types import Conditions, Proof, Score

RANGE = re.compile(r"([0-9.]*):([0-9.]*)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scores of one target, and of its base where that is evaluated beside it."""

    target: Target
    proof: Proof
    scores: tuple[Score, ...]
    base: tuple[Score, ...] = ()
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Measuring:
    """How one target is being measured, and what came of it so far."""

    target: Target
    rig: Rig
    plan: EvalPlan
    modes: Sequence[EvalMode]
    out: Path | None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `eval TARGET...`."""
    parser = subparsers.add_parser("eval", help="score a run, a checkpoint or a model, its base beside it")
    add_target_arguments(parser)
    parser.add_argument(
        "--mode", default="all", help="greedy, sampled, all, or a mode's name in the recipe (default all)"
    )
    parser.add_argument("--items", type=positive, metavar="N", help="held-out problems, instead of the recipe's number")
    parser.add_argument("--no-base", action="store_true", help="do not evaluate the base model beside")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the scores, instead of the run's own")
    parser.add_argument(
        "--expect", type=share_range, metavar="LO:HI", help="exit 7 if an accuracy is outside. Example: 0.5:0.7, 0.5:"
    )
    parser.add_argument(
        "--allow-mismatch", action="store_true", help="compare scores measured under different conditions, and say so"
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eval` and `sample` have in common."""
    parser.add_argument(
        "target",
        nargs="+",
        metavar="TARGET|a.b=c",
        help="run directory, checkpoint folder (runs/x/checkpoints/step_000010), or model; and overrides of the recipe",
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        action="extend",
        default=[],
        metavar="RECIPE|a.b=c",
        help="which task, as for train; needed for a model, else the run's own",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of the recipe")
    parser.add_argument(
        "--step", type=int, metavar="N", help="a run's checkpoint, instead of the newest; 0 is its base"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, store, print. Raises LockstepError: 7 if a score is outside of --expect or weights are not those saved."""
    from lockstep.loops.target import find_target

    names, overrides = split_arguments(args)
    overrides += [f"eval.items={args.items}"] if args.items else []
    targets = [find_target(name, args.recipe, overrides, args.step) for name in names]
    for target in targets:  # all of them, before anything slow
        choose_modes(target.recipe, args.mode)
    outside: list[str] = []
    for target in targets:
        outcome = evaluate_target(target, args.mode, args.out, base=not args.no_base, mismatch=args.allow_mismatch)
        print("\n".join(report(outcome, args.allow_mismatch)), flush=True)
        outside += outside_of(outcome, args.expect) if args.expect else []
    if outside:
        low, high = args.expect
        raise EvaluationError("; ".join(outside), where=f"expected {low:.1%} to {high:.1%}")
    return 0


def evaluate_target(target: Target, mode: str, out: Path | None, *, base: bool, mismatch: bool) -> Outcome:
    """All modes of one target, and with `base` of what it was trained from (a stored score is not measured again).

    A model has no base of its own; with `mismatch` the recipe's model is evaluated beside another one.
    """
    from lockstep.evaluate.plan import eval_plan
    from lockstep.loops.target import Target, build_rig

    rival: Outcome | None = None
    if base and mismatch and target.rival is not None:
        model = Target(target.rival.model.path, target.rival, 0)
        rival = evaluate_target(model, mode, out, base=False, mismatch=False)
    rig = build_rig(target.recipe)
    plan = eval_plan(target.recipe, rig.policy.numerics, rig.policy.context)
    measuring = Measuring(target, rig, plan, choose_modes(target.recipe, mode), out)
    measuring.notes += [f"warning: {note}" for note in target.notes]
    before = rival.scores if rival else ()
    if target.checkpoint is None:
        proof = rig.prove()
    else:
        saved = rig.read(target.checkpoint)  # first of all: what does not fit is refused before anything slow
        if base:
            before = _measure(measuring, rig.prove(), 0, reuse=True)
        proof = rig.prove_saved(saved)
    scores = _measure(measuring, proof, target.step, reuse=False)
    files = (*(rival.files if rival else ()), *measuring.files)
    return Outcome(target, proof, scores, before, files, tuple(measuring.notes))


def _measure(measuring: Measuring, proof: Proof, step: int, *, reuse: bool) -> tuple[Score, ...]:
    """One score a mode for the weights of `proof`; with `reuse`, stored ones under identical conditions stand."""
    from lockstep.evaluate.records import stored_score
    from lockstep.evaluate.runner import evaluate, heldout_items, score_conditions

    rig, plan, scores = measuring.rig, measuring.plan, []
    items = heldout_items(rig.task, plan)
    for mode in measuring.modes:
        conditions = score_conditions(items, rig.task, rig.policy.chat, mode, plan, proof)
        home = _home(measuring, mode, conditions, step)
        stored = stored_score(home, conditions)
        if stored is None or not reuse:
            score = evaluate(
                rig.engine, rig.task, rig.policy.chat, mode, plan, proof, step=step, progress=Progress(mode.name, step)
            )
        else:
            score = stored
            measuring.notes.append(f"{mode.name} at step {step}: measured before under the same conditions ({home})")
        if stored is not None and score is not stored:
            measuring.notes.append(_agreement(mode.name, score, stored, home))
        _store(measuring, score, stored, home, mode, step)
        scores.append(score)
    return tuple(scores)


def _agreement(mode: str, score: Score, stored: Score, path: Path) -> str:
    """Whether a second measurement of the same weights gave the same replies."""
    pairs = list(zip(score.results, stored.results, strict=True))
    differing = [a.id for a, b in pairs if a != b]
    if not differing:
        return f"{mode}: all {len(pairs)} replies are those of the stored score ({path})"
    return (
        f"warning: {mode}: {len(differing)} of {len(pairs)} replies differ from those of the stored score ({path}), "
        f"first {differing[0]}; the weights are the same, so look at device, threads and versions"
    )


def _home(measuring: Measuring, mode: EvalMode, conditions: Conditions, step: int) -> Path:
    """Where a score belongs if --out does not say otherwise.

    In a run, scores under the run's own conditions stand beside those of its training; others in a folder of their own, so
    that they never mix.
    """
    from lockstep.evaluate.plan import eval_plan
    from lockstep.evaluate.records import score_path

    target, recipe = measuring.target, measuring.target.recipe
    if target.run is None or target.trained is None:
        return Path(recipe.runs_dir) / "scores" / _file_name(target, mode.name, step)
    trained, path = target.trained, score_path(target.run, step, mode.name)
    plan = eval_plan(trained, measuring.rig.policy.numerics, measuring.rig.policy.context)
    if (plan, trained.task, trained.chat) == (measuring.plan, recipe.task, recipe.chat) and mode in trained.eval.modes:
        return path
    shared = dataclasses.asdict(replace(conditions, weights=""))
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
    return path.parent / digest / path.name


def _store(measuring: Measuring, score: Score, stored: Score | None, home: Path, mode: EvalMode, step: int) -> None:
    """Write the score, unless it is there already. A stored score under the same conditions stays as it was."""
    from lockstep.evaluate.records import write_score

    path = measuring.out / _file_name(measuring.target, mode.name, step) if measuring.out else home
    if path != home or stored is None:
        try:
            write_score(path, score)
        except OSError as error:
            what = f"the score cannot be written: {error.strerror}"
            raise EvaluationError(what, where=str(path), fix="name a folder with --out") from error
    measuring.files.append(path)


def _file_name(target: Target, mode: str, step: int) -> str:
    """Example: "mine_step_000040_greedy.json"."""
    named = target.run or (target.checkpoint.path if target.checkpoint else Path(target.recipe.model.path))
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", "_".join(named.parts[-2:]) if target.run is None else named.resolve().name)
    return f"{name.strip('_')}_step_{step:06d}_{mode}.json"


def report(outcome: Outcome, mismatch: bool) -> list[str]:
    """What is printed of one target: its proof, the table, the notes, the files."""
    from lockstep.evaluate.table import comparison_table, table_lines
    from lockstep.sync.record import proof_line

    target = outcome.target
    identity = "as saved" if target.checkpoint else "of the model's own files"
    lines = [
        f"{target.label}: weights {outcome.proof.fingerprint}, {identity}, in {outcome.scores[0].conditions.numerics}",
        proof_line(outcome.proof),
    ]
    if outcome.base:
        lines += table_lines(comparison_table(outcome.base, outcome.scores, mismatch))
    else:
        lines += score_lines(outcome.scores)
    return [*lines, *outcome.notes, *(f"stored: {path}" for path in outcome.files)]


def score_lines(scores: Sequence[Score]) -> list[str]:
    """Scores that are compared with nothing, a row each; accuracies in per cent with their 95 % intervals."""
    from lockstep.track.text import plain_table

    rows = [
        (
            score.conditions.task,
            score.conditions.mode,
            str(score.items),
            f"{score.accuracy:.1%} [{score.low:.1%}, {score.high:.1%}]",
            str(score.unscored),
            f"{score.truncated:.1%}",
            f"{score.mean_tokens:.1f}",
        )
        for score in scores
    ]
    columns = ("task", "mode", "items", "accuracy", "unscored", "truncated", "tokens")
    return plain_table("", columns, rows).split("\n")


def outside_of(outcome: Outcome, expected: tuple[float, float]) -> list[str]:
    """A sentence for each score of the target, not of its base, that is outside."""
    low, high = expected
    return [
        f"{outcome.target.label}: {score.conditions.mode} is {score.accuracy:.1%}"
        for score in outcome.scores
        if not low <= score.accuracy <= high
    ]


def choose_modes(recipe: Recipe, name: str) -> list[EvalMode]:
    """The recipe's modes that `--mode` asks for; greedy and sampled exist even if the recipe has none of their kind.

    Raises ConfigError for a name that is none.
    """
    from lockstep.config.schema import EvalMode

    modes = recipe.eval.modes
    if name == "all":
        return list(modes)
    if named := [mode for mode in modes if mode.name == name]:
        return named
    match name:
        case "greedy":
            return [mode for mode in modes if mode.temperature == 0] or [EvalMode()]
        case "sampled":
            return [mode for mode in modes if mode.temperature > 0] or [EvalMode(name="sampled", temperature=1.0)]
        case _:
            known = dict.fromkeys(["greedy", "sampled", "all", *(mode.name for mode in modes)])
            raise ConfigError([f"--mode {name}: there is no such mode; there are {', '.join(known)}"])


def split_arguments(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Targets and overrides, which are told apart by the = sign. Raises ConfigError without a target."""
    overrides = [word for word in args.target if "=" in word and not Path(word).exists()]
    names = [word for word in args.target if word not in overrides]
    if not names:
        raise ConfigError(["no target was given"], fix="name a run, a checkpoint or a model first")
    return names, [*overrides, *args.set]


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
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
        raise argparse.ArgumentTypeError(f"{text!r} is no range of accuracies: write 0.5:0.7, 0.5: or :0.7")
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
