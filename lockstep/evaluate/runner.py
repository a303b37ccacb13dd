"""One evaluation: held-out prompts in, a score with all its conditions out. It never trains and keeps no state."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.numerics import numeric_in
from lockstep.config.schema import EvalMode
from lockstep.data.questions import data_hash
from lockstep.envs.driver import Ask, Played, PlayedTask, play, plays
from lockstep.errors import EvaluationError, StaleWeightsError
from lockstep.evaluate.brief import default_estimate
from lockstep.evaluate.estimates import estimate
from lockstep.evaluate.plan import EvalPlan, eval_sampling, mode_label
from lockstep.seeds import seed_for
from lockstep.types import (
    Completion,
    Conditions,
    FinishReason,
    Grade,
    ItemResult,
    Prompt,
    Proof,
    Request,
    RolloutEngine,
    Score,
    Task,
)
from lockstep.verifiers.beside import Grading


def evaluate(
    engine: RolloutEngine,
    task: Task,
    chat: ChatFormat,
    mode: EvalMode,
    plan: EvalPlan,
    proof: Proof,
    *,
    step: int,
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Sample a reply (or mode.samples) to every held-out item, grade them, and say under which conditions.

    `proof` is of the engine's present weights; `step` counts the trained steps that they have behind them; `source` names
    them; `progress` is called with the replies done and asked for. Nothing is drawn from any global random state.

    Raises StaleWeightsError unless the proof passed and is of the engine's version, before and after, or if the engine computes
    with noise; ChatError for a
    prompt that leaves no room for a reply; EvaluationError if the task gives other items than asked, the engine does
    not answer every request exactly once, or no reply could be scored.
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
            f"none of {len(results)} replies could be scored; the first: {graded[0][1].error or 'no reason given'}",
            where=f"task {conditions.task}, mode {conditions.mode}",
            fix="check the verifier",
        )
    seconds = time.perf_counter() - started
    return score_of(results, conditions, mode.samples, step, proof, seconds, numbers=mode.numbers, source=source)


def graded_replies(
    engine: RolloutEngine,
    task: Task,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    mode: EvalMode,
    plan: EvalPlan,
    proof: Proof,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[ItemResult, Grade]]:
    """`mode.samples` replies to each prompt, or episodes that it begins, in their order: as a score records them, and graded.

    Raises as `evaluate` does, but for replies that cannot be scored.
    """
    if plays(task):
        played = play_items(engine, task, chat, prompts, mode, plan, progress)
        require_proof(engine, proof)
        return played
    with Grading(task) as grading:
        engine.submit(eval_requests(prompts, chat, mode, plan, proof.version))
        completions = collect(engine, chat, prompts, mode.samples, proof, grading, progress)
        return [
            _result_of(chat, prompt, sample, completions[id], grading.grade(id))
            for prompt in prompts
            for sample in range(mode.samples)
            if (id := request_id(prompt, sample))
        ]


def require_proof(engine: RolloutEngine, proof: Proof) -> None:
    """Raise StaleWeightsError unless `proof` passed and is of the weights that the engine has now, without noise on them."""
    if not proof.passed:
        names = ", ".join(proof.mismatched[:5]) or "the log-probability probe"
        raise StaleWeightsError(
            f"the proof of version {proof.version} failed ({names}), so a score would be of unknown weights",
            where="evaluation",
            fix="push the weights again; if the proof fails again, report it with events.jsonl",
        )
    if proof.version != engine.version:
        raise StaleWeightsError(
            f"the engine has version {engine.version}, the proof is of version {proof.version}",
            where="evaluation",
            fix="push the learner's weights and use the proof that push returns",
        )
    noise = engine.forward.noise
    if noise is not None:
        raise StaleWeightsError(
            f"the engine computes with noise of sigma {noise.sigma:g} on {len(noise.targets)} norms",
            where="evaluation",
            fix="take the noise off (set_forward) before evaluating; a score is never of noisy weights",
        )


def require_numerics(engine: RolloutEngine, label: str) -> None:
    """Raise EvaluationError unless the engine computes in what the score will be labelled with."""
    computed = engine.forward.numerics
    if computed != numeric_in(label):
        raise EvaluationError(
            f"the score would be labelled {label}, and the engine computes in {computed or 'the precision of the weights'}",
            where="numerics.eval",
            fix="set the engine's numerics first (set_forward)",
        )


def heldout_items(task: Task, plan: EvalPlan) -> Sequence[Prompt]:
    """The items of a plan: held out, or for the role train those of a first step.

    Raises EvaluationError if they are fewer or more than planned, or an id comes twice.
    """
    train = plan.role == "train"
    prompts = task.batch(0, plan.items) if train else task.heldout(plan.role, plan.items)
    if len(prompts) != plan.items:
        raise EvaluationError(
            f"{plan.items} items of {plan.role} were asked for, the task has {len(prompts)}",
            where=f"task {task.name}",
            fix=f"set eval.items={len(prompts)} (of `lockstep eval`: --items {len(prompts)})"
            if prompts
            else f"give the task held-out items for {plan.role}",
        )
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise EvaluationError(f"item {prompt.id} comes twice", where=f"task {task.name}", fix="make ids unique")
        seen.add(prompt.id)
    return prompts


def score_conditions(
    prompts: Sequence[Prompt], task: Task, chat: ChatFormat, mode: EvalMode, plan: EvalPlan, proof: Proof
) -> Conditions:
    """Everything that the score will depend on; known before anything is sampled, so a stored score can be reused."""
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
    """What the template is told about thinking. Examples: "", "reasoning_effort=high", "enable_thinking=False"."""
    settings = chat.chat.template_kwargs
    return ",".join(f"{name}={settings[name]}" for name in sorted(settings) if re.search("reason|think", name))


def play_items(
    engine: RolloutEngine,
    task: PlayedTask,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    mode: EvalMode,
    plan: EvalPlan,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[ItemResult, Grade]]:
    """The items of a task of several turns, played to their ends; the seeds of first replies are those of `eval_requests`."""
    asks = []
    for prompt in prompts:
        if plan.context is not None:
            check_length(prompt.id, len(chat.render_prompt(prompt)), plan.max_tokens, plan.context)
        for sample in range(mode.samples):
            seed = ("eval", plan.seed, prompt.id, sample)
            asks.append(Ask(request_id(prompt, sample), prompt, seed, eval_sampling(mode, plan), engine.version))
    found: dict[str, Played] = {}
    for played in play(engine, chat, task, asks):
        found[played.ask.key] = played
        if progress is not None:
            progress(len(found), len(asks))
    order = [(prompt, sample) for prompt in prompts for sample in range(mode.samples)]
    return [_of_episode(chat, prompt, sample, found[request_id(prompt, sample)]) for prompt, sample in order]


def eval_requests(
    prompts: Sequence[Prompt], chat: ChatFormat, mode: EvalMode, plan: EvalPlan, version: int
) -> list[Request]:
    """One request a sample. A sample's seed depends on the plan's seed, the item and the sample, not on the step."""
    sampling = eval_sampling(mode, plan)
    requests = []
    for prompt in prompts:
        ids = chat.render_prompt(prompt)
        if plan.context is not None:
            check_length(prompt.id, len(ids), plan.max_tokens, plan.context)
        for sample in range(mode.samples):
            seed = seed_for("eval", plan.seed, prompt.id, sample)
            name, prefix = request_id(prompt, sample), chat.shared_prefix(ids)
            requests.append(Request(name, ids, prompt.id, seed, sampling, version, prefix))
    return requests


def request_id(prompt: Prompt, sample: int) -> str:
    """Example: "chain_sum/17#0"."""
    return f"{prompt.id}#{sample}"


def collect(
    engine: RolloutEngine,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    samples: int,
    proof: Proof,
    grading: Grading,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Completion]:
    """All completions by request id, each given to `grading` as it comes. Raises if one is missing, unasked for, double, or of
    other weights."""
    expected = {request_id(prompt, sample): prompt for prompt in prompts for sample in range(samples)}
    found: dict[str, Completion] = {}
    for completion in engine.completed():
        id = completion.request.id
        if completion.version != proof.version:
            raise StaleWeightsError(
                f"was sampled by version {completion.version}, the proof is of version {proof.version}",
                where=f"reply {id}",
                fix="load no weights while an evaluation runs",
            )
        if id not in expected or id in found:
            raise EvaluationError(
                "the engine returned it twice" if id in found else "the engine returned it unasked",
                where=f"reply {id}",
                fix="let the engine finish other work before an evaluation",
            )
        found[id] = completion
        grading.submit(id, expected[id], chat.answer(completion.ids))
        if progress is not None:
            progress(len(found), len(expected))
    if missing := sorted(expected.keys() - found.keys()):
        raise EvaluationError(
            f"the engine returned no reply for {len(missing)} of {len(expected)} requests, first {missing[0]}",
            where="evaluation",
            fix="report this engine",
        )
    require_proof(engine, proof)
    return found


def is_correct(grade: Grade) -> bool | None:
    """Whether a grade counts as right: its metric `correct` if it has one, else a reward of at least 1.

    None, which is unscored, without a reward or with one that is no finite number.
    """
    if grade.reward is None or not math.isfinite(grade.reward):
        return None
    return bool(grade.metrics.get("correct", grade.reward) >= 1.0)


def score_of(
    results: tuple[ItemResult, ...],
    conditions: Conditions,
    samples: int,
    step: int,
    proof: Proof | None,
    seconds: float,
    *,
    numbers: Sequence[str] = (),
    source: str = "",
) -> Score:
    """All numbers of graded replies, of which at least one is scored; the first of `numbers` is the accuracy."""
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
    )


def _of_episode(chat: ChatFormat, prompt: Prompt, sample: int, played: Played) -> tuple[ItemResult, Grade]:
    grade, tokens = played.grade, sum(played.trained)
    return _result(prompt, sample, grade, chat.decode(played.ids), played.finish, tokens), grade


def _result_of(
    chat: ChatFormat, prompt: Prompt, sample: int, completion: Completion, grade: Grade
) -> tuple[ItemResult, Grade]:
    text = chat.decode(completion.ids)
    return _result(prompt, sample, grade, text, completion.finish, len(completion.ids)), grade


def _result(prompt: Prompt, sample: int, grade: Grade, text: str, finish: FinishReason, tokens: int) -> ItemResult:
    correct = is_correct(grade)
    boxed = grade.metrics.get("boxed")
    return ItemResult(
        id=prompt.id,
        sample=sample,
        correct=correct,
        reward=None if correct is None or grade.reward is None else float(grade.reward),
        extracted=grade.extracted,
        answer=prompt.answer,
        text=text,
        truncated=finish is FinishReason.LENGTH,
        tokens=tokens,
        method=grade.method,
        boxed=None if boxed is None else boxed >= 1,
        error=grade.error,
    )
