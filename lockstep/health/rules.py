"""Health rules as data: metric, limit, meaning and advice.

Limits, patience and tiers are settings (lockstep.config.health.Health, a field for each rule here, of the same name). To add
a rule: append it here, and give it its field there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lockstep.config.health import Tier
from lockstep.config.schema import Recipe
from lockstep.track.metric import Drift

Against: TypeAlias = Literal["fixed", "clip", "start", "recent", "numerics", "checkpoint"]
"""What a limit is multiplied with: fixed nothing; clip optimizer.max_grad_norm; start and recent the run's own past; numerics
1, QUANTISED where rollouts compute in other numerics than updates, MAGNIFIED where either quantises activations;
checkpoint the planned size of a checkpoint in GiB."""

QUANTISED = 4.0
"""Rollouts in four or eight bits differ by so much more: 0.095 against 0.015 to 0.03 nats (NeMo RL, FP8 against bf16)."""
MAGNIFIED = 10.0
"""Where activations are in four bits, a learner and a GPU engine that hold the same weights differ by 0.41 nats instead of 0.018
(mxfp4-w4a4, a 1.5B model with random weights on an H200; benchmarks/results/gpu_numerics.txt)."""
START = Drift("start", 5)
RECENT = Drift("recent", 50)
SPARE_GIB = 0.25
"""Disk space to spare beside checkpoints: rollouts, scores and logs of the next steps."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong with a run."""

    name: str
    metric: str
    side: Literal["above", "below"]
    """The unhealthy one."""
    against: Against
    meaning: str
    advice: str
    source: str
    """Source of limit and patience."""
    shown: tuple[str, ...] = ()
    """Metrics that help to read it."""
    needs: str = ""
    """A step counts only if this metric is above 0 in it."""
    no_loss: tuple[str, ...] = ()
    """Kinds of algorithm.loss of which the rule does not hold."""


_NOTES = "notes of earlier GRPO runs"
_SYNC = (
    "look at rollout.top_p, top_k and min_p (what they leave out the learner does not), chat template, temperature, dtype and "
    "numerics of learner and engine, in this order"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "clipping", "grad/norm", "above", "clip",
        "the update keeps the gradient's direction and throws its size away: a few extreme tokens decide what is learnt",
        "lower optimizer.lr, tighten the clip range, or read the replies of these steps (`lockstep rollouts`); if such norms are "
        "normal for this loss, raise optimizer.max_grad_norm", f"{_NOTES}: 100 times the clip norm for 10 steps",
        ("grad/clipped", "ratio/log_abs_max", "reward/mean"),
    ),
    Rule(
        "grad_spike", "grad/norm", "above", "recent",
        "the gradient is far larger than it was: the policy is leaving the region where its updates mean something",
        "read the replies of these steps, see ratio/log_abs_max and mismatch/*; lower optimizer.lr", "proposal",
        ("ratio/log_abs_max", "mismatch/mean_abs_dlogp"), needs="grad/norm",
    ),
    Rule(
        "leap", "sync/probe_shift", "above", "fixed",
        "each update changes the probability of fixed tokens e-fold or more: it does not improve the policy but replaces it, and "
        "what is left of it is noise, or one reply to everything",
        "lower optimizer.lr ten-fold or more and begin again, or from a checkpoint of before; `lockstep rollouts` shows what the "
        "model says now", "SmolLM2-135M: 0.07 where it learns, most of it bf16's rounding; 1.6 to 11 where it is ruined",
        ("lr", "reward/mean", "length/mean"),
    ),
    Rule(
        "mismatch", "mismatch/mean_abs_dlogp", "above", "numerics",
        "learner and engine give the same tokens other probabilities, so what is trained is not what was sampled",
        _SYNC, "TRL #5312: 0.010 to 0.018 in bf16, 0.201 when the weights were stale",
        ("mismatch/k3", "mismatch/ess_tokens"),
    ),
    Rule(
        "mismatch_kl", "mismatch/k3", "above", "fixed", "the engine's distribution is not the learner's",
        f"{_SYNC}; or set algorithm.correction", "prime-rl admits a model below 0.015; NeMo RL sees 0.001 in bf16",
        ("mismatch/mean_abs_dlogp",),
    ),
    Rule(
        "ess", "mismatch/ess_tokens", "below", "fixed",
        "a few tokens carry most of the importance weight: the batch counts for much less than its size",
        "take fewer updates a rollout, or set algorithm.correction", "verl", ("mismatch/max_weight",),
    ),
    Rule(
        "unscored", "reward/unscored", "above", "fixed",
        "the grader fails on part of the replies, and what is left is no fair sample of them",
        "the `error` column of the rollouts says why; fix the verifier", "proposal",
    ),
    Rule(
        "reward_flat", "advantage/nonzero", "below", "fixed",
        "the replies to each prompt got the same reward, so there is nothing to prefer: no step has a gradient",
        "at the lowest reward: easier questions, an example in chat.examples, or is the grader wrong (`lockstep rollouts`)? If "
        "earlier steps had rewards, optimizer.lr has ruined the policy: lower it and begin again. "
        "At the highest: the task is learnt; take harder questions", f"{_NOTES}: exactly 0 or 1 for 6 steps",
        ("reward/mean", "length/mean"),
    ),
    Rule(
        "zero_variance", "reward/zero_std_groups", "above", "fixed",
        "almost no prompt has replies of different reward: most of the sampling teaches nothing",
        "change the difficulty, filter the prompts, take more samples a prompt, or turn dynamic_sampling on", "proposal",
        ("reward/mean",),
    ),
    Rule(
        "truncation", "length/truncated", "above", "fixed", "most replies are cut off before their answer",
        "raise rollout.max_tokens, or ask for shorter replies", f"{_NOTES}: raise the limit above 70 to 80 %",
        ("length/mean", "reward/mean"),
    ),
    Rule(
        "length_collapse", "length/mean", "below", "start", "replies have shrunk to guesses",
        "compare with the reward: does the grader reward an answer without its derivation? See `lockstep rollouts`", _NOTES,
        ("reward/mean",),
    ),
    Rule(
        "entropy_collapse", "entropy/sampled", "below", "start",
        "the policy has stopped exploring: replies to a prompt become the same; harmless if the reward is where it should be",
        "lower optimizer.lr, raise clip_high, or add an entropy bonus (algorithm.entropy_coef)", "proposal",
        ("reward/mean", "reward/zero_std_groups"),
    ),
    Rule(
        "entropy_explosion", "entropy/sampled", "above", "start", "the policy drifts towards noise",
        "lower optimizer.lr or algorithm.entropy_coef; see mismatch/*", "proposal", ("reward/mean", "length/mean"),
    ),
    Rule(
        "clip_share", "ratio/clip_share", "above", "fixed",
        "the clip range stops much of the gradient: updates move the policy too far from what was sampled",
        "lower optimizer.lr, or take fewer updates a rollout (update.epochs, update.samples_per_update)", _NOTES,
        ("ratio/max",), no_loss=("gspo",),  # whose range is 3e-4: half of the replies are outside it in healthy runs
    ),
    Rule(
        "kl_reference", "kl/ref", "above", "fixed", "the policy is very far from where it started",
        "raise algorithm.kl.coef or lower optimizer.lr", "proposal", ("reward/mean",),
    ),
    Rule(
        "unmoved", "weights/changed_tensors", "below", "fixed", "optimizer steps leave every weight as it was",
        "is optimizer.lr 0, or are the parameters frozen?", "an update that changes nothing is none", ("lr", "grad/norm"),
        needs="grad/norm",
    ),
    Rule(
        "disk", "memory/disk_free_gib", "below", "checkpoint", "the disk is nearly full: the next checkpoint may not fit",
        "free space, put runs_dir on a larger disk, or keep fewer checkpoints", "what a checkpoint needs",
    ),
)  # fmt: skip


def health_lines(recipe: Recipe) -> list[str]:
    """Which rules are in force, for the log and `lockstep plan`."""
    tiers: dict[Tier, list[str]] = {"stop": [], "warn": [], "off": []}
    heard = {rule.name for rule in RULES if recipe.loop == "rl" or rule.metric.startswith(_OF_UPDATES)}
    for name, setting in recipe.health.rules.items():
        if name in heard:
            tiers[setting.tier].append(name)
    said = [f"{verb} {', '.join(tiers[tier])}" for tier, verb in _VERBS.items() if tiers[tier]]
    return [f"health: {'; '.join(said)}"]


_OF_UPDATES = ("grad/", "weights/", "sync/", "memory/")
"""Metrics that a supervised run has too: it has no rewards and no rollouts."""
_VERBS: dict[Tier, str] = {"stop": "the run stops itself by", "warn": "warns of", "off": "does not look at"}
