"""From prompts to graded groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, HealthStop
from lockstep.loops.grading import Grader
from lockstep.seeds import seed_for
from lockstep.tasks.file import FileRows
from lockstep.tasks.mixed import Mixed
from lockstep.types import (
    Completion,
    Group,
    Prompt,
    Request,
    RolloutEngine,
    Sampling,
    Task,
)


def sampling_of(recipe: Recipe) -> Sampling:
    """How training samples are drawn."""
    r = recipe.rollout
    return Sampling(r.max_tokens, r.temperature, r.top_k, r.top_p, r.min_p, tuple(r.stop), r.ignore_eos)


def sample_groups(
    engine: RolloutEngine,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    step: int,
    version: int,
    take: Callable[[Prompt, Completion], None] | None = None,
) -> list[list[Completion]]:
    """One list of completions per prompt, samples in order. A sample is a function of (run, step, prompt, sample).

    `take` is given each completion as it comes, while the engine samples the others.
    """
    sampling = sampling_of(recipe)
    requests, asked = [], {}
    for prompt in prompts:
        ids = chat.render_prompt(prompt)
        for sample in range(recipe.samples_per_prompt):
            seed = seed_for(recipe.seed, "rollout", step, prompt.id, sample)
            name = f"{step}/{prompt.id}/{sample}"
            asked[name] = prompt
            requests.append(Request(name, ids, prompt.id, seed, sampling, version, chat.shared_prefix(ids)))
    engine.submit(requests)
    done = {}
    for completion in engine.completed():
        done[completion.request.id] = completion
        if take is not None:
            take(asked[completion.request.id], completion)
    if missing := [request.id for request in requests if request.id not in done]:
        raise EngineError(f"{len(missing)} requests were never completed", where=missing[0])
    return [[done[f"{step}/{prompt.id}/{sample}"] for sample in range(recipe.samples_per_prompt)] for prompt in prompts]


def check_prompts(chat: ChatFormat, prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    """Raise ChatError for a prompt that leaves no room for a reply."""
    for prompt in prompts:
        tokens = len(chat.render_prompt(prompt))
        if context is not None:
            check_length(prompt.id, tokens, max_tokens, context)


def check_pool(chat: ChatFormat, task: Task, max_tokens: int, context: int | None) -> None:
    """`check_prompts` for every question of a data file, so that no run ends at step 900 for a row that was there at the start.

    Rendered are one prompt of each sequence of roles, and those whose text makes them doubtful: the rest is like the first.
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


def grade_groups(
    task: Task, chat: ChatFormat, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
) -> list[Group]:
    """Decode and grade; ids are kept as they were sampled."""
    with Grader(task, chat) as grader:
        for prompt, row in zip(prompts, completions, strict=True):
            for completion in row:
                grader.take(prompt, completion)
        return grader.groups(prompts, completions)


def check_scored(groups: Sequence[Group], recipe: Recipe, step: int) -> str:
    """A warning if too many replies could not be scored; raises HealthStop above the limit."""
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
