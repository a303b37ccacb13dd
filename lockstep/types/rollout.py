"""Records of sampling: a task's prompt, requests, completions, grades and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from lockstep.types.basic import Message, TokenIds, count_trained


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a task. Example: Prompt("chain_sum/17", ({"role": "user", "content": "4 + 3 ="},), "7", "chain_sum")"""

    id: str
    """The same id always means the same question and answer."""
    messages: tuple[Message, ...]
    """The task's own turns, without the recipe's system text, examples or suffix."""
    answer: str
    """The reference answer as text."""
    task: str = ""
    """Name of the task that asked it; metrics are also kept per task."""
    data: Mapping[str, object] = field(default_factory=dict)
    """Further data that the grader needs beyond the answer."""
    tools: str = ""
    """Tools that the reply may call, as a JSON list of function schemas; part of the rendered prompt."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verifier's verdict on one reply. `reward is None` means unscored: the reason is in `error`. An error is never a reward
    of 0.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, averaged over the step. Example: {"correct": 1.0, "boxed": 1.0}"""
    extracted: str | None = None
    """The answer as the verifier read it; None if it found none."""
    method: str = ""
    """Method by which the answer was read. Example: "boxed", "last_number", "none"."""
    error: str | None = None
    """Reason why the reply could not be scored."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Named texts for the stored rollouts. Example: {"why": "the unit is missing"}"""

    @property
    def scored(self) -> bool:
        return self.reward is not None

    @property
    def right(self) -> bool | None:
        """True if the reply is correct: by its `correct` if there is one, else by a reward of at least 1. None: unscored."""
        return None if self.reward is None else bool(self.metrics.get("correct", self.reward) >= 1)


@dataclass(frozen=True, slots=True)
class ReplyText:
    """A reply as reward functions of other systems read it. Example: ReplyText("7", "<think>4 + 3</think>7", (9, 31, 2))"""

    answer: str
    """Text after the thoughts, which the built-in verifiers read."""
    text: str
    """All of its text, thoughts included, without its end token."""
    ids: TokenIds
    """Its token ids, with the end token if one was sampled."""

    @classmethod
    def probe(cls, text: str) -> ReplyText:
        """Return a reply that no model sampled, for a self-test: the bytes of its text and a 0 stand for its ids."""
        return cls(text, text, (*text.encode("utf-8", "replace"), 0))


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's result for one reply. Example: Turn(({"role": "user", "content": "higher"},), metrics={"guesses": 1})"""

    observation: tuple[Message, ...] = ()
    """The turns that the next reply answers, of role user or tool; never trained."""
    reward: float | None = 0.0
    """Reward of the reply. None: the episode cannot be scored, `error` says why."""
    done: bool = False
    """True if the episode ends here; no further reply is asked for."""
    answer: bool = False
    """True if the reply was the final answer to the prompt's question: the task's `grade` adds its reward; the episode ends."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers, summed over the episode. `correct`, if any turn has it, means that the episode was solved."""
    extracted: str | None = None
    """The answer or action as it was read."""
    error: str | None = None
    """Reason why the episode cannot be scored."""


class FinishReason(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"
    """An end token or a stop string was produced."""
    LENGTH = "length"
    """The token budget ran out: the completion is truncated."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling. `temperature == 0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this total probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens up to the one that completes the string are kept."""
    ignore_eos: bool = False
    """Disables early stops: every completion has exactly `max_tokens` tokens (benchmarks)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw. Requests that share `group` share their prompt, which is then prefilled once."""

    id: str
    prompt_ids: TokenIds
    group: str
    seed: int
    """Seed from `seed_for(run, step, prompt, sample)`: the sample depends on nothing else."""
    sampling: Sampling
    version: int
    """Weight version that must sample it; the engine refuses any other."""
    prefix: int = 0
    """Number of leading prompt tokens that all prompts of the recipe share (system text, examples): processed once per version.
    """
    room: int = 0
    """Most tokens that later requests of the same episode may reach, prompt included, so that memory is reserved once."""
    keep: bool = False
    """True if later requests may begin with these ids: an engine that can keeps their keys and values."""
    graded: str = ""
    """The question, as a message of workers.wire, if the reply is to be graded where it is sampled."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's result for a request, as token ids; text is never turned back into ids."""

    request: Request
    ids: TokenIds
    """Sampled ids, including the end token if one was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution that it was drawn from."""
    finish: FinishReason
    version: int
    """Version of the weights that sampled it."""
    read: tuple[str, str] | None = None
    """Its text and its answer (ChatFormat.read), if they were decoded where it was sampled."""
    routes: bytes = b""
    """Experts of every token that was fed, prompt included (models.routing.Row); empty if none are recorded."""
    graded: tuple[Grade, float, float] | None = None
    """Its grade, the seconds that grading took, and those in which its engine waited for it, if it was graded beside it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One row of an episode: tokens that followed one another. Lists are per token after its prompt."""

    prompt_ids: TokenIds
    """Ids before its first own reply. Tokens among them that were sampled in an earlier row are trained there, not here."""
    ids: TokenIds
    logprobs: tuple[float, ...]
    """Log-probability of each token; 0 for observed tokens."""
    trained: tuple[bool, ...]
    """True for tokens that were sampled in this row."""
    text: str = ""
    """The decoded ids, for people and records."""
    routes: bytes = field(default=b"", kw_only=True)
    """Experts of every token up to the last one fed, prompt included (Completion.routes)."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One graded sample of a prompt: a reply, or a whole episode as one response. Lists are per response token: all tokens after
    the first prompt."""

    prompt: Prompt
    prompt_ids: TokenIds
    ids: TokenIds
    logprobs: tuple[float, ...]
    trained: tuple[bool, ...]
    """False for tokens that the policy did not choose (observations, tool output)."""
    text: str
    """The decoded response, for people and records."""
    finish: FinishReason
    """LENGTH if the token budget ran out, in a reply or before the next one."""
    version: int
    grade: Grade
    sample: int = 0
    """Index within the group."""
    prefix: int = 0
    """Number of leading prompt tokens that all prompts of the recipe share."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards credited turn by turn: index of each reply's last token, and its reward. Empty: all at the end."""
    turns: int = 0
    """Number of replies of an episode with an environment; 0 for a question with one reply."""
    routes: bytes = b""
    """Experts of every token up to the last one fed, likewise (Completion.routes)."""
    cut: Literal["", "turns", "timeout", "error"] = ""
    """Cause of an early end of the episode: its limit of turns, or its environment, which took too long or failed."""
    branches: tuple[Branch, ...] = ()
    """Further rows of the episode: histories that its program rewrote or forked. They share its grade."""
    spent: int | None = None
    """Tokens of the episode that count towards rollout.max_tokens, where those are not all of `ids`: of a program's episode it is
    what was sampled in all of its rows, and not what its tools said."""

    @property
    def charged(self) -> int:
        """Number of tokens that count towards rollout.max_tokens."""
        return len(self.ids) if self.spent is None else self.spent

    @property
    def rows(self) -> tuple[Branch, ...]:
        """All rows of the episode; the first is the rollout's own."""
        first = Branch(self.prompt_ids, self.ids, self.logprobs, self.trained, self.text, routes=self.routes)
        return (first, *self.branches)

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy chose, in all rows."""
        return count_trained(self.trained) + sum(count_trained(branch.trained) for branch in self.branches)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
