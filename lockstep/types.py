"""The nouns of Lockstep, in the order in which data flows. No logic beyond small properties; importing this loads no torch.

Shape suffixes used here and everywhere: T tokens (packed end to end), N sequences, P prompts, G samples of one prompt,
V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

TokenIds: TypeAlias = tuple[int, ...]
Metrics: TypeAlias = dict[str, float]
WeightStream: TypeAlias = "Iterator[tuple[str, Tensor]]"
"""Pairs of a Hugging Face parameter name and its tensor. Adapters add their scaling as a one-element tensor."""


class Message(TypedDict):
    """One chat turn. Example: {"role": "user", "content": "State the final answer: 4 + 3 ="}"""

    role: str
    content: str


# --- task → prompt --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Prompt:
    """What a task asks. Example: Prompt("chain_sum/17", ({"role": "user", "content": "4 + 3 ="},), "7", "chain_sum")"""

    id: str
    """The same id always means the same question and answer."""
    messages: tuple[Message, ...]
    """The task's own turns, without the recipe's system text, examples or suffix."""
    answer: str
    """The reference answer as text."""
    task: str = ""
    """Which task asked it; metrics are also kept per task."""
    data: Mapping[str, object] = field(default_factory=dict)
    """Whatever the grader needs beyond the answer."""
    tools: str = ""
    """Tools that the reply may call, as a JSON list of function schemas; they are part of the rendered prompt."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verifier's verdict on one reply. `reward is None` means unscored: `error` says why. An error is never a reward of 0."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, averaged over the step. Example: {"correct": 1.0, "boxed": 1.0}"""
    extracted: str | None = None
    """The answer as the verifier read it, None if it found none."""
    method: str = ""
    """How it was read. Example: "boxed", "last_number", "none"."""
    error: str | None = None
    """Why the reply could not be scored."""

    @property
    def scored(self) -> bool:
        return self.reward is not None


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment says after a reply. Example: Turn(({"role": "user", "content": "higher"},), metrics={"guesses": 1})"""

    observation: tuple[Message, ...] = ()
    """The turns that the next reply answers, of role user or tool; never trained."""
    reward: float | None = 0.0
    """What the reply earned. None: the episode cannot be scored, `error` says why."""
    done: bool = False
    """The episode ends here; no further reply is asked for."""
    answer: bool = False
    """The reply was the final answer to the prompt's question: the task's `grade` adds its reward and metrics, and it is done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, summed over the episode. `correct`, if any turn has it, says that the episode was solved."""
    extracted: str | None = None
    """The answer or action as it was read."""
    error: str | None = None
    """Why the episode cannot be scored."""


# --- rollout --------------------------------------------------------------------------------------------------------
class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """An end token or a stop string was produced."""
    LENGTH = "length"
    """The token budget ran out: the completion is truncated."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature == 0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this much probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens up to the one that completes the string are kept."""
    ignore_eos: bool = False
    """Never stop early: every completion has exactly `max_tokens` tokens (benchmarks)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw. Requests that share `group` share their prompt, which is then prefilled once."""

    id: str
    prompt_ids: TokenIds
    group: str
    seed: int
    """From `seed_for(run, step, prompt, sample)`: the sample depends on nothing else."""
    sampling: Sampling
    version: int
    """The weight version that must sample it; the engine refuses any other."""
    prefix: int = 0
    """Leading prompt tokens that all prompts of the recipe have (system text, examples): processed once per version."""
    room: int = 0
    """Tokens that later requests of the same episode may come to have, prompt included, so that memory is taken once."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for a request, as ids; text is never turned back into ids."""

    request: Request
    ids: TokenIds
    """Sampled ids, the end token included if one was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution that it was drawn from."""
    finish: FinishReason
    version: int
    """Version of the weights that sampled it."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One graded completion. Lists are per response token."""

    prompt: Prompt
    prompt_ids: TokenIds
    ids: TokenIds
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...]
    """False for tokens that the policy did not choose (observations, tool output)."""
    text: str
    finish: FinishReason
    version: int
    grade: Grade
    sample: int = 0
    """Index within the group."""
    prefix: int = 0
    """Leading prompt tokens that all prompts of the recipe have."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Of rewards credited turn by turn: index of a reply's last token, and what it earned. Empty credits all at the end."""


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


# --- advantage → loss → update --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Episode:
    """One reply as credit assignment sees it. Lists are per response token."""

    group: int
    """Index of its prompt in the step."""
    reward: float | None
    """What the whole reply earned, overlong penalty included; None is unscored."""
    trained: tuple[bool, ...]
    penalties: tuple[float, ...] = ()
    """Subtracted from each token's reward (KL in the reward); empty is none."""
    values: tuple[float, ...] = ()
    """What the critic expected before each token; empty without a critic."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Parts of `reward` that an earlier token earned: its index, and the part. The rest is earned at the last trained token."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What credit assignment makes of an episode. Lists are per response token, 0 where not trained."""

    advantages: tuple[float, ...]
    returns: tuple[float, ...] = ()
    """What the critic should have expected; empty without a critic."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence as the learner sees it: a prompt, then a response whose `trained` tokens carry loss."""

    prompt_ids: TokenIds
    ids: TokenIds
    trained: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float
    """The share of this sequence's summed token losses in the batch loss: aggregation is decided before any split."""
    group: int
    """Sequences of one group have the same prompt_ids."""
    old_logprobs: tuple[float, ...] | None = None
    """Log-probabilities before the first update of this rollout; None when the update is the only one (ratio is 1)."""
    ref_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    """What the critic expected before each token, before any update of the step."""
    returns: tuple[float, ...] | None = None
    """What the critic is trained towards."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one optimizer update."""

    sequences: tuple[TrainSequence, ...]
    temperature: float = 1.0
    """Log-probabilities are of softmax(logits / temperature), as they were sampled."""
    prefix: int = 0
    """Leading prompt tokens that all sequences have: processed once per micro-batch."""
    kl_coef: float = 0.0
    """Weight of the KL penalty, as the controller has it now."""
    supervised: bool = False
    """The replies were given, not sampled: no rollout to compare with, no advantages, and nobody asks for entropies."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a loss sees: the trained tokens of one micro-batch, packed end to end; whole sequences only.

    Of a supervised batch rollout_logprobs_T, advantages_T and entropy_T have no element.
    """

    logprobs_T: Tensor
    """log π_θ, with gradient."""
    old_logprobs_T: Tensor
    """log π_old, constant; equal to logprobs_T.detach() when the update is the only one of its rollout."""
    rollout_logprobs_T: Tensor
    """log π_rollout, as the engine sampled."""
    advantages_T: Tensor
    entropy_T: Tensor
    """Entropy of the token distribution, nats; carries gradient only when the loss says that it needs it."""
    sequence_T: Tensor
    """Index of the sequence of each token, 0 … N-1."""
    sequences: int
    """N."""
    ref_logprobs_T: Tensor | None = None
    kl_coef: float = 0.0
    """Weight of the KL penalty, as the controller has it now."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token losses, undivided, and what to log. Only the learner multiplies by the weights and sums."""

    loss_T: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values, averaged over all trained tokens of the update."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values, of which the largest of the update is logged."""


Loss: TypeAlias = Callable[[LossInput], LossOutput]


# --- numerics -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class NormNoise:
    """Gaussian noise on norm weights: w + σ·scale·z, z drawn from (seed, name) alone."""

    sigma: float
    seed: int
    """From the run's seed and the version of the weights: the same on every rank and in every rerun."""
    targets: tuple[str, ...]
    """Full names of the norm weights (as in `weights()`), sorted."""
    scales: tuple[float, ...]
    """A factor on sigma for each of them."""


@dataclass(frozen=True, slots=True)
class Forward:
    """How an engine computes. Example: Forward("mxfp4-w4a4")"""

    numerics: str = ""
    """A Numeric of config.numerics; empty is the precision of the weights."""
    noise: NormNoise | None = None


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """What `set_forward` touched."""

    quantised_layers: int = 0
    noisy_norms: int = 0
    noise_share: float = 0.0
    """‖w' - w‖ / ‖w‖ over all noisy norms together, as it is in the weights."""
    noise_lost: float = 0.0
    """Share of their numbers that rounding to the weights' dtype left as they were."""


# --- sync -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Probe:
    """Teacher-forced log-probabilities of fixed sequences: learner against engine, absolute differences in nats."""

    tokens: int
    mean: float
    p99: float
    max: float
    tolerance: float
    """`mean` must not exceed this."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Evidence that the engine's weights are the learner's. Stored with every step and every score."""

    version: int
    fingerprint: str
    """Of all weights together, 16 hex digits; the identity of the weights across runs and checkpoints."""
    tensors: int
    bytes: int
    mismatched: tuple[str, ...]
    """Names of tensors that differ, with the reason. Empty in a proof that passed."""
    changed: int
    """Tensors that differ from the last proof's; -1 in a first proof."""
    probe: Probe | None
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.mismatched and (self.probe is None or self.probe.mean <= self.probe.tolerance)


# --- protocols ------------------------------------------------------------------------------------------------------
class Task(Protocol):
    """Yields prompts and grades replies. Pure: `batch` depends on its arguments alone."""

    name: str

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """The prompts of one step."""

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Prompts never returned by `batch`; `role` is id_probe, ood_probe or sanity."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Never raises for a bad answer."""


class Env(Protocol):
    """One episode. Deterministic: what it says depends on how it was made, the seed and the replies."""

    def start(self, seed: int) -> Turn:
        """Begin. The observation is the opening: that of the prompt's messages, or nothing.

        `seed` is of (run, step, prompt, sample), for what happens by chance after the opening, which all samples share.
        """

    def step(self, reply: str) -> Turn:
        """Take the next reply. Raises nothing for a bad reply: that is an observation, a reward, or both."""


class EnvTask(Task, Protocol):
    """A task of several turns."""

    def env(self, prompt: Prompt) -> Env | None:
        """A new episode of the prompt; None if it is a question with one reply, which `grade` grades."""


class RolloutEngine(Protocol):
    """Draws samples and scores sequences with the weights of one version."""

    version: int

    @property
    def forward(self) -> Forward:
        """How its forward passes compute now."""
        ...

    def set_forward(self, forward: Forward) -> ForwardReport:
        """From now on compute so; called while no request is open. Nothing of an earlier noise remains.

        Raises EngineError if it cannot, or if a numerics or a noise would touch no layer.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; may be called while `completed` is being read.

        Raises StaleWeightsError if a request's version is not the engine's.
        """

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish, until no request is left.

        `between` is called every few tokens, while no completion waits; it may submit.
        """

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Log-probability of each token but the first of each sequence, temperature 1."""

    def load(self, weights: WeightStream, version: int) -> None:
        """Take over weights and become `version`."""

    def weights(self) -> WeightStream:
        """The weights that would sample now, for the proof."""

    def close(self) -> None: ...


class Learner(Protocol):
    """Owns the trained weights."""

    version: int

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Log-probability of each token but the first of each sequence, temperature 1."""

    def update(self, batch: Batch, loss: Loss) -> Metrics: ...

    def weights(self) -> WeightStream: ...


class Critic(Protocol):
    """Says what reward is still to come, before each response token."""

    def values(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> list[tuple[float, ...]]:
        """One value per response token (0 where not trained): what is expected before that token is drawn."""

    def update(self, batch: Batch) -> Metrics:
        """One optimizer step towards the sequences' returns."""


class WeightSync(Protocol):
    """The only way an engine's version changes."""

    def push(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Bring the engine to the learner's version and prove it. Raises SyncError if the proof fails."""


class Tracker(Protocol):
    """A place where numbers go: W&B, trackio, TensorBoard."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


# --- evaluate -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a score depends on. Two scores whose conditions differ beyond `weights` are not compared unasked."""

    weights: str
    """Fingerprint of the weights (Proof.fingerprint)."""
    model: str
    numerics: str
    """The precision that it was measured in. Example: "bf16"."""
    engine: str
    mode: str
    """Example: "greedy", "sampled(T=1)"."""
    task: str
    data_hash: str
    """Over the ids, messages and answers of the items."""
    template_hash: str
    """Over the chat template, system text, examples and suffix."""
    max_tokens: int
    seed: int
    reasoning_effort: str | None = ""
    """What the chat template is told about thinking. Example: "reasoning_effort=high". None: a record that does not say."""
    prompt_suffix: str | None = ""
    """Text after every question; it is in template_hash too, and stands here to be named. None: a record that does not say."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One reply of an evaluation."""

    id: str
    sample: int
    correct: bool | None
    """None if the reply could not be scored."""
    reward: float | None
    extracted: str | None
    answer: str
    text: str
    truncated: bool
    """By the engine's finish reason, never guessed from the text."""
    tokens: int
    method: str = ""
    """How the answer was read (Grade.method)."""
    boxed: bool | None = None
    """Whether it has an answer in \\boxed{}; None if the verifier does not say."""
    error: str | None = None
    """Why it could not be scored."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number of a score, by its own estimator. Example: Estimate("pass@8", 0.495, 0.031, 0.435, 0.555, 202)"""

    name: str
    """avg@n: mean of n samples; pass@k: any of k, unbiased; maj@n: the majority's answer. pass@1 of one sample is the mark."""
    value: float
    se: float | None
    """Standard error over items; None for a single item."""
    low: float
    high: float
    """95 % interval."""
    items: int
    """Items with enough scored samples."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one evaluation."""

    conditions: Conditions
    accuracy: float
    """The mode's first estimate: the share of correct replies, an item's share counting once, unless the mode says otherwise."""
    low: float
    high: float
    """95 % interval (Wilson for one sample an item, bootstrap over items otherwise)."""
    items: int
    samples: int
    """Replies per item."""
    unscored: int
    truncated: float
    mean_tokens: float
    step: int
    """Trained steps of the weights; 0 is the base model."""
    version: int
    proof: Proof | None
    results: tuple[ItemResult, ...]
    seconds: float
    estimates: tuple[Estimate, ...] = ()
    """All numbers made of these replies; the first is `accuracy`."""
    source: str = ""
    """What was evaluated, as its user named it. Example: "runs/mine at step 40"."""

    @property
    def se(self) -> float | None:
        """Standard error of `accuracy`."""
        return self.estimates[0].se if self.estimates else None
