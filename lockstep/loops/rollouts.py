"""From prompts to graded groups."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.chat.chat import ChatFormat, check_length
from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, HealthStop
from lockstep.seeds import seed_for
from lockstep.types import (
    Completion,
    Group,
    Prompt,
    Request,
    Rollout,
    RolloutEngine,
    Sampling,
    Task,
)


def sampling_of(recipe: Recipe) -> Sampling:
    """How training samples are drawn."""
    r = recipe.rollout
    return Sampling(r.max_tokens, r.temperature, r.top_k, r.top_p, r.min_p, tuple(r.stop), r.ignore_eos)


def sample_groups(
    engine: RolloutEngine, chat: ChatFormat, prompts: Sequence[Prompt], recipe: Recipe, step: int, version: int
) -> list[list[Completion]]:
    """One list of completions per prompt, samples in order. A sample is a function of (run, step, prompt, sample)."""
    sampling = sampling_of(recipe)
    requests = []
    for prompt in prompts:
        ids = chat.render_prompt(prompt)
        for sample in range(recipe.samples_per_prompt):
            seed = seed_for(recipe.seed, "rollout", step, prompt.id, sample)
            name = f"{step}/{prompt.id}/{sample}"
            requests.append(Request(name, ids, prompt.id, seed, sampling, version, chat.shared_prefix(ids)))
    engine.submit(requests)
    done = {completion.request.id: completion for completion in engine.completed()}
    if missing := [request.id for request in requests if request.id not in done]:
        raise EngineError(f"{len(missing)} requests were never completed", where=missing[0])
    return [[done[f"{step}/{prompt.id}/{sample}"] for sample in range(recipe.samples_per_prompt)] for prompt in prompts]


def check_prompts(chat: ChatFormat, prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    """Raise ChatError for a prompt that leaves no room for a reply."""
    for prompt in prompts:
        tokens = len(chat.render_prompt(prompt))
        if context is not None:
            check_length(prompt.id, tokens, max_tokens, context)


def grade_groups(
    task: Task, chat: ChatFormat, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
) -> list[Group]:
    """Decode and grade; ids are kept as they were sampled."""

    def rollout(prompt: Prompt, sample: int, done: Completion) -> Rollout:
        text = chat.decode(done.ids)
        trained, grade = (True,) * len(done.ids), task.grade(prompt, text)
        ids, prompt_ids = done.ids, done.request.prompt_ids
        return Rollout(
            prompt,
            prompt_ids,
            ids,
            done.logprobs,
            trained,
            text,
            done.finish,
            done.version,
            grade,
            sample,
            done.request.prefix,
        )

    return [
        Group(prompt, tuple(rollout(prompt, sample, done) for sample, done in enumerate(row)))
        for prompt, row in zip(prompts, completions, strict=True)
    ]


def check_scored(groups: Sequence[Group], recipe: Recipe, step: int) -> str:
    """A warning if too many replies could not be scored; raises HealthStop above the limit."""
    failed = [r for group in groups for r in group.rollouts if not r.grade.scored]
    share = len(failed) / sum(len(group.rollouts) for group in groups)
    if share <= recipe.health.warn_unscored:
        return ""
    first = failed[0]
    text = f"{len(failed)} replies ({share:.1%}) could not be scored; the first, {first.prompt.id}: {first.grade.error}"
    if share > recipe.health.max_unscored:
        raise HealthStop(text, where=f"step {step}", fix="mend the verifier; health.max_unscored sets the limit")
    return text
