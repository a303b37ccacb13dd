"""`lockstep probe`: measures before a run whether replies have the format, and whether there is anything to learn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.commands.eval import ROLES, Progress, add_target_arguments, find_targets, positive
from lockstep.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from lockstep.config.schema import EvalMode, Recipe
    from lockstep.scoring.targets import Target
    from lockstep.types import Score

FORMAT_ITEMS, HEADROOM_ITEMS, HEADROOM_SAMPLES = 100, 50, 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `probe format|headroom TARGET`."""
    parser = subparsers.add_parser("probe", help="measure the format rate, or how much there is to learn, before a run")
    actions = parser.add_subparsers(dest="action", metavar="PROBE", required=True)
    form = actions.add_parser(
        "format", help="greedy replies with a boxed answer: go at 95 percent, no-go (exit 7) below"
    )
    room = actions.add_parser("headroom", help="pass@1, pass@k and the share of mixed groups, with advice")
    for action, items, role in ((form, FORMAT_ITEMS, "id_probe"), (room, HEADROOM_ITEMS, "train")):
        add_target_arguments(action)
        action.add_argument("--items", type=positive, default=items, metavar="N", help=f"questions (default {items})")
        action.add_argument(
            "--role",
            choices=ROLES,
            default=role,
            help=f"which set (default {role})",
        )
        action.add_argument("--out", type=Path, metavar="DIR", help="store the score here")
        action.add_argument("--max-tokens", type=positive, metavar="N", help="longest reply, instead of the recipe's")
    room.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help=f"of each question (default samples_per_prompt, at least {HEADROOM_SAMPLES})",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and advise. Raises EvaluationError (7) if the format is a no-go."""
    from lockstep.config.evaluate import GREEDY, EvalMode
    from lockstep.evaluation.probes import format_lines, headroom_lines, probe_format, probe_headroom

    args.set = [*args.set, *([f"eval.max_tokens={args.max_tokens}"] if args.max_tokens else [])]
    args.all_checkpoints, args.numerics = False, None
    (target, *others) = find_targets(args)
    if others:
        raise ConfigError(
            [f"{others[0].label}: only one target can be probed at a time"], fix="probe the targets one after the other"
        )
    if args.action == "format":
        score = measure(target, args, EvalMode(name=GREEDY))
        form = probe_format(score.results)
        print("\n".join(format_lines(form)))
        if not form.passed:
            raise EvaluationError(f"no-go: {form.what} in {form.rate:.1%} of replies, below 95 %", where=target.label)
        return 0
    samples = args.samples or max(HEADROOM_SAMPLES, target.recipe.samples_per_prompt)
    score = measure(target, args, headroom_mode(target.recipe, samples))
    group = target.recipe.samples_per_prompt
    print("\n".join(headroom_lines(probe_headroom(score.results, samples, group), group)))
    return 0


def headroom_mode(recipe: Recipe, samples: int) -> EvalMode:
    """Return the mode of training samples: at their temperature."""
    from lockstep.config.schema import EvalMode

    if samples < 2:
        raise ConfigError(
            ["--samples is too low: a group needs at least two samples"], fix="set --samples to 8 or more"
        )
    return EvalMode(name="headroom", temperature=recipe.rollout.temperature, samples=samples)


def measure(target: Target, args: argparse.Namespace, mode: EvalMode) -> Score:
    """Return one score of the target's weights, stored only with --out; prints what was asked."""
    from lockstep.config.schema import EvalSet
    from lockstep.evaluation.records import write_score
    from lockstep.evaluation.table import score_line
    from lockstep.scoring.score import measure_once

    chosen = EvalSet(role=args.role, items=args.items)
    for note in target.notes:
        print(f"warning: {note}")
    score = measure_once(target, chosen, mode, Progress(mode.name, target.step))
    print(
        f"{target.label}: weights {score.conditions.weights} in {score.conditions.numerics}, {args.items} items of {args.role}"
    )
    print(
        f"{score.conditions.mode}: {score_line(score)}; {score.truncated:.0%} cut off at {score.conditions.max_tokens} tokens"
    )
    if args.out:
        from lockstep.scoring.score import file_name

        path = args.out / file_name(target, mode.name, target.step)
        write_score(path, score)
        print(f"stored: {path}")
    return score
