"""Sample and grade the groups of a step's prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from lockstep.build.parts import Parts
from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.schema import Recipe
from lockstep.errors import HealthStop
from lockstep.rollout.episodes import Table, make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.run.logger import Clock
from lockstep.tasks.file import FileRows
from lockstep.tasks.mixed import Mixed
from lockstep.types import Group, Metrics, NativeRollouts, Prompt, Request, RolloutEngine, Sampling, Task


def sampling_of(recipe: Recipe) -> Sampling:
    """Return the sampling settings of training."""
    r = recipe.rollout
    return Sampling(r.max_tokens, r.temperature, r.top_k, r.top_p, r.min_p, tuple(r.stop), r.ignore_eos)


def sample_groups(parts: Parts, recipe: Recipe, prompts: Sequence[Prompt], step: int, clock: Clock) -> list[Group]:
    """Sample and grade the groups of `prompts`, in order.

    A sample is a function of (run, step, prompt, sample), and in an episode of the turn and the text before it.
    """
    grader = AsyncGrader(parts.task, beside=parts.beside)
    seed = (recipe.seed, "rollout", step)
    with clock("rollout"):
        groups = make_rollouts(
            parts.engine,
            parts.policy.chat,
            parts.task,
            prompts,
            recipe.samples_per_prompt,
            sampling_of(recipe),
            seed,
            parts.learner.version,
            grader,
            clock.progress("rollout"),
        )
    clock.move(grader.held, "rollout", "grade")
    clock.add(grader.metrics)
    return groups


def first_requests(parts: Parts, recipe: Recipe, prompts: Sequence[Prompt], step: int) -> list[Request]:
    """Return the requests with which `sample_groups` will begin after the next update; none if environments or programs take
    part.
    """
    task, samples, seed = parts.task, recipe.samples_per_prompt, (recipe.seed, "rollout", step)
    if any(task.runner(prompt) is not None or task.programs(prompt) is not None for prompt in prompts):
        return []
    grader, version = AsyncGrader(task, beside=parts.beside), parts.learner.version + 1
    table = Table(parts.engine, parts.policy.chat, task, sampling_of(recipe), seed, version, grader, samples)
    return table.begin([(prompt, sample) for prompt in prompts for sample in range(samples)])


def processed(engine: RolloutEngine) -> tuple[int, int]:
    """Return the numbers of tokens that went through the model so far and that were reused; an engine may count none."""
    return (engine.processed, engine.reused) if isinstance(engine, NativeRollouts) else (0, 0)


def episode_metrics(groups: Sequence[Group], engine: RolloutEngine, before: tuple[int, int]) -> Metrics:
    """Return metrics of a step's episodes; nothing if all its prompts were questions with one reply. `before`: what the engine
    had processed when the step began.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    episodes = [one for one in rollouts if one.turns]
    if not episodes:
        return {}
    counted = zip(("env/tokens_processed", "env/tokens_reused"), processed(engine), before, strict=True)
    tokens = {name: float(now - then) for name, now, then in counted} if isinstance(engine, NativeRollouts) else {}
    return tokens | {
        "env/episodes": float(len(episodes)),
        "env/turns": fmean(one.turns for one in episodes),
        "env/tokens_sampled": float(sum(one.sampled for one in rollouts)),
        "env/tokens_observed": fmean(sum(len(row.ids) for row in one.rows) - one.sampled for one in episodes),
        "env/branches": fmean(len(one.rows) for one in episodes),
        "env/out_of_turns": fmean(one.cut == "turns" for one in episodes),
        "env/tool_errors": fmean(one.grade.metrics.get("tool_errors", 0.0) for one in episodes),
        "env/timeouts": float(sum(one.cut == "timeout" for one in episodes)),
        "env/failures": float(sum(one.cut == "error" for one in episodes)),
    }


def check_prompts(chat: ChatFormat, prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    """Raise ChatError for a prompt that leaves no room for a reply."""
    for prompt in prompts:
        tokens = len(chat.render_prompt(prompt))
        if context is not None:
            check_length(prompt.id, tokens, max_tokens, context)


def check_pool(chat: ChatFormat, task: Task, max_tokens: int, context: int | None) -> None:
    """Run `check_prompts` on every question of a data file, so that a bad row ends the run before it starts, not at step 900.

    One prompt of each sequence of roles is rendered, and every prompt whose text makes it doubtful; the others are like the
    first.
    """
    pool = _file_prompts(task)
    kinds = list({tuple(message["role"] for message in prompt.messages): prompt for prompt in reversed(pool)}.values())
    check_prompts(chat, kinds, max_tokens, context)
    frame = max((len(chat.render_prompt(prompt)) for prompt in kinds), default=0)
    room = math.inf if context is None else context - max_tokens - frame
    check_prompts(chat, [prompt for prompt in pool if chat.doubtful(prompt, room)], max_tokens, context)


def _file_prompts(task: Task) -> Sequence[Prompt]:
    if isinstance(task, Mixed):
        return [prompt for member in task.members for prompt in _file_prompts(member)]
    return task.train if isinstance(task, FileRows) else ()


def check_scored(groups: Sequence[Group], recipe: Recipe, step: int) -> str:
    """Return a warning if too many replies could not be scored; raises HealthStop above the limit."""
    failed = [r for group in groups for r in group.rollouts if not r.grade.scored]
    share = len(failed) / sum(len(group.rollouts) for group in groups)
    if share <= recipe.health.warn_unscored:
        return ""
    first = failed[0]
    text = f"{len(failed)} replies ({share:.1%}) could not be scored; the first, {first.prompt.id}: {first.grade.error}"
    kinds = Counter(str(r.grade.error) for r in failed)
    if len(kinds) > 1:
        text += "; most often: " + "; ".join(f"{count} times {error}" for error, count in kinds.most_common(3))
    if share > recipe.health.max_unscored:
        raise HealthStop(text, where=f"step {step}", fix="fix the verifier, or raise health.max_unscored")
    return text
