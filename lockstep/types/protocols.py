"""Interfaces between the parts of the system."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

from lockstep.types.basic import Metrics, TokenIds, WeightStream
from lockstep.types.rollout import Completion, Grade, Prompt, Request, Turn
from lockstep.types.serving import Sampled
from lockstep.types.training import Batch, Loss, TrainSequence
from lockstep.types.weights import Forward, ForwardReport, Proof


class Task(Protocol):
    """Yields prompts and grades replies. Pure: `batch` depends on its arguments alone."""

    name: str

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """Return the prompts of one step."""

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return prompts never returned by `batch`; `role` is id_probe, ood_probe or sanity."""

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        """Grade one reply. Never raises for a bad answer."""


class Env(Protocol):
    """One episode. Deterministic: its output depends on its construction, the seed and the replies alone."""

    def start(self, seed: int) -> Turn:
        """Begin the episode. Returns the opening observation: that of the prompt's messages, or nothing.

        `seed` is a function of (run, step, prompt, sample). It decides what happens by chance after the opening, which all
        samples share.
        """

    def step(self, reply: str) -> Turn:
        """Take the next reply. Never raises for a bad reply: the result is an observation, a reward, or both."""


class EnvTask(Task, Protocol):
    """A task of several turns."""

    def env(self, prompt: Prompt) -> Env | None:
        """Return a new episode of the prompt; None if it is a question with one reply, which `grade` grades."""


class RolloutEngine(Protocol):
    """Draws samples and scores sequences with the weights of one version."""

    version: int

    @property
    def forward(self) -> Forward:
        """The present settings of its forward passes."""
        ...

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Compute in this way from now on; called while no request is open. Nothing of an earlier noise remains.

        Raises EngineError if it cannot, or if a numerics or a noise would change no layer.
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
        """Return the log-probability of each token of each sequence except the first, at temperature 1."""

    def load(self, weights: WeightStream, version: int) -> None:
        """Take over weights and become `version`."""

    def weights(self) -> WeightStream:
        """Return the weights that would sample now, for the proof of sync."""

    def close(self) -> None: ...


@runtime_checkable
class NativeRollouts(Protocol):
    """Further methods and counts of the engines of this process. Others run a cancelled request to its end and count nothing."""

    processed: int
    """Tokens that went through the model for requests since the engine was built: of prompts, and sampled ones."""
    reused: int
    """Tokens of prompts whose keys and values were there already."""

    @property
    def held(self) -> int:
        """Number of rows, waiting requests and prompts in memory for them; 0 when no request is open."""
        ...

    def cancel(self, id: str) -> None:
        """Drop a request, between two tokens. It has no completion; its row and pages are free for the next."""

    def sampled(self, ids: Collection[str]) -> dict[str, Sampled]:
        """Return what is sampled so far for those of these requests that run; called between two tokens."""
        ...

    def forget(self) -> None:
        """Give up the keys and values that are kept for later turns (Request.keep): none will come of these episodes."""


class Learner(Protocol):
    """Owns the trained weights."""

    version: int

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return the log-probability of each token of each sequence except the first, at temperature 1."""

    def update(self, batch: Batch, loss: Loss) -> Metrics: ...

    def weights(self) -> WeightStream: ...


class Critic(Protocol):
    """Predicts the reward still to come, before each response token."""

    def values(self, sequences: Sequence[TrainSequence], prefix: int = 0) -> list[tuple[float, ...]]:
        """Return one value per response token (0 where not trained): the return expected before that token is drawn."""

    def update(self, batch: Batch) -> Metrics:
        """Make one optimizer step towards the sequences' returns."""


class WeightSync(Protocol):
    """The only way an engine's version changes."""

    def push(self, learner: Learner, engine: RolloutEngine) -> Proof:
        """Bring the engine to the learner's version and prove it. Raises SyncError if the proof fails."""


class Tracker(Protocol):
    """A destination for metrics: W&B, trackio, TensorBoard."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...
