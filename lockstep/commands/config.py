"""`lockstep config`: shows, checks and explains settings. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import help as settings
from lockstep.config.foreign_files import read_settings, system_of
from lockstep.config.foreign_settings import SYSTEMS
from lockstep.config.load import dump, load, load_run
from lockstep.config.search import find, nearest
from lockstep.config.translate import translate
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe

_RECIPE = "recipe file, name of a built-in recipe, or override section.setting=value; later ones win"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `config show|check|help|schema`."""
    parser = subparsers.add_parser("config", help="show and check recipes, explain settings")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the resolved recipe: every value that a run would use")
    check = actions.add_parser("check", help="print what a recipe amounts to, or every mistake in it (exit 2)")
    for action in (show, check):
        action.add_argument("recipe", nargs="+", metavar="RECIPE|a.b=c", help=_RECIPE)
    explain = actions.add_parser("help", help="one line for each setting: path, type, default, allowed values, meaning")
    explain.add_argument(
        "prefix", nargs="*", help="only settings whose path starts with this; or a word: reward, learning rate, kl"
    )
    actions.add_parser("schema", help="print the JSON schema of a recipe, for editors")
    translate = actions.add_parser("translate", help="print a recipe made from a file of verl, OpenRLHF or TRL")
    translate.add_argument("file", type=Path, help="script, YAML, JSON or Python file; it is not executed")
    translate.add_argument(
        "--from", dest="system", choices=list(SYSTEMS), help="the file's system; else its words tell"
    )
    translate.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes of accelerate or torchrun (TRL; default: as the file says, else 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was asked for. Raises ConfigError for a recipe with mistakes."""
    match args.action:
        case "show":
            print(dump(load(args.recipe)), end="")
        case "check":
            recipe = load_run(args.recipe)
            print("\n".join([f"ok: {recipe.name}", *(f"  {name:<16} {fact}" for name, fact in facts(recipe))]))
            print(
                "only the settings were read; whether data, grader, model and machine are ready: lockstep doctor RECIPE"
            )
        case "help":
            print("\n".join(_help(" ".join(args.prefix))))
        case "schema":
            print(settings.schema_json())
        case "translate":
            text, given = read_settings(args.file)
            print(translate(args.system or system_of(text), given, args.ranks).text(), end="")
    return 0


def facts(recipe: Recipe) -> list[tuple[str, str]]:
    """Summary of a recipe: batch arithmetic, the learning rate in force, when it evaluates and saves."""
    from lockstep.evaluation.plan import evaluation_steps

    warmup = recipe.optimizer.warmup(recipe.policy_updates)
    warm = f"after {warmup} warm-up steps" if warmup else "no warm-up"
    origin = (
        "set" if recipe.optimizer.lr is not None else f"default of {recipe.loop} with adapter {recipe.adapter.kind}"
    )
    modes = ", ".join(dict.fromkeys(f"{m.name} (T={m.temperature:g} x {m.samples})" for _, m in recipe.eval.pairs))
    regular = range(recipe.save.every, recipe.steps, recipe.save.every)
    saves, evals = _shown([*regular[:5], recipe.steps]), _shown(evaluation_steps(recipe))
    evaluation = (
        f"{recipe.eval.items} items, {modes}, at steps {evals}"
        if recipe.eval.enabled
        else "never (eval.enabled: false)"
    )
    if recipe.sft is not None:
        size, count, epochs = recipe.sft.sequences_per_step, recipe.steps, recipe.sft.epochs
        run = f"{count} x {size} = {count * size} rows" if epochs is None else f"{epochs:g} epochs"
        work = [
            ("rows", f"{size} a step of at most {recipe.sft.max_tokens} tokens, loss on {recipe.sft.train_on}"),
            ("optimizer steps", f"one a step; {run}"),
        ]
    else:
        samples, updates, longest = recipe.samples_per_step, recipe.updates_per_step, recipe.rollout.max_tokens
        steps = f"{recipe.steps} steps x {updates} of {recipe.samples_per_update} samples each"
        work = [
            ("samples", f"{samples} a step = {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples"),
            ("response tokens", f"at most {samples * longest} a step = {samples} x {longest}"),
            ("optimizer steps", f"{recipe.steps * updates} = {steps}"),
        ]
    return [
        ("model", f"{recipe.model.path}, adapter {recipe.adapter.kind}"),
        ("loop", recipe.loop),
        ("task", recipe.task.kind),
        *work,
        ("learning rate", f"{recipe.lr:g} ({origin}), {recipe.optimizer.schedule}, {warm}"),
        ("evaluation", evaluation),
        ("checkpoints", f"at steps {saves}; the last {recipe.save.keep_last} are kept"),
    ]


def _shown(steps: Sequence[int]) -> str:
    """Return the first steps and the last. Example: "0, 20, 40, …, 200"."""
    start = 4 if steps and steps[0] == 0 else 3
    shown = [*steps[:start], "…", steps[-1]] if len(steps) > start + 2 else steps
    return ", ".join(map(str, shown))


def _help(prefix: str) -> list[str]:
    if lines := settings.help_lines(prefix):
        return lines
    if lines := find(prefix):
        return lines
    sections = dict.fromkeys(group.path for group in settings.groups() if group.path and "." not in group.path)
    near = nearest(prefix)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(sections)}"
    raise ConfigError([f"{prefix}: no setting starts with this; {hint}"])
