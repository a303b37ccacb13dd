"""Steps at which a recipe evaluates, and the conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from lockstep.config.evaluate import GREEDY
from lockstep.config.schema import (
    Drops,
    EnvTask,
    EvalMode,
    EvalSet,
    FileTask,
    GuessNumberTask,
    GymnasiumTask,
    JudgeVerifier,
    MixedTask,
    NoStop,
    NoTask,
    OpenSpielTask,
    Plateau,
    PythonTask,
    ReasoningGymTask,
    Recipe,
    Task,
    TextArenaTask,
    ToolTask,
)
from lockstep.config.section import TAG, Section
from lockstep.config.verifier import CompositeVerifier, Verifier
from lockstep.evaluate.intervals import resolution
from lockstep.types import Sampling

_SHOWN = 12
"""Number of steps written out in a plan; in longer plans the middle is left out."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The common settings of all evaluations of a run; with the mode and the weights they determine a score.

    Example: EvalPlan("smollm2-135m-instruct", "fp32", "native", "id_probe", 200, 64, 0, "numeric")
    """

    model: str
    """Model as named in the recipe."""
    numerics: str
    """Precision of the weights that sample. Example: "bf16"."""
    engine: str
    """Kind of the engine. Example: "native"."""
    role: str
    """Set of held-out items."""
    items: int
    max_tokens: int
    seed: int
    """Seed of sampled modes. The same at every step, so that only the weights differ between two scores."""
    verifier: str
    """Short name of the grading; part of a score's task. Example: "numeric(fallback=last_number)"."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    context: int | None = None
    """Longest sequence that the model takes; None if it has no limit."""


def eval_plan(recipe: Recipe, numerics: str, context: int | None = None, chosen: EvalSet | None = None) -> EvalPlan:
    """Return the plan of a recipe for a set of items (without one its main set); `numerics` is the label of what computes."""
    chosen = chosen or recipe.eval.sets[0]
    return EvalPlan(
        model=recipe.model.path if recipe.model.revision is None else f"{recipe.model.path}@{recipe.model.revision}",
        numerics=numerics,
        engine=recipe.rollout.engine,
        role=chosen.role,
        items=chosen.items,
        max_tokens=recipe.eval.max_tokens or recipe.rollout.max_tokens,
        seed=recipe.seed,
        verifier=verifier_label(recipe),
        stop=tuple(recipe.rollout.stop),
        context=context,
    )


def verifier_label(recipe: Recipe) -> str:
    """Return the verifier's kind and the settings that differ from its defaults; a user's task that grades itself: "own"."""
    return _label(recipe.task)


def _label(task: Task) -> str:
    match task:
        case NoTask():
            return "none"
        case PythonTask():
            return "own"
        case ToolTask():
            return f"{_label(task.questions)}+{_changed(task, 'questions')}"
        case MixedTask():
            return "mixed(" + ",".join(f"{name}={_label(share.task)}" for name, share in task.tasks.items()) + ")"
        case EnvTask():
            return _changed(task, "grading")
        case OpenSpielTask():
            return _changed(task, "workers")
        case GuessNumberTask() | GymnasiumTask() | TextArenaTask():
            return _changed(task)
        case ReasoningGymTask() | FileTask():
            return _label_of_verifier(task.verifier)
        case _:
            assert_never(task)


def _label_of_verifier(verifier: Verifier) -> str:
    """Return the label of a verifier. A judge changes with the model behind its address and with the day, so its label contains
    more than its settings.
    """
    parts = verifier.parts if isinstance(verifier, CompositeVerifier) else ()
    judges = [v for v in (verifier, *(part.verifier for part in parts)) if isinstance(v, JudgeVerifier)]
    if not judges:
        return _changed(without_workers(verifier))
    from lockstep.verifiers.judge import label

    return f"{_changed(without_workers(verifier))}+{'+'.join(map(label, judges))}"


def without_workers(verifier: Verifier) -> Verifier:
    """Return the verifier with the default number of processes, which affects no verdict."""
    if isinstance(verifier, CompositeVerifier):
        parts = [part.model_copy(update={"verifier": without_workers(part.verifier)}) for part in verifier.parts]
        return verifier.model_copy(update={"parts": parts})
    if "workers" not in type(verifier).model_fields:
        return verifier
    return verifier.model_copy(update={"workers": type(verifier).model_fields["workers"].default})


def _changed(section: Section, *without: str) -> str:
    """Return a section's kind and the settings that are not its defaults."""
    settings = section.model_dump(exclude={TAG, *without}, exclude_defaults=True)
    changed = ",".join(f"{name}={value}" for name, value in settings.items())
    kind = str(getattr(section, TAG))
    return f"{kind}({changed})" if changed else kind


def evaluation_steps(recipe: Recipe) -> tuple[int, ...]:
    """Return the trained steps after which a run evaluates: 0 is the base model, and the last step is always among them."""
    if not recipe.eval.enabled:
        return ()
    start = (0,) if recipe.eval.at_start else ()
    between = tuple(range(recipe.eval.every, recipe.steps, recipe.eval.every))
    return (*start, *between, recipe.steps)


def plan_lines(recipe: Recipe) -> list[str]:
    """Return the lines that a run prints about its evaluations before it starts."""
    if not recipe.eval.enabled:
        return ["will not evaluate at all: eval.enabled is false"]
    steps = [str(step) for step in evaluation_steps(recipe)]
    steps[-1] += " (last)"
    if len(steps) > _SHOWN:
        total = len(steps)
        steps = [*steps[:4], "…", *steps[-2:]]
        steps[-1] += f", {total} times in all"
    modes = ", ".join(_in_words(mode) for mode in recipe.eval.modes)
    reply = eval_plan(recipe, numerics="").max_tokens
    sets = ", ".join(f"{one.items} items of {one.role}" for one in recipe.eval.sets)
    lines = [f"will evaluate at steps {', '.join(steps)}: {modes}, {sets}, replies of up to {reply} tokens"]
    if len(recipe.eval.sets) == 1:
        lines.append(resolution(recipe.eval.items))
    else:
        lines += [f"{one.role}: {resolution(one.items)}" for one in recipe.eval.sets]
    lines += [
        f"{one.role} is measured only for information" for one in recipe.eval.sets if one.role in ("sanity", "train")
    ]
    lines += stop_lines(recipe)
    if not recipe.eval.at_start:
        lines.append("the base model is not evaluated: eval.at_start is false, so there is nothing to compare with")
    return lines


def stop_lines(recipe: Recipe) -> list[str]:
    """Return the stopping rule in words; nothing without one."""
    match recipe.eval.stop:
        case NoStop():
            return []
        case Drops() as rule:
            delta = f" by more than {100 * rule.min_delta:g} points" if rule.min_delta else ""
            return [f"will stop when {rule.metric} falls{delta} {rule.in_a_row} evaluations in a row"]
        case Plateau() as rule:
            return [
                f"will stop when the mean of {rule.smooth} evaluations of {rule.metric} has not risen by more than "
                f"{100 * rule.min_delta:g} points for {rule.patience} evaluations"
            ]
        case other:
            assert_never(other)


def eval_sampling(mode: EvalMode, plan: EvalPlan) -> Sampling:
    """Return the sampling of a mode: the whole distribution, whatever top_k, top_p or min_p training uses."""
    return Sampling(max_tokens=plan.max_tokens, temperature=mode.temperature, stop=plan.stop)


def mode_label(mode: EvalMode, stop: tuple[str, ...] = ()) -> str:
    """Return the mode as part of a score's conditions. Examples: "greedy", "sampled(T=1)", "sampled(T=0.6,n=8)".

    Every setting that affects a reply is in it, so that two modes of one name with other settings are not taken for the same.
    """
    parts = [] if mode.name in ("greedy", GREEDY) and mode.temperature == 0 else [f"T={mode.temperature:.10g}"]
    if mode.samples > 1:
        parts.append(f"n={mode.samples}")
        if mode.numbers[0] not in (mode.name, f"avg@{mode.samples}"):
            parts.append(mode.numbers[0])
    if stop:
        parts.append(f"stop={list(stop)!r}")
    return f"{mode.name}({','.join(parts)})" if parts else mode.name


def _in_words(mode: EvalMode) -> str:
    samples = f", {mode.samples} samples: {', '.join(mode.numbers)}" if mode.samples > 1 else ""
    return f"{mode.name} (T={mode.temperature:g}{samples})"
