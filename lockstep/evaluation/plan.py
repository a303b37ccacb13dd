"""The evaluation plan of a recipe: the steps after which it evaluates, and the conditions of each score, also as text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import assert_never

from lockstep.config.evaluate import GREEDY, Gate
from lockstep.config.schema import (
    AgentTask,
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
    OpenEnvTask,
    OpenSpielTask,
    Plateau,
    PythonTask,
    ReasoningGymTask,
    Recipe,
    Task,
    TextArenaTask,
    ToolTask,
    VerifiersTask,
)
from lockstep.config.section import TAG, Section
from lockstep.config.verifier import CompositeVerifier, Verifier
from lockstep.types import Sampling
from lockstep.user_code import code_hash, texts_of

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
    """Return the verifier's kind and the settings that differ from its defaults; a user's task that grades itself: "own".

    A hash of the user's code follows, so that two graders of one name but another content are two graders. Code that makes rows
    is left out: the items have a hash of their own.
    """
    content = code_hash(texts_of(_without_data(recipe.task.model_dump(mode="json"))))
    return _label(recipe.task) + (f"#{content}" if content else "")


def _without_data(settings: object) -> object:
    if not isinstance(settings, dict):
        return settings
    return {name: _without_data(value) for name, value in settings.items() if name != "data"}


def _label(task: Task) -> str:
    match task:
        case NoTask():
            return "none"
        case PythonTask():
            return "own"
        case ToolTask() | AgentTask():
            return f"{_label(task.questions)}+{_changed(task, 'questions', 'running')}"
        case MixedTask():
            return "mixed(" + ",".join(f"{name}={_label(share.task)}" for name, share in task.tasks.items()) + ")"
        case EnvTask():
            return _changed(task, "grading")
        case OpenSpielTask():
            return _changed(task, "workers")
        case OpenEnvTask():
            return _changed(task, "sessions", "start_seconds")
        case GuessNumberTask() | GymnasiumTask() | TextArenaTask() | VerifiersTask():
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
    changed = ",".join(f"{name}={_without_env(value, name)}" for name, value in settings.items())
    kind = str(getattr(section, TAG))
    return f"{kind}({changed})" if changed else kind


def _without_env(value: object, name: str = "") -> object:
    """Return a setting with hashes of the values of environment variables: they may be secret, and labels are shown."""
    if isinstance(value, list):
        return [_without_env(one) for one in value]
    if not isinstance(value, dict):
        return value
    if name == "env":
        return {key: hashlib.sha256(str(one).encode()).hexdigest()[:8] for key, one in value.items()}
    return {key: _without_env(one, key) for key, one in value.items()}


def evaluation_steps(recipe: Recipe) -> tuple[int, ...]:
    """Return the trained steps after which a run evaluates: 0 is the base model, and the last step is always among them."""
    if not recipe.eval.enabled:
        return ()
    start = {0} if recipe.eval.at_start else set[int]()
    between = {step for one in recipe.eval.sets for step in range(one.every or 1, recipe.steps, one.every or 1)}
    judged = {step for step in recipe.eval.judged.steps if step < recipe.steps}
    return tuple(sorted(start | between | judged | {recipe.steps}))


def is_due(recipe: Recipe, chosen: EvalSet, step: int) -> bool:
    """Return whether a set is evaluated after this step, one of `evaluation_steps`."""
    always = (0, recipe.steps, *recipe.eval.judged.steps)
    return step in always or step % (chosen.every or recipe.eval.every) == 0


def replies_in_all(recipe: Recipe) -> int:
    """Return the replies that all evaluations of a run draw. Steps are counted, not listed."""
    if not recipe.eval.enabled:
        return 0
    return sum(_rounds(recipe, one) * one.items * mode.samples for one, mode in recipe.eval.pairs)


def _rounds(recipe: Recipe, chosen: EvalSet) -> int:
    """Return how often a set is evaluated."""
    regular = range(chosen.every or recipe.eval.every, recipe.steps, chosen.every or recipe.eval.every)
    more = {step for step in recipe.eval.judged.steps if step < recipe.steps and step not in regular}
    return recipe.eval.at_start + len(regular) + len(more) + 1


def plan_lines(recipe: Recipe) -> list[str]:
    """Return the lines that a run prints about its evaluations before it starts."""
    from lockstep.evaluation.intervals import resolution  # needs numpy, which `config check` does without

    if not recipe.eval.enabled:
        return ["will not evaluate at all: eval.enabled is false"]
    steps = [str(step) for step in evaluation_steps(recipe)]
    steps[-1] += " (last)"
    if len(steps) > _SHOWN:
        total = len(steps)
        steps = [*steps[:4], "…", *steps[-2:]]
        steps[-1] += f", {total} times in all"
    reply, settings = eval_plan(recipe, numerics="").max_tokens, recipe.eval
    what = ", ".join(_in_words(mode) for mode in settings.modes)
    what += ", " + ", ".join(f"{one.items} items of {one.role}" for one in settings.sets)
    if any(one.every or one.modes for one in settings.also):
        own = (
            f"{one.items} items of {one.role} every {one.every}: {', '.join(map(_in_words, one.modes))}"
            for one in settings.sets
        )
        what = "; ".join(own)
    lines = [f"will evaluate at steps {', '.join(steps)}: {what}, replies of up to {reply} tokens"]
    if settings.lm_eval:
        tasks = (f"{one.name} ({one.path}{f', {one.items} items' if one.items else ''})" for one in settings.lm_eval)
        lines.append(f"will measure tasks of lm-eval at the same steps: {', '.join(tasks)}")
    if settings.judged.steps:
        at = ", ".join(map(str, settings.judged.steps))
        lines.append(
            f"will be judged at steps {at}; success: {', and '.join(map(gate_words, settings.gates))}, at one of them"
        )
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


def gate_words(gate: Gate) -> str:
    """Example: "greedy improves", "greedy reaches 50 %"."""
    return f"{gate.score} {gate.rule}" + (f" {100 * gate.limit:g} %" if gate.limit else "")


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
