"""A training loop of your own, made from the parts of a recipe: python docs/examples/own_loop.py RECIPE [a.b=value ...]

REINFORCE with the group's mean as baseline. Weights are proven after every update; nothing is stored.
"""

import sys
from statistics import fmean

import lockstep
from lockstep.build.build import build_parts, build_task_of
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.types import Batch, LossInput, LossOutput, Rollout, Sampling, TrainSequence


def reinforce(x: LossInput) -> LossOutput:
    return LossOutput(-x.advantages_T * x.logprobs_T)


def sequence(one: Rollout, baseline: float, tokens: int, group: int) -> TrainSequence:
    advantages = tuple(((one.grade.reward or 0.0) - baseline) * mask for mask in one.trained)
    return TrainSequence(one.prompt_ids, one.ids, one.trained, one.logprobs, advantages, 1 / tokens, group)


recipe = lockstep.recipe(*sys.argv[1:])
parts = build_parts(recipe, build_task_of(recipe))
task, engine, learner, sync = parts.task, parts.engine, parts.learner, parts.sync
sync.push(learner, engine)
for step in range(recipe.steps):
    prompts, sampling = task.batch(step, recipe.prompts_per_step), Sampling(recipe.rollout.max_tokens)
    groups = make_rollouts(
        engine, parts.policy.chat, task, prompts, recipe.samples_per_prompt, sampling, (recipe.seed, step),
        learner.version, AsyncGrader(task),
    )  # fmt: skip
    scored = [[one for one in group.rollouts if one.grade.scored] for group in groups]
    baselines = [fmean(one.grade.reward for one in rollouts) if rollouts else 0.0 for rollouts in scored]
    tokens = sum(sum(one.trained) for rollouts in scored for one in rollouts)
    batch = [sequence(one, baselines[i], tokens, i) for i, rollouts in enumerate(scored) for one in rollouts]
    metrics = learner.update(Batch(tuple(batch)), reinforce)
    proof = sync.push(learner, engine)
    print(
        f"step {step + 1}: reward {fmean(baselines):.3f}, gradient {metrics['grad/norm']:.3f}, weights {proof.fingerprint}"
    )
