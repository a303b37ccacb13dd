"""`lockstep preflight`: one table that says whether a run of a recipe would start, and whether it is worth starting.

First come plan, doctor and the checks of a start. Then the real weights are used: for the share of replies with the right
format, the room for learning, and a few steps of training in a temporary folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, get_args

from lockstep.commands.eval import positive
from lockstep.commands.plan import add_allow, load_allowed

if TYPE_CHECKING:
    from lockstep.config.schema import EvalMode, Recipe
    from lockstep.doctor.check import Check
    from lockstep.evaluation.probes import Headroom
    from lockstep.types import Score

FORMAT_ITEMS, HEADROOM_ITEMS, SMOKE_STEPS = 40, 12, 6
SHOWN = ("reward/mean", "advantage/std", "grad/norm", "length/truncated")
"""Metrics of the last step of the short run that are printed."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `preflight RECIPE...`."""
    parser = subparsers.add_parser(
        "preflight", help="plan, doctor, format rate, headroom and a few steps in one table: would the run start?"
    )
    parser.add_argument("recipe", nargs="+", metavar="RECIPE|a.b=c", help="recipe files and overrides; later ones win")
    add_allow(parser)
    for name, number, what in (
        ("items", FORMAT_ITEMS, "held-out questions of the format rate"),
        ("headroom-items", HEADROOM_ITEMS, "training questions of the headroom"),
        ("smoke-steps", SMOKE_STEPS, "steps of the short run"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=number, metavar="N", help=f"{what} (default {number})")


def run(args: argparse.Namespace) -> int:
    """Print a line a check. Returns 1 if one failed, else 0. Raises ConfigError for a recipe with mistakes.

    What needs the weights is left out once something failed that would end the run.
    """
    recipe = load_allowed(args)  # first: what comes next loads torch, and a mistake is told without that wait
    from lockstep.doctor.check import lines, worst
    from lockstep.doctor.run import doctor
    from lockstep.loops.preflight import start_checks

    found: list[Check] = []
    for check in chain(doctor(recipe), start_checks(recipe)):
        found.append(check)
        if check.verdict != "ok":
            print("\n".join(lines(check)), flush=True)
    print(f"{'ok':<5} {'doctor':<14} {sum(check.verdict == 'ok' for check in found)} of {len(found)} checks")
    failed = worst(found) == "fail"
    for check in () if failed else _measured(recipe, args):
        found.append(check)
        print("\n".join(lines(check)), flush=True)
    if failed:
        print("format rate, headroom, time and short run were left out: the run would end before them")
    failed = worst(found) == "fail"
    print(f"\nverdict: `lockstep train` would {'not start, or be of no use: see fail' if failed else 'start'}")
    return int(failed)


def _measured(recipe: Recipe, args: argparse.Namespace) -> Iterator[Check]:
    """Yield the checks that load the model."""
    from lockstep.device import free_memory
    from lockstep.doctor.check import Check
    from lockstep.errors import LockstepError
    from lockstep.loops.preflight import with_known_steps

    recipe = with_known_steps(recipe)
    checks: list[tuple[str, Callable[[Recipe, argparse.Namespace], Check]]] = [("time", _time)]
    if recipe.task.kind != "none":
        checks.insert(0, ("format", _format))
    if recipe.loop == "rl":
        checks += [("headroom", _headroom), ("smoke", _smoke)]
    for name, check in checks:
        try:
            found = check(recipe, args)
        except LockstepError as error:
            found = Check.failed(name, error)
        finally:
            free_memory()  # of the model that the check loaded
        yield found


def _time(recipe: Recipe, args: argparse.Namespace) -> Check:
    from lockstep.doctor.check import Check
    from lockstep.loops.timing import measure_timing, timing_lines

    return Check("time", "ok", "; ".join(timing_lines(measure_timing(recipe), recipe)))


def _format(recipe: Recipe, args: argparse.Namespace) -> Check:
    from lockstep.config.evaluate import GREEDY, EvalMode
    from lockstep.doctor.check import Check
    from lockstep.evaluation.probes import format_lines, probe_format

    held = _there(recipe, "id_probe", args.items)
    role = "id_probe" if held else "train"  # before a run these are as good: the model was trained on neither
    score = _score(recipe, role, held or _there(recipe, "train", args.items), EvalMode(name=GREEDY))
    if not any(one.boxed is not None or one.method or one.extracted is not None for one in score.results):
        return Check("format", "ok", "the grader does not say what it read: no format to measure")
    probe = probe_format(score.results)
    said = format_lines(probe)
    found = f"{said[0]}; {score.truncated:.0%} cut off at {score.conditions.max_tokens} tokens"
    if probe.passed:
        return Check("format", "ok", found)
    return Check("format", "fail" if probe.sure else "warn", f"{found}; {said[3]}", said[-1])


def _headroom(recipe: Recipe, args: argparse.Namespace) -> Check:
    from lockstep.commands.probe import HEADROOM_SAMPLES, headroom_mode
    from lockstep.evaluation.probes import headroom_lines, probe_headroom

    group = recipe.samples_per_prompt
    samples = max(HEADROOM_SAMPLES, group)
    items = _there(recipe, "train", args.headroom_items)
    score = _score(recipe, "train", items, headroom_mode(recipe, samples))
    probe = probe_headroom(score.results, samples, group)
    return judged(probe, group, headroom_lines(probe, group)[-1].removeprefix("advice: "))


def judged(probe: Headroom, group: int, advice: str) -> Check:
    """Return the check of a headroom for a recipe with groups of `group`."""
    from lockstep.doctor.check import Check
    from lockstep.evaluation.probes import EASY, HARD, MIXED

    right = f"{probe.solve_rate:.1%} right"
    if group == 1:  # nothing is compared within a group
        found, fits = f"{right}; mixed groups: not applicable to samples_per_prompt=1", HARD <= probe.solve_rate <= EASY
        if probe.never == 1:
            return Check("headroom", "fail", f"{found}: no reply is right", advice)
    else:
        share = dict(probe.mixed)[group]
        found, fits = f"{right}, {share:.0%} of groups of {group} have right and wrong replies", share >= MIXED
        if probe.never == 1 or probe.always == 1:
            return Check("headroom", "fail", f"{found}: no group has a gradient", advice)
    return Check("headroom", "ok" if fits else "warn", found, "" if fits else advice)


def _smoke(recipe: Recipe, args: argparse.Namespace) -> Check:
    """Train a few steps in a folder that is deleted; the run's own rules judge them."""
    import contextlib
    import io
    import tempfile
    from pathlib import Path

    from lockstep.doctor.check import Check
    from lockstep.loops.start import start_run
    from lockstep.track.files import existing
    from lockstep.track.writer import read_metrics

    with tempfile.TemporaryDirectory(dir=existing(Path(recipe.runs_dir)), prefix=".lockstep-smoke-") as folder:
        short = _shortened(recipe, args.smoke_steps, folder)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            rows = read_metrics(start_run(short))
    shown = ", ".join(f"{name} {rows[-1].metrics[name]:.3g}" for name in SHOWN if name in rows[-1].metrics)
    warned = [line.strip() for line in said.getvalue().splitlines() if line.startswith("warning: ")]
    return Check("smoke", "warn" if warned else "ok", f"{short.steps} steps: {shown}", "; ".join(warned[:3]))


def _shortened(recipe: Recipe, steps: int, folder: str) -> Recipe:
    """Return the recipe with `steps` steps, without evaluations and trackers; a longer warm-up ends with them."""
    from lockstep.config.load import load_mapping
    from lockstep.config.schema import Allowable

    tree = recipe.model_dump(mode="json")
    noise = recipe.noise
    steps = min(steps + recipe.critic_steps, recipe.steps)
    updates = (steps - recipe.critic_steps) * recipe.updates_per_step
    warmup = min(recipe.optimizer.warmup(recipe.policy_updates), updates - 1)
    tree |= {"runs_dir": folder, "steps": steps, "eval": {"enabled": False}, "save": {"every": steps}, "track": {}}
    tree["paths"] |= {"checkpoints": None}
    tree["optimizer"] |= {"warmup_steps": warmup, "warmup_ratio": 0.0}
    tree["allow"] = [*get_args(Allowable)]  # the recipe itself was judged
    if noise is not None:
        tree["noise"]["stages"] = min(noise.stages, steps)
    return load_mapping(tree, where=f"{steps} steps of {recipe.name}")


def _there(recipe: Recipe, role: str, most: int) -> int:
    """Return how many questions of a role the task has, at most `most`; a task tells by refusing to give more."""
    from lockstep.errors import TaskError
    from lockstep.tasks.build import build_task

    task = build_task(recipe.task, recipe.seed)

    def gives(count: int) -> bool:
        try:
            return len(task.batch(0, count) if role == "train" else task.heldout(role, count)) == count
        except TaskError:
            return False

    low, high, count = 0, most, most
    while low < high:
        low, high = (count, high) if gives(count) else (low, count - 1)
        count = (low + high + 1) // 2
    return low


def _score(recipe: Recipe, role: str, items: int, mode: EvalMode) -> Score:
    """Return a score of the weights that the run would start from."""
    from lockstep.config.schema import EvalSet
    from lockstep.scoring.score import measure_once
    from lockstep.scoring.targets import Target

    return measure_once(
        Target(recipe.model.path, recipe, 0), EvalSet.model_validate({"role": role, "items": items}), mode
    )
