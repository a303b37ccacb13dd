"""Metrics of what is not in every run: supervised fine-tuning, noise, evaluation, environments."""

from __future__ import annotations

from lockstep.track.metric import NOTES, Healthy, MetricInfo

SFT = (
    MetricInfo(
        "sft/loss", "nats a token",
        "Mean negative log-likelihood of the step's trained tokens, whatever the aggregation. It should fall, then level off.",
    ),
    MetricInfo("sft/epoch", "epochs", "Passes over the training rows so far."),
    MetricInfo(
        "validation/loss", "nats a token",
        "Mean negative log-likelihood of the validation rows' trained tokens, under the weights after the step.",
        advice="Rising while sft/loss falls is overfitting: take fewer steps, or save.keep_best: validation/logprob.",
    ),
    MetricInfo("validation/logprob", "nats a token", "validation/loss with its sign turned: higher is better."),
    MetricInfo("validation/tokens", "tokens", "Trained tokens of the validation rows."),
)  # fmt: skip

NOISE = (
    MetricInfo("noise/sigma", "–", "Standard deviation of the noise on the sampling model's norms; absent without noise."),
    MetricInfo("noise/stage", "–", "Stage of the noise schedule, from 0, which has none."),
    MetricInfo("noise/norms", "norms", "Norms that held noise while the step's replies were drawn."),
    MetricInfo(
        "noise/share", "share",
        "‖w' - w‖ / ‖w‖ over these norms: what the noise changed, after rounding to the weights' dtype.",
    ),
    MetricInfo(
        "noise/lost", "share of numbers",
        "Norm weights that the noise left as they were: in bf16 it is rounded away where it is small against the weight.",
        Healthy(high=0.5),
        advice="The noise is mostly not there: raise noise.sigma_end, or train in fp32 (model.dtype).",
    ),
)  # fmt: skip

EVAL = (
    MetricInfo(
        "eval/<mode>/accuracy",
        "share of items",
        "Held-out accuracy in a decoding mode: the first of its numbers, pass@1 of one reply. What the run is for.",
    ),
    MetricInfo("eval/<mode>/low", "share of items", "Lower end of its 95 % interval."),
    MetricInfo("eval/<mode>/high", "share of items", "Upper end of its 95 % interval."),
    MetricInfo("eval/<mode>/se", "share of items", "Standard error of the accuracy, over items."),
    MetricInfo(
        "eval/<mode>/boxed",
        "share of replies",
        "Replies with an answer in \\boxed{}, where the verifier looks for one.",
    ),
    MetricInfo(
        "eval/<mode>/unparsed",
        "share of replies",
        "Scored replies in which no answer was found; they count as wrong.",
        Healthy(high=0.05, source=NOTES),
        advice="`lockstep audit parser RUN` shows fifty wrong replies with what was read; look at truncation first.",
    ),
    MetricInfo(
        "eval/<mode>/truncated",
        "share of replies",
        "Replies cut off at the token budget.",
        Healthy(high=0.5, source=NOTES),
        advice="Raise eval.max_tokens: a cut-off reply counts as wrong.",
    ),
    MetricInfo(
        "eval/<mode>/unscored",
        "share of replies",
        "Replies that could not be scored; they are left out of the accuracy.",
        Healthy(high=0, source="a score should cover all its items"),
        advice="See `results` of the score in scores/*.json, and the grader.",
    ),
    MetricInfo("eval/<mode>/mean_tokens", "tokens a reply", "Mean response length of the evaluation."),
    MetricInfo(
        "eval/<mode>/<estimate>",
        "share of items",
        "The mode's numbers: pass@1 of one reply; of n, avg@n (their mean), pass@k (any of k is right, unbiased) and maj@n (the "
        "majority's answer).",
    ),
    MetricInfo("task/<task>/reward", "reward", "Mean reward of one task's replies."),
    MetricInfo("task/<task>/correct", "share of replies", "Solved replies or episodes of one task of a mix."),
    MetricInfo(
        "task/<task>/solve_rate", "share of replies", "The same as the curriculum remembers it, a moving average."
    ),
    MetricInfo("task/<task>/share", "share of prompts", "What the curriculum gives the task from the next step on."),
    MetricInfo("task/<task>/<metric>", "verifier's own", "A number that the verifier named, over one task's replies."),
)

ENV = (
    MetricInfo("env/episodes", "episodes", "Episodes of several turns in the step; absent if its prompts have one reply each."),
    MetricInfo("env/turns", "replies an episode", "Mean number of replies."),
    MetricInfo("env/tokens_sampled", "tokens", "What the engine returned in the step: batch/tokens_generated if all is right."),
    MetricInfo("env/tokens_observed", "tokens an episode", "What environments and tools said after the prompt; never trained."),
    MetricInfo(
        "env/out_of_turns", "share of episodes", "Ended by task.turns.limit rather than by the environment or an answer.",
        Healthy(high=0.5), advice="Raise task.turns.limit, or read rollouts: does the policy go round in circles?",
    ),
    MetricInfo(
        "env/tool_errors", "errors an episode", "Calls that could not be read or run, and actions that were none.",
        Healthy(high=0.5), advice="The policy does not know the tools: show a solved example, or an easier format.",
    ),
    MetricInfo(
        "env/timeouts", "episodes", "Ended because a step of the environment took longer than task.turns.step_seconds.",
        Healthy(high=0), advice="They are not scored. Mend the environment, or raise task.turns.step_seconds.",
    ),
    MetricInfo(
        "env/failures", "episodes", "Whose environment raised, died, or returned something else than a Turn; not scored.",
        Healthy(high=0), advice="The `error` column of the rollouts says why.",
    ),
)  # fmt: skip
