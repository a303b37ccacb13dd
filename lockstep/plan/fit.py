"""Whether a recipe's settings mean something in its model, asked of the model's structure before its weights are read.

The model is built on the meta device, which takes a second and no memory, and asked by the functions that a run uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lockstep.config.adapter import Lora
from lockstep.config.schema import Recipe
from lockstep.errors import ConfigError, LockstepError, ModelError
from lockstep.plan.preview import folder_here
from lockstep.plan.shapes import meta_model
from lockstep.track.catalogue import explain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETTER = {
    "rl": (
        "reward/mean",
        "reward/shaped_mean",
        "answer/correct",
        "reward/min",
        "reward/p90",
        "answer/[^/]+",
        "task/[^/]+/[^/]+",
    ),
    "sft": ("validation/logprob",),
}
"""Metrics of each loop of which more is better, as patterns."""


def misfits(recipe: Recipe) -> list[LockstepError]:
    """What would end a run of this recipe once the model is there, each with its fix. Of the model nothing if it is not here,
    runs code of its own, or its folder is damaged (`lockstep doctor` says so elsewhere)."""
    found = list(_raised(lambda: _best(recipe)))
    folder = None if recipe.model.trust_remote_code else folder_here(recipe.model)
    if folder is None:
        return found
    try:
        model = meta_model(folder)
    except ModelError:
        return found
    checks: list[Callable[[Recipe, PreTrainedModel], None]] = [_family, _adapter, _numerics, _noise, _context]
    return found + [error for check in checks for error in _raised(lambda check=check: check(recipe, model))]  # type: ignore[misc]


def require_fit(recipe: Recipe) -> None:
    """Raise the first of `misfits`."""
    for error in misfits(recipe):
        raise error


def _raised(check: Callable[[], None]) -> Iterator[LockstepError]:
    try:
        check()
    except LockstepError as error:
        yield error


def _best(recipe: Recipe) -> None:
    """save.keep_best names a metric of this loop of which more is better."""
    name = recipe.save.keep_best
    if name is None or name.startswith("eval/"):  # those the recipe's own validation knows
        return
    try:
        explain(name)
    except ConfigError as error:
        raise ConfigError([f"save.keep_best: {each}" for each in error.mistakes], fix=error.fix) from None
    good = BETTER[recipe.loop]
    if not re.fullmatch("|".join(good), name):
        shown = ", ".join(["eval/greedy/accuracy", *(each for each in good if "[" not in each)])
        raise ConfigError(
            [f"save.keep_best = {name}: the highest is kept, and more of it is no better model, or it is not measured"],
            fix=f"take one of {shown}",
        )


def _family(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.plan.family import require_family

    require_family(type(model), model.config)


def _adapter(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.learner.adapter_start import refuse_small
    from lockstep.learner.adapter_targets import choose_targets

    if recipe.adapter.kind == "none":
        return
    chosen = choose_targets(model, recipe.adapter.targets)
    adapter = recipe.adapter
    if isinstance(adapter, Lora) and adapter.init in ("pissa", "olora") and not adapter.start:
        refuse_small({name: model.get_parameter(f"{name}.weight") for name in chosen.layers}, adapter.rank)


def _numerics(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.numerics.apply import numerics_of

    numerics_of(model, recipe.numerics.scale, recipe.numerics.exclude)


def _noise(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.noise.targets import find_targets

    if recipe.noise is not None:
        find_targets(model, recipe.noise)


def _context(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.models.decoder import context_of

    context = context_of(model.config)
    if context is None:
        return
    rows = recipe.sft.max_tokens if recipe.sft is not None else 0
    replies = {"rollout": recipe.rollout.max_tokens if recipe.loop == "rl" else 0}
    replies |= {"eval": (recipe.eval.max_tokens or 0) if recipe.eval.enabled else 0}
    mistakes = [f"sft.max_tokens = {rows} is more than the model's context of {context}"] if rows > context else []
    mistakes += [
        f"{section}.max_tokens = {tokens} leaves no room for a prompt in the model's context of {context}"
        for section, tokens in replies.items()
        if tokens >= context
    ]
    if mistakes:
        raise ConfigError(mistakes, fix=f"set it below {context}, or take a model with a longer context")
