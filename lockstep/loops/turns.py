"""Groups of episodes of several turns: played through the engine, graded by their environments."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.envs.driver import Ask, Played, PlayedTask, play
from lockstep.loops.journal import Clock
from lockstep.loops.rollouts import sampling_of
from lockstep.types import Group, Metrics, Prompt, Rollout, RolloutEngine
from lockstep.verifiers.beside import Grading


def play_groups(
    engine: RolloutEngine,
    chat: ChatFormat,
    task: PlayedTask,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    step: int,
    version: int,
    clock: Clock,
) -> tuple[list[Group], Metrics]:
    """The groups of the prompts, samples in order, and what their environments did; `clock` is in its phase rollout.

    A reply is a function of (run, step, prompt, sample, turn) and of what was said before it, whatever else is played.
    """
    asks = [
        Ask(
            f"{step}/{prompt.id}/{sample}",
            prompt,
            (recipe.seed, "rollout", step, prompt.id, sample),
            sampling_of(recipe),
            version,
        )
        for prompt in prompts
        for sample in range(recipe.samples_per_prompt)
    ]
    grading = Grading(task)
    done = {played.ask.key: played for played in play(engine, chat, task, asks, grading)}
    clock.move(grading.held, "rollout", "grade")
    clock.add(grading.metrics)
    ordered = iter([done[ask.key] for ask in asks])
    groups = [
        Group(prompt, tuple(rollout_of(next(ordered), sample, chat) for sample in range(recipe.samples_per_prompt)))
        for prompt in prompts
    ]
    return groups, turn_metrics(list(done.values()))


def rollout_of(played: Played, sample: int, chat: ChatFormat) -> Rollout:
    """An episode as one response: all tokens after the first prompt, of which those that were sampled are trained."""
    return Rollout(
        played.ask.prompt,
        played.prompt_ids,
        played.ids,
        played.logprobs,
        played.trained,
        chat.decode(played.ids),
        played.finish,
        played.version,
        played.grade,
        sample,
        played.prefix,
        played.turn_rewards,
    )


def turn_metrics(played: Sequence[Played]) -> Metrics:
    """How the episodes of a step went; nothing if all its prompts were questions with one reply."""
    episodes = [one for one in played if one.episode]
    if not episodes:
        return {}
    return {
        "env/episodes": float(len(episodes)),
        "env/turns": fmean(len(one.replies) for one in episodes),
        "env/tokens_sampled": float(sum(len(reply.completion.ids) for one in played for reply in one.replies)),
        "env/tokens_observed": fmean(len(one.ids) - sum(one.trained) for one in episodes),
        "env/out_of_turns": fmean(one.out_of_turns for one in episodes),
        "env/tool_errors": fmean(one.grade.metrics.get("tool_errors", 0.0) for one in episodes),
        "env/timeouts": float(sum(one.fault == "timeout" for one in episodes)),
        "env/failures": float(sum(one.fault == "error" for one in episodes)),
    }
