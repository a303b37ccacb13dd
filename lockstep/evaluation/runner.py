"""Runs one evaluation: from held-out prompts to a score with all its conditions. It never trains and keeps no state."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.numerics import numeric_in
from lockstep.config.schema import EvalMode
from lockstep.data.questions import data_hash
from lockstep.errors import EvaluationError, StaleWeightsError, TaskError
from lockstep.evaluation.brief import default_estimate
from lockstep.evaluation.estimates import estimate
from lockstep.evaluation.plan import EvalPlan, eval_sampling, mode_label
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.tasks.base import BuiltTask
from lockstep.types import Conditions, FinishReason, Grade, ItemResult, Prompt, Proof, Rollout, RolloutEngine, Score


def evaluate(
    engine: RolloutEngine,
    task: BuiltTask,
    chat: ChatFormat,
    mode: EvalMode,
    plan: EvalPlan,
    proof: Proof,
    *,
    step: int,
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Sample a reply (or mode.samples) to every held-out item, grade them, and record the conditions.

    `proof` must be of the engine's present weights; `step` counts their trained steps; `source` names them; `progress` is
    called with the numbers of replies done and requested. Nothing is drawn from any global random state.

    Raises StaleWeightsError unless the proof passed and is of the engine's version, before and after, or if the engine computes
    with noise; ChatError for a prompt that leaves no room for a reply; EvaluationError if the task gives other items than
    requested, the engine does not answer every request exactly once, or no reply could be scored.
    """
    require_proof(engine, proof)
    require_numerics(engine, plan.numerics)
    started = time.perf_counter()
    prompts = heldout_items(task, plan)
    conditions = score_conditions(prompts, task, chat, mode, plan, proof)
    graded = graded_replies(engine, task, chat, prompts, mode, plan, proof, progress)
    results = tuple(result for result, _ in graded)
    if all(result.correct is None for result in results):
        raise EvaluationError(
            f"none of the {len(results)} replies could be scored; the first reason: {graded[0][1].error or 'no reason given'}",
            where=f"task {conditions.task}, mode {conditions.mode}",
            fix="correct the verifier or the questions, as this reason says",
        )
    seconds = time.perf_counter() - started
    workers = workers_of(engine)
    return score_of(
        results, conditions, mode.samples, step, proof, seconds, workers, numbers=mode.numbers, source=source
    )


def graded_replies(
    engine: RolloutEngine,
    task: BuiltTask,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    mode: EvalMode,
    plan: EvalPlan,
    proof: Proof,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[ItemResult, Grade]]:
    """Return `mode.samples` graded replies to each prompt, or episodes that it begins, in order, as a score records them.

    Raises the errors of `evaluate`, except for replies that cannot be scored.
    """
    if plan.context is not None:
        for prompt in prompts:
            check_length(prompt.id, len(chat.render_prompt(prompt)), plan.max_tokens, plan.context)
    sampling, seed = (
        eval_sampling(mode, plan),
        ("eval", plan.seed),
    )  # without the step: each evaluation draws the same samples
    groups = make_rollouts(
        engine, chat, task, prompts, mode.samples, sampling, seed, proof.version, AsyncGrader(task), progress
    )
    require_proof(engine, proof)
    return [(item_result(rollout), rollout.grade) for group in groups for rollout in group.rollouts]


def require_proof(engine: RolloutEngine, proof: Proof) -> None:
    """Raise StaleWeightsError unless `proof` passed and is of the engine's present weights, without noise on them."""
    if not proof.passed:
        names = ", ".join(proof.mismatched[:5]) or "the log-probability probe"
        raise StaleWeightsError(
            f"the proof of version {proof.version} failed ({names}), so it is not known which weights a score would measure",
            where="evaluation",
            fix="push the weights to the engine again; if the proof fails again, report it with the run's events.jsonl",
        )
    if proof.version != engine.version:
        raise StaleWeightsError(
            f"the engine has weights of version {engine.version}, but the proof is for version {proof.version}",
            where="evaluation",
            fix="push the learner's weights, and pass the proof that push returns",
        )
    noise = engine.forward.noise
    if noise is not None:
        raise StaleWeightsError(
            f"noise of sigma {noise.sigma:g} is still applied to {len(noise.targets)} normalisation weights of the engine",
            where="evaluation",
            fix="remove the noise before the evaluation (engine.set_forward)",
        )


def require_numerics(engine: RolloutEngine, label: str) -> None:
    """Raise EvaluationError unless the engine computes in the numerics that the score will be labelled with."""
    computed = engine.forward.numerics
    if computed != numeric_in(label):
        raise EvaluationError(
            f"the score would be labelled {label}, but the engine computes in {computed or 'the precision of the weights'}",
            where="numerics.eval",
            fix="set the engine's numerics before the evaluation (engine.set_forward)",
        )


def heldout_items(task: BuiltTask, plan: EvalPlan, setting: str = "eval.items=") -> Sequence[Prompt]:
    """Return the items of a plan: held-out items or, for the role train, those of a first step.

    Raises EvaluationError or TaskError if their number is not the planned one, or an id comes twice. `setting`: the words before
    the number, for the error.
    """
    try:
        return _items(task, plan)
    except (EvaluationError, TaskError) as error:
        error.fix = error.fix.replace("eval.items=", setting)
        raise


def _items(task: BuiltTask, plan: EvalPlan) -> Sequence[Prompt]:
    train = plan.role == "train"
    prompts = task.batch(0, plan.items) if train else task.heldout(plan.role, plan.items)
    if len(prompts) != plan.items:
        raise EvaluationError(
            f"{plan.items} items of {plan.role} were requested, but the task gave {len(prompts)}",
            where=f"task {task.name}",
            fix=f"set eval.items={len(prompts)} (in `lockstep eval`: --items {len(prompts)})"
            if prompts
            else f"give the task held-out items for {plan.role}",
        )
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise EvaluationError(
                f"two items have the id {prompt.id}", where=f"task {task.name}", fix="give each item an id of its own"
            )
        seen.add(prompt.id)
    return prompts


def score_conditions(
    prompts: Sequence[Prompt], task: BuiltTask, chat: ChatFormat, mode: EvalMode, plan: EvalPlan, proof: Proof
) -> Conditions:
    """Return everything that the score will depend on; known before anything is sampled, so a stored score can be reused."""
    return Conditions(
        weights=proof.fingerprint,
        model=plan.model,
        numerics=plan.numerics,
        engine=plan.engine,
        mode=mode_label(mode, plan.stop),
        task=f"{task.name}/{plan.role}/{plan.verifier}",
        data_hash=data_hash(prompts),
        template_hash=chat.template_hash,
        max_tokens=plan.max_tokens,
        # A greedy score does not depend on the seed; naming one would make runs of other seeds incomparable.
        seed=0 if mode.temperature == 0 else plan.seed,
        reasoning_effort=reasoning_effort(chat),
        prompt_suffix=chat.chat.suffix,
    )


def reasoning_effort(chat: ChatFormat) -> str:
    """Return the template's setting for thinking. Examples: "", "reasoning_effort=high", "enable_thinking=False"."""
    settings = chat.chat.template_kwargs
    return ",".join(f"{name}={settings[name]}" for name in sorted(settings) if re.search("reason|think", name))


def is_correct(grade: Grade) -> bool | None:
    """Return whether a grade counts as right; None, which is unscored, also with a reward that is not a finite number."""
    return None if grade.reward is None or not math.isfinite(grade.reward) else grade.right


def score_of(
    results: tuple[ItemResult, ...],
    conditions: Conditions,
    samples: int,
    step: int,
    proof: Proof | None,
    seconds: float,
    workers: int = 1,
    *,
    numbers: Sequence[str] = (),
    source: str = "",
) -> Score:
    """Return all numbers of graded replies, of which at least one is scored; the first of `numbers` is the accuracy."""
    names = numbers or (default_estimate(samples),)
    estimates = tuple(estimate(results, name, samples) for name in names)
    return Score(
        conditions=conditions,
        accuracy=estimates[0].value,
        low=estimates[0].low,
        high=estimates[0].high,
        items=len({result.id for result in results}),
        samples=samples,
        unscored=sum(result.correct is None for result in results),
        truncated=sum(result.truncated for result in results) / len(results),
        mean_tokens=sum(result.tokens for result in results) / len(results),
        step=step,
        version=proof.version if proof else 0,
        proof=proof,
        results=results,
        seconds=seconds,
        estimates=estimates,
        source=source,
        workers=workers,
    )


def workers_of(engine: RolloutEngine) -> int:
    """Return the number of workers that sample: more than one if the engine deals its requests."""
    return int(getattr(engine, "workers", 1))


def item_result(rollout: Rollout) -> ItemResult:
    """Return a graded rollout as a score records it."""
    prompt, grade = rollout.prompt, rollout.grade
    correct = is_correct(grade)
    boxed = grade.metrics.get("boxed")
    return ItemResult(
        id=prompt.id,
        sample=rollout.sample,
        correct=correct,
        reward=None if correct is None or grade.reward is None else float(grade.reward),
        extracted=grade.extracted,
        answer=prompt.answer,
        text=rollout.text,
        truncated=rollout.finish is FinishReason.LENGTH,
        tokens=rollout.sampled,
        method=grade.method,
        boxed=None if boxed is None else boxed >= 1,
        error=grade.error,
    )
