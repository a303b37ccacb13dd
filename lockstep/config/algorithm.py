"""Settings of the objective: advantage, loss, aggregation and KL. The rollout correction is in correction.py.

An algorithm is a named choice of these parts, and a recipe may replace each part. A run prints its formula when it starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.correction import Correction, NoCorrection
from lockstep.config.section import CodePath, Json, Section

Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]


# --- advantages -----------------------------------------------------------------------------------------------------
class GroupAdvantage(Section):
    """GRPO: rewards centred by the group's mean and, if asked, divided by its deviation (arXiv 2402.03300)."""

    kind: Literal["group"] = "group"
    divide_by_std: bool = True
    """Divide the centred rewards by the group's standard deviation. Dr.GRPO does not (arXiv 2503.20783)."""
    std_eps: float = Field(default=1e-6, gt=0)
    """Added to the deviation."""
    std_ddof: int = Field(default=1, ge=0, le=1)
    """1: sample deviation (verl, TRL); 0: population deviation."""


class LeaveOneOutAdvantage(Section):
    """RLOO: each reward minus the mean of the group's others (arXiv 2402.14740)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class WhitenedAdvantage(Section):
    """REINFORCE++: per-token returns, whitened over all trained tokens of the step (arXiv 2501.03262)."""

    kind: Literal["whitened"] = "whitened"
    baseline: Literal["none", "group_mean"] = "none"
    """group_mean subtracts the group's mean from the rewards first (REINFORCE++-baseline)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards, per trained token."""
    whiten_eps: float = Field(default=1e-8, gt=0)
    """Added to the variance under the root."""


class GaeAdvantage(Section):
    """PPO: generalised advantage estimation with a critic's values (arXiv 1506.02438)."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards, per trained token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """0 trusts the critic alone, 1 the rewards alone."""
    whiten: bool = True
    """Whiten the advantages over all trained tokens of the step."""
    whiten_eps: float = Field(default=1e-8, gt=0)
    """Added to the variance under the root."""


class MaxRlAdvantage(Section):
    """MaxRL: centred rewards divided by the group's mean reward; rewards must not be negative."""

    kind: Literal["max_rl"] = "max_rl"
    mean_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean."""


class RewardAdvantage(Section):
    """REINFORCE: the reward itself, minus a constant."""

    kind: Literal["reward"] = "reward"
    baseline: float = 0.0
    """Subtracted from every reward."""


class PythonAdvantage(Section):
    """A function from your file: def advantages(replies, **settings), which returns a number for each reply, or one for each of
    its tokens. It is tried before the run, and runs in this process."""

    kind: Literal["python"] = "python"
    path: CodePath
    """file.py:function"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the function as keyword arguments."""


def _from_path(value: Any) -> Any:
    return {"kind": "python", "path": value} if isinstance(value, str) and ".py:" in value else value


Advantage: TypeAlias = Annotated[
    Annotated[
        GroupAdvantage
        | LeaveOneOutAdvantage
        | WhitenedAdvantage
        | GaeAdvantage
        | MaxRlAdvantage
        | RewardAdvantage
        | PythonAdvantage,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_from_path),
]


# --- losses ---------------------------------------------------------------------------------------------------------
class ClipLoss(Section):
    """PPO: the clipped ratio of each token (arXiv 1707.06347, eq. 7)."""

    kind: Literal["clip"] = "clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the objective is at least dual_clip × advantage (arXiv 1912.09729; verl's is 3). None is off."""


class GspoLoss(Section):
    """GSPO: the clipped geometric-mean ratio of each sequence (arXiv 2507.18071, eq. 7)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The sequence ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The sequence ratio is clipped at 1 + clip_high."""


class CispoLoss(Section):
    """CISPO: log π weighted by the bounded, detached ratio; no token loses its gradient (arXiv 2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    weight_floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest weight; 0 leaves small ratios as they are."""
    weight_cap: float = Field(default=5.0, ge=1)
    """Largest weight, the ratio itself and not its distance from 1."""


class ReinforceLoss(Section):
    """REINFORCE: advantage × log π, without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


class PythonLoss(Section):
    """A function from your file: def loss(inputs: LossInput, **settings) -> LossOutput or a tensor of per-token losses."""

    kind: Literal["python"] = "python"
    path: CodePath
    """file.py:function"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the function as keyword arguments."""


PolicyLoss: TypeAlias = Annotated[
    Annotated[ClipLoss | GspoLoss | CispoLoss | ReinforceLoss | PythonLoss, Field(discriminator="kind")],
    BeforeValidator(_from_path),
]


# --- KL, critic, sampling -------------------------------------------------------------------------------------------
class Kl(Section):
    """Penalty for leaving the reference model: the weights that the run started from. No copy is kept at coef 0."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the penalty; with a target, its value at the start."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d, with d = log π_θ - log π_ref (Schulman, approximating KL)."""
    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss; reward: subtracted from each token's reward before the advantages."""
    target: float | None = Field(default=None, gt=0)
    """Adapt coef so that the mean k1 per token reaches this (arXiv 1909.08593, §2.2); none keeps coef fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples over which coef changes by the factor that the error asks for."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError("a target needs a coef above 0 to start from: 0 times any factor stays 0")
        if self.placement == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError(
                "the KL estimator k1 gives no gradient on average when used in the loss: choose estimator k2 or k3, "
                "or placement reward"
            )
        return self


class Critic(Section):
    """The value function of PPO."""

    backbone: Literal["own", "shared"] = "own"
    """own: a second copy of the trained weights (a frozen base is shared); shared: a value head on the policy's own states."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; its schedule is the policy's."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """A new value may leave the old one by this much before its loss stops falling; none is off."""
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss; matters for a shared backbone only, where both losses meet."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic is trained."""


class DynamicSampling(Section):
    """DAPO: only prompts with some right and some wrong answers are trained on, and others are drawn until the step is full."""

    enabled: bool = False
    """Off trains on every prompt that was drawn."""
    max_rounds: int = Field(default=8, ge=1)
    """Rounds of sampling after which the step goes on with what it has; a warning says so."""


class Overlong(Section):
    """Treatment of long and of truncated replies. Penalty and filter are two things (arXiv 2503.14476, §3.4)."""

    buffer: int = Field(default=0, ge=0)
    """The penalty grows linearly over this many tokens before max_tokens; 0 is no penalty."""
    penalty: float = Field(default=1.0, ge=0)
    """Penalty at max_tokens, subtracted from the reward."""
    drop_truncated: bool = False
    """Leave truncated replies out of the loss and of its denominators; they still count in their group's mean."""


# --- algorithms -----------------------------------------------------------------------------------------------------
class Parts(Section):
    """The parts of every algorithm."""

    advantage: Advantage = GroupAdvantage()
    loss: PolicyLoss = ClipLoss()
    """Also path.py:function, for a loss of your own."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Aggregation of token losses; seq-mean-token-sum-norm divides by max_tokens."""
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """The ratio's denominator. auto: the learner's before the first update, computed only if there are several; recompute: always
    computed; rollout: the engine's own (two policies, no extra pass)."""
    kl: Kl = Kl()
    correction: Correction = NoCorrection()
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. Entropy is logged at any value."""
    critic: Critic | None = None
    """Needed by advantage.kind = gae, and by nothing else."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()

    @property
    def compares_in_group(self) -> bool:
        """Return whether advantages compare the samples of a prompt; for a user-defined estimator that is not known."""
        advantage = self.advantage
        whitens = advantage.kind == "whitened" and advantage.baseline == "group_mean"
        return whitens or advantage.kind in ("group", "leave_one_out", "max_rl")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.advantage.kind == "gae" and self.critic is None:
            raise ValueError("advantage.kind=gae needs a critic: set algorithm.critic, or take another advantage")
        if self.critic is not None and self.advantage.kind != "gae":
            raise ValueError(
                f"the critic would not be used: advantage.kind is {self.advantage.kind}, only gae reads values"
            )
        if self.kl.coef > 0 and self.kl.placement == "reward" and self.advantage.kind not in ("whitened", "gae"):
            raise ValueError(
                f"kl.placement=reward needs per-token rewards (advantage.kind whitened or gae), not {self.advantage.kind}"
            )
        if self.old_logprobs == "rollout" and self.correction.kind != "none" and self.loss.kind != "reinforce":
            raise ValueError(
                "old_logprobs=rollout makes the ratio of the loss π_θ / π_rollout, so a correction would apply it twice; "
                "set correction.kind=none, or old_logprobs=recompute, or loss.kind=reinforce, which has no ratio"
            )
        if self.advantage.kind == "max_rl" and self.overlong.buffer and self.overlong.penalty:
            raise ValueError(
                "overlong.buffer makes rewards negative, and max_rl divides by their mean; take one of the two"
            )
        return self


class Grpo(Parts):
    """GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards, clipped ratio."""

    kind: Literal["grpo"] = "grpo"


class DrGrpo(Parts):
    """Dr.GRPO (arXiv 2503.20783): no division by the deviation, and by a constant length instead of each reply's own."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = GroupAdvantage(divide_by_std=False)
    aggregation: Aggregation = "seq-mean-token-sum-norm"


class Dapo(Parts):
    """DAPO (arXiv 2503.14476): clip-higher, token mean, dynamic sampling; its overlong penalty needs overlong.buffer."""

    kind: Literal["dapo"] = "dapo"
    loss: PolicyLoss = ClipLoss(clip_low=0.2, clip_high=0.28)
    aggregation: Aggregation = "token-mean"
    dynamic_sampling: DynamicSampling = DynamicSampling(enabled=True)


class Gspo(Parts):
    """GSPO (arXiv 2507.18071): group-normalised rewards, one ratio per sequence."""

    kind: Literal["gspo"] = "gspo"
    loss: PolicyLoss = GspoLoss()


class Cispo(Parts):
    """CISPO (MiniMax-M1, arXiv 2506.13585): group-normalised rewards, bounded detached weights, token mean."""

    kind: Literal["cispo"] = "cispo"
    loss: PolicyLoss = CispoLoss()
    aggregation: Aggregation = "token-mean"


class Rloo(Parts):
    """RLOO (arXiv 2402.14740): leave-one-out baseline, plain REINFORCE over whole replies."""

    kind: Literal["rloo"] = "rloo"
    advantage: Advantage = LeaveOneOutAdvantage()
    loss: PolicyLoss = ReinforceLoss()
    aggregation: Aggregation = "seq-mean-token-sum"


class ReinforcePlusPlus(Parts):
    """REINFORCE++ (arXiv 2501.03262): token returns whitened over the step, clipped ratio."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: Advantage = WhitenedAdvantage()
    aggregation: Aggregation = "token-mean"


class ReinforcePlusPlusBaseline(Parts):
    """REINFORCE++-baseline: the group's mean subtracted first, then whitened over the step."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    advantage: Advantage = WhitenedAdvantage(baseline="group_mean")
    aggregation: Aggregation = "token-mean"


class Ppo(Parts):
    """PPO (arXiv 1707.06347) with a critic and GAE."""

    kind: Literal["ppo"] = "ppo"
    advantage: Advantage = GaeAdvantage()
    aggregation: Aggregation = "token-mean"
    critic: Critic | None = Critic()


class MaxRl(Parts):
    """MaxRL: rewards normalised by the group's mean reward."""

    kind: Literal["max_rl"] = "max_rl"
    advantage: Advantage = MaxRlAdvantage()
    loss: PolicyLoss = ReinforceLoss()
    aggregation: Aggregation = "seq-mean-token-sum"


class Reinforce(Parts):
    """REINFORCE: reward × log π."""

    kind: Literal["reinforce"] = "reinforce"
    advantage: Advantage = RewardAdvantage()
    loss: PolicyLoss = ReinforceLoss()
    aggregation: Aggregation = "seq-mean-token-sum"


Algorithm: TypeAlias = Annotated[
    Grpo
    | DrGrpo
    | Dapo
    | Gspo
    | Cispo
    | Rloo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Ppo
    | MaxRl
    | Reinforce,
    Field(discriminator="kind"),
]
