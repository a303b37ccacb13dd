"""Episodes that programs play: the run's engine samples the replies to a program's requests, and these tokens are trained.

Requests of all programs go through the one engine together. A request's seed is a function of its episode's seed, of its
prompt's ids and of how often the episode asked for the same ids before: a program that makes the same requests gets the same
replies, in any order.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import time
from array import array
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Turns
from lockstep.envs.programs import Job, Outcome, Programs
from lockstep.errors import DEFECT, EngineError, LockstepError, SpentError, StaleWeightsError
from lockstep.rollout.branches import branches_of
from lockstep.rollout.reply_progress import report_progress
from lockstep.seeds import seed_for
from lockstep.types import (
    ClientRequest,
    Completion,
    EndpointAccess,
    FinishReason,
    Grade,
    NativeRollouts,
    OpenEndpoint,
    Prompt,
    Request,
    Rollout,
    RolloutEngine,
    Sampling,
)


@dataclass(slots=True)
class _Asked:
    """A request of a program that is being sampled."""

    ask: ClientRequest
    future: Future[Completion]
    order: int
    tokens: int
    """Most tokens that it may sample."""


_Event: TypeAlias = tuple[Literal["ask"], ClientRequest, Future[Completion]] | tuple[Literal["cancel"], str] | tuple[
    Literal["end"], str, Outcome
]  # fmt: skip


@dataclass(slots=True)
class AgentEpisode:
    """An episode under way."""

    key: str
    prompt: Prompt
    sample: int
    limits: Turns
    programs: Programs
    token: str
    seed: int
    asked: int = 0
    """Requests so far."""
    spent: int = 0
    """Tokens sampled, those of cancelled requests left out."""
    same: Counter[str] = field(default_factory=Counter)
    """Number of requests for each prompt so far."""
    open: dict[str, _Asked] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    """Completions that the program got, by the order of their requests."""
    out: Literal["", "turns", "tokens"] = ""
    outcome: Outcome | None = None


class Agents:
    """The episodes of programs in one round of sampling, and the Sampler behind their endpoint. `sample` and `cancel` may be
    called by any thread, everything else by the engine's."""

    def __init__(
        self, engine: RolloutEngine, chat: ChatFormat, sampling: Sampling, seed: tuple[int | str, ...], version: int
    ) -> None:
        self._engine, self._chat, self._sampling, self._seed, self._version = engine, chat, sampling, seed, version
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._resources = ExitStack()
        self._endpoint: EndpointAccess | None = None
        self._owner: dict[str, str] = {}
        """Key of the episode of each request in the engine."""
        self.open: dict[str, AgentEpisode] = {}
        self.cancelled = 0
        """Requests whose client went away before the reply was done; they are not trained."""

    # --- Sampler --------------------------------------------------------------------------------------------------
    def sample(self, ask: ClientRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._events.put(("ask", ask, future))
        return future

    def cancel(self, id: str) -> None:
        self._events.put(("cancel", id))

    # --- episodes -------------------------------------------------------------------------------------------------
    def begin(
        self, key: str, prompt: Prompt, sample: int, limits: Turns, programs: Programs, serve: OpenEndpoint | None
    ) -> None:
        """Start a program on a prompt. Raises EngineError where no endpoint can be opened."""
        if serve is None:
            raise EngineError(
                "the task's programs need an endpoint for their requests, but none was opened",
                where=key,
                fix=DEFECT,
            )
        if self._endpoint is None:
            self._endpoint = self._resources.enter_context(serve(self))
        seed = seed_for(*self._seed, prompt.id, sample)
        token = secrets.token_urlsafe(24)
        self.open[key] = AgentEpisode(key, prompt, sample, limits, programs, token, seed)
        self._endpoint.admit(token, key)
        programs.start(Job(key, prompt, sample, seed, self._endpoint.address, token, self._endpoint.take), self._ended)

    @property
    def playing(self) -> bool:
        """True while a program runs."""
        return any(episode.outcome is None for episode in self.open.values())

    def close(self) -> None:
        """Stop what still runs, and the endpoint."""
        for episode in self.open.values():
            episode.programs.stop(episode.key)
            self._refuse(episode, "the round of sampling has ended")
        self.open.clear()
        self._resources.close()

    def _ended(self, key: str, outcome: Outcome) -> None:
        self._events.put(("end", key, outcome))

    def listen(self, seconds: float) -> list[AgentEpisode]:
        """Take what programs asked and said, and submit their requests; returns the episodes whose program has ended.

        Waits at most `seconds` for the first.
        """
        report_progress(self._engine, [asked.ask for one in self.open.values() for asked in one.open.values()])
        ended: list[AgentEpisode] = []
        until = time.monotonic() + seconds
        while True:
            try:
                event = (
                    self._events.get(timeout=left)
                    if (left := until - time.monotonic()) > 0
                    else self._events.get_nowait()
                )
            except queue.Empty:
                return ended
            until = 0.0
            match event:
                case ("ask", ask, future):
                    self._ask(ask, future)
                case ("cancel", id):
                    for name in [name for name in self._owner if name.endswith(f"/{id}")]:
                        self._cancel(name)
                case ("end", key, outcome) if (episode := self.open.get(key)) is not None and episode.outcome is None:
                    episode.outcome = outcome
                    self._refuse(episode, "the episode has ended")
                    if self._endpoint is not None:
                        self._endpoint.withdraw(episode.token)
                    ended.append(episode)

    def _ask(self, ask: ClientRequest, future: Future[Completion]) -> None:
        episode = self.open.get(ask.key)
        if episode is None or episode.outcome is not None:
            return future.set_exception(SpentError("the episode has ended"))
        ask = replace(ask, id=f"{episode.key}/{ask.id}")  # workers are chosen by the key's prompt
        reserved = sum(one.tokens for one in episode.open.values())
        left = self._sampling.max_tokens - episode.spent - reserved
        if episode.asked >= episode.limits.limit or left < 1:
            episode.out = episode.out or ("tokens" if left < 1 else "turns")
            what = (
                f"{episode.limits.limit} requests" if episode.out == "turns" else f"{self._sampling.max_tokens} tokens"
            )
            others = ", or kept for requests under way: give each its max_tokens" if reserved and left < 1 else ""
            return future.set_exception(SpentError(f"the episode's budget of {what} is used up{others}"))
        digest = hashlib.blake2b(array("q", ask.prompt_ids).tobytes(), digest_size=16).hexdigest()
        tokens = min(ask.sampling.max_tokens, left, episode.limits.reply_tokens or left)
        seed = seed_for(episode.seed, digest, episode.same[digest])
        episode.same[digest] += 1
        stop = (*self._sampling.stop, *ask.sampling.stop)
        sampling = replace(self._sampling, max_tokens=tokens, stop=stop)
        request = Request(ask.id, ask.prompt_ids, digest, seed, sampling, self._version, keep=True)
        try:
            self._engine.submit([request])
        except StaleWeightsError:
            raise
        except LockstepError as error:  # a prompt that the engine cannot take is the program's mistake
            return future.set_exception(EngineError(error.what, where=error.where, fix=error.fix))
        episode.open[ask.id] = _Asked(ask, future, episode.asked, tokens)
        episode.asked += 1
        self._owner[ask.id] = episode.key
        return None

    def _cancel(self, id: str) -> None:
        """Leave out a request whose client is gone: no program reads what it would sample."""
        key = self._owner.pop(id, None)
        if key is None:
            return
        asked = self.open[key].open.pop(id)
        asked.future.cancel()
        self.cancelled += 1
        if isinstance(self._engine, NativeRollouts):
            self._engine.cancel(id)

    def _refuse(self, episode: AgentEpisode, why: str) -> None:
        for id, asked in list(episode.open.items()):
            asked.future.set_exception(SpentError(why))
            self._cancel(id)

    def takes(self, completion: Completion) -> bool:
        """Give a completion to the program that asked for it; False if it is none's. One that was cancelled is dropped."""
        id = completion.request.id
        key = self._owner.pop(id, None)
        if key is None:
            return self.cancelled > 0  # other engines cannot drop it, and it may have been done already
        if completion.version != self._version:
            raise StaleWeightsError(
                f"the reply was sampled by version {completion.version} of the weights, "
                f"but version {self._version} was requested",
                where=f"reply {id}",
                fix="load no weights while replies are being sampled",
            )
        episode = self.open[key]
        asked = episode.open.pop(id)
        if completion.request.prompt_ids != asked.ask.prompt_ids or not completion.ids:
            raise EngineError(
                "the reply is empty, or was sampled after another prompt than requested",
                where=f"reply {id}",
                fix=DEFECT,
            )
        try:
            asked.future.set_result(completion)
        except InvalidStateError:
            self.cancelled += 1
            return True
        episode.done[asked.order] = completion
        episode.spent += len(completion.ids)
        return True

    # --- endings --------------------------------------------------------------------------------------------------
    def finish(self, episode: AgentEpisode, grade: Grade) -> Rollout:
        """Return an episode as a rollout: its rows, from nothing but what was asked and sampled."""
        del self.open[episode.key]
        outcome = episode.outcome or Outcome()
        done = [episode.done[order] for order in sorted(episode.done)]
        rows = [replace(row, text=self._chat.decode(row.ids)) for row in branches_of(done)]
        opening = rows[0].prompt_ids if rows else self._chat.render_prompt(episode.prompt)
        length = episode.out == "tokens" or episode.spent >= self._sampling.max_tokens
        first = rows[0] if rows else None
        return Rollout(
            prompt=episode.prompt,
            prompt_ids=opening,
            ids=first.ids if first else (),
            logprobs=first.logprobs if first else (),
            trained=first.trained if first else (),
            text=first.text if first else "",
            finish=FinishReason.LENGTH if length else FinishReason.STOP,
            version=self._version,
            grade=grade,
            sample=episode.sample,
            prefix=len(opening) - 1,
            turns=len(done),
            routes=first.routes if first else b"",
            cut="turns" if episode.out == "turns" else outcome.fault.kind if outcome.fault else "",
            branches=tuple(rows[1:]),
            spent=episode.spent,
        )


def verdict(episode: AgentEpisode) -> Grade | None:
    """Return the grade of an ended episode that needs no verifier: unscored, or by the program's own reward; else None."""
    outcome = episode.outcome or Outcome()
    if outcome.fault is not None:
        return Grade(None, error=f"program: {outcome.fault.why}")
    if not episode.done:
        return Grade(None, error="program: it ended without a reply of the model")
    if outcome.reward is None:
        return None
    metrics = {"correct": float(outcome.reward >= 1), **outcome.metrics}
    return Grade(outcome.reward, metrics, outcome.text or None, "program")
