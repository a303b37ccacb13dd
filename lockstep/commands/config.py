"""`lockstep config`: show, check, explain settings. Loads no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lockstep.config import help as settings
from lockstep.config.load import dump, load, load_run
from lockstep.config.search import find, nearest
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
    return 0


def facts(recipe: Recipe) -> list[tuple[str, str]]:
    """Summary of a recipe: batch arithmetic, the learning rate in force, when it evaluates and saves."""
    warmup = recipe.optimizer.warmup_steps
    warm = f"after {warmup} warm-up steps" if warmup else "no warm-up"
    origin = (
        "set" if recipe.optimizer.lr is not None else f"default of {recipe.loop} with adapter {recipe.adapter.kind}"
    )
    modes = ", ".join(f"{mode.name} (T={mode.temperature:g} x {mode.samples})" for mode in recipe.eval.modes)
    saves = _steps(recipe.steps, recipe.save.every, at_start=False)
    evals = _steps(recipe.steps, recipe.eval.every, at_start=recipe.eval.at_start)
    evaluation = (
        f"{recipe.eval.items} items, {modes}, at steps {evals}"
        if recipe.eval.enabled
        else "never (eval.enabled: false)"
    )
    if recipe.sft is not None:
        size, steps = recipe.sft.sequences_per_step, recipe.steps
        run = (
            f"{steps} x {size} = {steps * size} rows" if recipe.sft.epochs is None else f"{recipe.sft.epochs:g} epochs"
        )
        work = [
            ("rows", f"{size} a step of at most {recipe.sft.max_tokens} tokens, loss on {recipe.sft.train_on}"),
            ("optimizer steps", f"one a step; {run}"),
        ]
    else:
        work = _rl_facts(recipe)
    return [
        ("model", f"{recipe.model.path}, adapter {recipe.adapter.kind}"),
        ("loop", recipe.loop),
        ("task", recipe.task.kind),
        *work,
        ("learning rate", f"{recipe.lr:g} ({origin}), {recipe.optimizer.schedule}, {warm}"),
        ("evaluation", evaluation),
        ("checkpoints", f"at steps {saves}; the last {recipe.save.keep_last} are kept"),
    ]


def _rl_facts(recipe: Recipe) -> list[tuple[str, str]]:
    samples, updates = recipe.samples_per_step, recipe.updates_per_step
    return [
        ("samples", f"{samples} a step = {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples"),
        (
            "response tokens",
            f"at most {samples * recipe.rollout.max_tokens} a step = {samples} x {recipe.rollout.max_tokens}",
        ),
        (
            "optimizer steps",
            f"{recipe.steps * updates} = {recipe.steps} steps x {updates} of {recipe.samples_per_update} samples each",
        ),
    ]


def _steps(last: int, every: int, *, at_start: bool) -> str:
    """The steps at which something happens every so often and at the end. Example: "0, 20, 40, 50"."""
    first = [0] if at_start else []
    count = (last - 1) // every
    regular = [every * n for n in range(1, min(count, 4) + 1)]
    shown = [*regular[:3], "…"] if count > 4 else regular
    return ", ".join(str(step) for step in [*first, *shown, last])


def _help(prefix: str) -> list[str]:
    if lines := settings.help_lines(prefix):
        return lines
    if lines := find(prefix):
        return lines
    sections = dict.fromkeys(group.path for group in settings.groups() if group.path and "." not in group.path)
    near = nearest(prefix)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(sections)}"
    raise ConfigError([f"{prefix}: no setting starts with this; {hint}"])
