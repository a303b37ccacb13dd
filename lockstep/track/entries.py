"""The metrics, as data. To add one: append it to its group here, then run `make docs`."""

from __future__ import annotations

from lockstep.track.entries_more import ENV, EVAL, NOISE, SFT
from lockstep.track.metric import NOTES, Drift, Healthy, MetricInfo

TRL = "TRL #5312: 0.010 to 0.018 in bf16, 0.201 when the weights were stale"

_GRADER = "Read rollouts (`lockstep rollouts RUN --step N --wrong`): is the grader right? Then change the difficulty."
_SYNC = (
    "Look at sync, chat template, temperature and dtype, in this order; the proof of sync names tensors that differ."
)
_STALE = "Rollouts and learner differ: see mismatch/mean_abs_dlogp; take fewer updates a rollout, or set algorithm.correction."
_RATIO = "Lower the learning rate, tighten the clip range, or take fewer updates a rollout."

REWARD = (
    MetricInfo(
        "reward/mean",
        "reward",
        "Mean reward of the step's scored replies. It should rise.",
        Healthy(0.02, 0.98, NOTES, until_step=6),
        advice=f"Near 0 or 1 from the start there is nothing to compare within a group. {_GRADER}",
    ),
    MetricInfo("reward/std", "reward", "Standard deviation of the rewards over all scored replies."),
    MetricInfo("reward/min", "reward", "Lowest reward."),
    MetricInfo("reward/max", "reward", "Highest reward."),
    MetricInfo("reward/p90", "reward", "Reward that 90 % of the replies do not exceed."),
    MetricInfo(
        "reward/zero_std_groups",
        "share of groups",
        "Groups whose samples all got the same reward, the overlong penalty included: where rewards are compared within a group, "
        "they carry no gradient.",
        Healthy(high=0.5),
        advice="Prompts are too easy or too hard: change the difficulty, filter, or take more samples a prompt.",
    ),
    MetricInfo(
        "reward/unscored",
        "share of replies",
        "Replies that the grader could not score. They are never counted as reward 0.",
        Healthy(high=0.01),
        advice="The `error` column of the rollouts says why. The run stops by health.unscored and health.max_unscored.",
    ),
    MetricInfo(
        "reward/shaped_mean",
        "reward",
        "Mean reward as the advantages see it, after the overlong penalty; absent when algorithm.overlong.buffer is 0.",
    ),
)

ANSWER = (
    MetricInfo(
        "answer/correct", "share of replies", "Replies that are correct, of those scored.",
        Healthy(0.2, 0.6, NOTES, until_step=6),
        advice="GRPO learns most where a group is mixed. Easier or harder questions at the start; later it should rise.",
    ),
    MetricInfo(
        "answer/boxed", "share of replies", "Replies with an answer in \\boxed{}.", Healthy(low=0.9, source=NOTES),
        advice="Show the format: chat.examples, a suffix, or a short SFT. With verifier.fallback it may stay low.",
    ),
    MetricInfo(
        "answer/has_answer", "share of replies", "Replies in which the verifier found an answer at all.",
        Healthy(low=0.9, source="as answer/boxed"),
        advice="Read the wrong rollouts: cut off, format not known, or no answer?",
    ),
    MetricInfo("answer/<metric>", "verifier's own", "A number that the verifier named, averaged over scored replies."),
)  # fmt: skip

LENGTH = (
    MetricInfo(
        "length/mean",
        "tokens a reply",
        "Mean response length, end token included.",
        drift=Drift("recent", 20, 0.5, 1.5),
        advice="A collapse rewards short guesses, growth rewards rambling: read rollouts and compare with the reward.",
    ),
    MetricInfo("length/max", "tokens", "Longest response."),
    MetricInfo(
        "length/truncated",
        "share of replies",
        "Responses cut off at rollout.max_tokens.",
        Healthy(high=0.5, source=NOTES),
        advice="Raise rollout.max_tokens, or ask for shorter replies: a cut-off reply has no answer to reward.",
    ),
    MetricInfo(
        "length/dropped",
        "replies",
        "Truncated replies left out of the loss and its denominators; absent unless algorithm.overlong.drop_truncated is on.",
    ),
)

SAMPLING = (
    MetricInfo(
        "sampling/acceptance_rate",
        "share of prompts",
        "Prompts with some right and some wrong replies, of all that dynamic sampling drew in the step.",
        Healthy(low=0.25),
        advice="Most samples are thrown away: prompts are too easy or too hard. Change the difficulty, or take more samples.",
    ),
    MetricInfo("sampling/rounds", "rounds", "Rounds of sampling of the step, at most dynamic_sampling.max_rounds."),
    MetricInfo(
        "sampling/prompts_drawn", "prompts", "Prompts sampled in the step, those that were not trained on included."
    ),
    MetricInfo(
        "sampling/empty_steps",
        "steps so far",
        "Steps that found no prompt with right and wrong replies, and so updated nothing.",
        Healthy(high=0, source="a step without an update is lost"),
        advice="See answer/correct: near 0 or 1 there is nothing to compare. Change the difficulty, or raise max_rounds.",
    ),
)

ADVANTAGE = (
    MetricInfo("advantage/mean", "–", "Mean advantage over the step's samples; 0 by construction in GRPO."),
    MetricInfo(
        "advantage/std",
        "–",
        "Standard deviation of the advantages over the step's samples.",
        Healthy(low=0.05, source=NOTES),
        advice="Near 0 nothing is learnt: see reward/zero_std_groups; if those are few, suspect the advantage itself.",
    ),
    MetricInfo(
        "advantage/nonzero",
        "share of replies",
        "Replies whose advantage is not 0, of those that could be trained on; 0 if there are none: no gradient.",
    ),
    MetricInfo("advantage/min", "–", "Lowest advantage."),
    MetricInfo("advantage/max", "–", "Highest advantage."),
)

LOSS = (
    MetricInfo(
        "loss/policy",
        "–",
        "The batch loss that is minimised, all terms included. No measure of progress: with one update a rollout it is near 0.",
    ),
    MetricInfo(
        "loss/kl",
        "nats a token",
        "KL penalty as it stands in the loss, coefficient included; absent when algorithm.kl.coef is 0.",
    ),
    MetricInfo(
        "loss/entropy",
        "nats a token",
        "Entropy term as it stands in the loss, negative; absent when algorithm.entropy_coef is 0.",
    ),
    MetricInfo(
        "ratio/max",
        "–",
        "Largest π_θ/π_old of a trained token. 1 when every rollout is used for one update only.",
        Healthy(high=10, source=NOTES),
        advice=_RATIO,
    ),
    MetricInfo(
        "ratio/clip_share",
        "share of tokens",
        "Trained tokens whose gradient the clip range stopped.",
        Healthy(high=0.2, source=NOTES),
        advice=_RATIO,
    ),
    MetricInfo(
        "ratio/log_abs_max",
        "nats",
        "Largest |log π_θ - log π_old| of a trained token.",
        Healthy(high=5, source=NOTES),
        advice=f"{_RATIO} Gradient spikes come from such tokens more than from advantages.",
    ),
    MetricInfo("ratio/clamped_share", "share of tokens", "Trained tokens whose log ratio was cut at ±20."),
    MetricInfo("ratio/dual_clip_share", "share of tokens", "Trained tokens that the dual clip stopped."),
    MetricInfo(
        "ratio/bounded_share", "share of tokens", "Trained tokens whose weight CISPO bounded; they keep a gradient."
    ),
    MetricInfo("ratio/sequence_max", "–", "Largest geometric-mean ratio of a reply (GSPO)."),
    MetricInfo(
        "entropy/sampled",
        "nats a token",
        "Mean -log-probability that the sampled tokens had, over all replies: an estimate of the entropy of what is sampled "
        "from, also in steps that train nothing.",
        drift=Drift("start", 5, low=0.5),
        advice="The policy stops exploring: lower the learning rate, raise clip_high, or add an entropy bonus.",
    ),
    MetricInfo(
        "entropy/mean",
        "nats a token",
        "Mean entropy of the policy over the trained tokens: replies without an advantage are not in it, so that it says "
        "nothing of prompts whose replies have become the same. See entropy/sampled.",
    ),
    MetricInfo("entropy/p10", "nats a token", "Entropy that 10 % of the trained tokens do not exceed."),
    MetricInfo("entropy/p90", "nats a token", "Entropy that 90 % of the trained tokens do not exceed."),
    MetricInfo(
        "kl/ref",
        "nats a token",
        "Divergence from the reference model (estimator algorithm.kl.estimator).",
        Healthy(high=0.1),
        advice="The policy is far from where it started: raise algorithm.kl.coef or lower the learning rate.",
    ),
    MetricInfo(
        "kl/k1", "nats a token", "Mean log π_old - log π_ref of the trained tokens: what algorithm.kl.target steers."
    ),
    MetricInfo("kl/coef", "–", "Weight of the KL penalty in the step; moves if algorithm.kl.target is set."),
)

MISMATCH = (
    MetricInfo(
        "mismatch/mean_abs_dlogp", "nats", "Mean |log π_learner - log π_rollout| of the sampled tokens, before the update.",
        Healthy(high=0.03, source=TRL), advice=_SYNC,
    ),
    MetricInfo(
        "mismatch/max_abs_dlogp", "nats", "Largest such difference; single tokens of 1.56 were seen in bf16 (torchtitan, 8B).",
    ),
    MetricInfo(
        "mismatch/k1", "nats a token",
        "KL of the rollout's distribution to the learner's, k1 estimate: mean of log π_rollout - log π_learner, of either sign.",
    ),
    MetricInfo(
        "mismatch/k3", "nats a token", "The same divergence, k3 estimate: never negative, and steadier.",
        Healthy(high=2e-3, source="NeMo RL: about 1e-3 is normal in bf16"), advice=_SYNC,
    ),
    MetricInfo(
        "mismatch/token_mult_prob_error", "–", "Mean of exp |log π_learner - log π_rollout|; 1 is perfect.",
        Healthy(high=1.05, source="NeMo RL: above it, suspect the framework"), advice=_SYNC,
    ),
    MetricInfo(
        "mismatch/max_weight", "–", "Largest w = π_learner / π_rollout of a sampled token.", Healthy(high=10), advice=_STALE,
    ),
    MetricInfo(
        "mismatch/ess_tokens", "share of tokens",
        "Effective sample size with token weights w, (Σw)² / (n Σw²): 1 if all are equal.",
        Healthy(low=0.9), advice=_STALE,
    ),
    MetricInfo(
        "mismatch/ess_sequences", "share of replies", "The same with each reply's product of w. It falls fast with length.",
        Healthy(low=0.3), advice=_STALE,
    ),
)  # fmt: skip

CORRECTION = (
    MetricInfo("correction/weight_mean", "–", "Mean importance weight, after capping or masking."),
    MetricInfo("correction/weight_max", "–", "Largest importance weight before capping or masking."),
    MetricInfo("correction/capped_share", "share of tokens", "Trained tokens whose weight was cut to algorithm.correction.cap."),
    MetricInfo(
        "correction/kept_share", "share of tokens", "Trained tokens whose weight lies in the band; the others have no gradient.",
        Healthy(low=0.9), advice=_STALE,
    ),
)  # fmt: skip

OPTIMIZER = (
    MetricInfo(
        "grad/norm",
        "–",
        "Global gradient norm before clipping; the largest of the step's updates.",
        Healthy(0, 100, f"{NOTES}: 100 times a max_grad_norm of 1", open_low=True),
        Drift("recent", 50, high=10),
        advice="Exactly 0: frozen parameters or no group with mixed rewards. A spike: read the step's rollouts, see ratio/*.",
    ),
    MetricInfo("grad/clipped", "0 or 1", "Whether a gradient of the step was clipped to optimizer.max_grad_norm."),
    MetricInfo(
        "grad/skipped",
        "optimizer steps so far",
        "Optimizer steps left out because a gradient was not finite.",
        Healthy(high=0, source="a skipped step is never normal"),
        advice="Look at loss, ratio and mismatch of that step. The run stops after update.max_skipped in a row.",
    ),
    MetricInfo("lr", "–", "Learning rate of the step's last optimizer step."),
    MetricInfo(
        "weights/changed_tensors",
        "tensors",
        "Tensors whose fingerprint differs from the last proof's.",
        Healthy(0, open_low=True, source="an update that changes nothing is none"),
        advice="The weights did not move: learning rate 0, frozen parameters, or bf16 swallowing small updates.",
    ),
)

CRITIC = (
    MetricInfo("critic/loss", "reward²", "Value loss, ½ (V - R)² with clipped values: mean over the trained tokens."),
    MetricInfo(
        "critic/explained_variance", "–", "1 - Var(R - V) / Var(R) over the trained tokens, before the update: 1 is perfect, "
        "0 is no better than a constant, below 0 worse. Absent while all returns are equal.",
    ),
    MetricInfo("critic/value_mean", "reward", "Mean value of the trained tokens, before the update."),
    MetricInfo("critic/clip_share", "share of tokens", "Tokens whose value has left algorithm.critic.value_clip: no gradient."),
    MetricInfo("critic/grad_norm", "–", "Gradient norm before clipping: of head and own backbone; of the head, if it is shared."),
    MetricInfo("critic/oom_splits", "splits", "As batch/oom_splits, of the critic's own passes."),
    MetricInfo("critic/lr", "–", "Learning rate of the critic's last optimizer step."),
    MetricInfo(
        "critic/skipped", "optimizer steps so far", "Critic steps left out because a gradient was not finite.",
        Healthy(high=0, source="a skipped step is never normal"), advice="Look at reward/max and critic/loss of that step.",
    ),
)  # fmt: skip

SYNC = (
    MetricInfo("sync/seconds", "s", "Time of weight transfer and proof."),
    MetricInfo(
        "sync/probe_mean",
        "nats",
        "Mean |Δ log-probability| of the fixed probe sequences, learner against engine. Beyond the limit that follows from the "
        "precision and the engine's kernels, which the proof prints, the sync fails.",
        advice=_SYNC,
    ),
    MetricInfo("sync/probe_max", "nats", "Largest such difference."),
    MetricInfo(
        "sync/probe_shift",
        "nats",
        "How far the updates since the last probe have moved the learner's own log-probabilities of the probe's tokens: mean "
        "|Δ| divided by the number of updates. In steps with a probe that an earlier probe went before.",
        Healthy(
            high=0.5,
            source="SmolLM2-135M: 0.07 where it learns, most of it bf16's rounding; 1.6 to 11 where it is ruined",
        ),
        advice="Lower optimizer.lr: an update should change the policy a little.",
    ),
    MetricInfo("sync/tensors", "tensors", "Tensors compared by fingerprint. The sync fails if one of them differs."),
)

BATCH = (
    MetricInfo("batch/prompts", "prompts", "Prompts of the step that are trained on."),
    MetricInfo("batch/samples", "samples", "Replies drawn in the step."),
    MetricInfo(
        "batch/samples_trained",
        "samples",
        "Replies with a gradient; the others had advantage 0, no score, or were left out.",
    ),
    MetricInfo("batch/tokens_generated", "tokens", "Response tokens sampled, before any is left out."),
    MetricInfo("batch/tokens_trained", "tokens", "Response tokens that carried loss, over all updates of the step."),
    MetricInfo("batch/tokens_processed", "tokens", "Tokens that went through forward and backward, prompts included."),
    MetricInfo("batch/microbatches", "micro-batches", "Forward and backward passes of the step."),
    MetricInfo(
        "batch/oom_splits",
        "splits",
        "Micro-batches that did not fit into the GPU's memory and were taken in halves; the result is the same.",
        Healthy(high=0, source="memory that runs out costs a pass"),
        advice="Each costs a pass: set update.tokens_per_microbatch lower, or update.recompute to more.",
    ),
    MetricInfo("batch/optimizer_steps", "optimizer steps", "Optimizer steps of the step, skipped ones not counted."),
)

_SLOW = Drift("recent", 20, high=2)
_SLOW_ADVICE = "Something else uses the machine, or replies grew: compare with length/mean and batch/tokens_processed."

TIME = (
    MetricInfo("time/step", "s", "Wall time of the step, without saving; the other times are its parts."),
    MetricInfo("time/rollout", "s", "Sampling.", drift=_SLOW, advice=_SLOW_ADVICE),
    MetricInfo(
        "time/grade", "s", "What grading added: reading replies, grading in this process, and waiting for the rest."
    ),
    MetricInfo(
        "time/grade_share",
        "share",
        "time/grade over the step without its evaluation: what grading adds to a step.",
        Healthy(high=0.1),
        advice="Give the verifier more workers, or find what is slow: time/grade_slowest, and the rollouts.",
    ),
    MetricInfo(
        "time/grade_work", "s", "All grading, most of it beside sampling when the verifier has processes of its own."
    ),
    MetricInfo(
        "time/grade_slowest",
        "s",
        "The slowest reply to grade, summed over the rounds of a step.",
        advice="Near the verifier's time limit: read the rollouts for what makes it slow.",
    ),
    MetricInfo("time/update", "s", "Log-probabilities, gradients and optimizer.", drift=_SLOW, advice=_SLOW_ADVICE),
    MetricInfo("time/sync", "s", "Weights to the engine, and the proof."),
    MetricInfo("time/evaluate", "s", "Evaluation, in steps that have one."),
    MetricInfo("time/validate", "s", "Validation loss of SFT, in steps that have one."),
    MetricInfo("time/selftest", "s", "Testing the grader, in steps that do (health.selftest_every)."),
    MetricInfo("time/save", "s", "Writing the checkpoint, in steps that have one."),
    MetricInfo("throughput/rollout_tokens_per_s", "tokens/s", "batch/tokens_generated over time/rollout."),
    MetricInfo("throughput/train_tokens_per_s", "tokens/s", "batch/tokens_trained over time/update."),
    MetricInfo("memory/rss_gib", "GiB", "Resident memory of the process at the end of the step."),
    MetricInfo("memory/gpu_gib", "GiB", "Largest GPU memory allocated so far; absent on a CPU."),
    MetricInfo(
        "memory/gpu_reserved_gib",
        "GiB",
        "Most that torch's allocator has kept of the GPU's memory so far, in use or not; absent on a CPU.",
    ),
    MetricInfo(
        "memory/disk_free_gib",
        "GiB",
        "Free on the disk of the run directory; health.disk stops a run that would fill it.",
    ),
    MetricInfo(
        "memory/predicted_gib", "GiB", "What the memory plan predicted for it; absent on a CPU and in the first step."
    ),
    MetricInfo(
        "memory/plan_error",
        "share",
        "memory/gpu_gib over memory/predicted_gib, minus 1; absent on a CPU and in the first step.",
        Healthy(-0.1, 0.1, "the plan's promise"),
        advice="Above it, longer replies may not fit: lower update.tokens_per_microbatch. Below it, there is room for more.",
    ),
)

ENTRIES: tuple[MetricInfo, ...] = (
    *REWARD, *ANSWER, *LENGTH, *SAMPLING, *ADVANTAGE, *LOSS, *SFT, *MISMATCH, *CORRECTION, *OPTIMIZER, *CRITIC,
    *SYNC, *NOISE, *BATCH, *ENV, *TIME, *EVAL,
)  # fmt: skip
