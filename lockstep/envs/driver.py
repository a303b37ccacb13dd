"""Plays episodes of several turns through an engine: samples, steps environments, appends, until all have ended.

Environments work while the engine samples, and a slow one holds nobody up. Ids are only ever appended: the prompt of each
turn begins with exactly the ids that were sampled and observed so far, which is checked for every one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeGuard

from lockstep.chat.chat import ChatFormat
from lockstep.chat.continuation import Continuation
from lockstep.config.schema import Turns
from lockstep.envs.checks import check_append, check_tokens
from lockstep.envs.runners import Answer, Fault, Runner, poll_all
from lockstep.errors import ChatError, EngineError
from lockstep.seeds import seed_for
from lockstep.types import (
    Completion,
    FinishReason,
    Grade,
    Message,
    Prompt,
    Request,
    RolloutEngine,
    Sampling,
    Task,
    TokenIds,
    Turn,
)
from lockstep.verifiers.beside import Grading

WAIT_SECONDS = 1.0
"""How long is waited for an environment or a grade at a time, while the engine has nothing to do."""
SHORT_SECONDS = 0.005
"""The same where both are waited for."""


class PlayedTask(Task, Protocol):
    """A task of which some prompts are episodes."""

    def runner(self, prompt: Prompt) -> Runner | None:
        """Where the prompt's environment runs; None if it is a question with one reply."""

    def limits(self, prompt: Prompt) -> Turns: ...


def plays(task: Task) -> TypeGuard[PlayedTask]:
    """Whether any of a task's prompts may be an episode of several turns."""
    return bool(getattr(task, "plays", hasattr(task, "runner")))


@dataclass(frozen=True, slots=True)
class Ask:
    """One episode to play."""

    key: str
    """Different for each."""
    prompt: Prompt
    seed: tuple[int | str, ...]
    """Key of the first reply's seed; those of the others and of the environment follow from it."""
    sampling: Sampling
    """Its `max_tokens` is the budget of the whole episode: everything after the first prompt."""
    version: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of an episode: where it stands, and what came of it."""

    start: int
    completion: Completion
    reward: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.completion.ids)


@dataclass(frozen=True, slots=True)
class Played:
    """One episode that has ended. Lists are per token after the first prompt."""

    ask: Ask
    prompt_ids: TokenIds
    prefix: int
    ids: TokenIds
    logprobs: tuple[float, ...]
    """0 for tokens that were observed."""
    trained: tuple[bool, ...]
    """True for those that were sampled."""
    replies: tuple[Reply, ...]
    finish: FinishReason
    """LENGTH if the token budget ran out, in a reply or before the next one."""
    grade: Grade
    turn_rewards: tuple[tuple[int, float], ...]
    """Last token of each reply and what it earned, if credit goes by turns."""
    episode: bool
    """Whether it had an environment: a question with one reply has none."""
    out_of_turns: bool = False
    """It was ended by the limit of its turns."""
    fault: Literal["", "timeout", "error"] = ""
    """What its environment failed by."""

    @property
    def version(self) -> int:
        return self.replies[0].completion.version


@dataclass(slots=True)
class _Episode:
    """One episode on its way."""

    ask: Ask
    prompt_ids: TokenIds
    prefix: int
    limits: Turns
    runner: Runner | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    started: bool = False
    """Its environment has said its opening."""
    unread: str | None = None
    """A reply that the environment has not been given yet."""
    said: Turn | None = None
    """What the environment said of a final answer, which is being graded."""
    fault: Fault | None = None
    """Why it cannot be scored, known while its reply is still being sampled."""
    out_of_turns: bool = False


def play(
    engine: RolloutEngine, chat: ChatFormat, task: PlayedTask, asks: Sequence[Ask], grading: Grading | None = None
) -> Iterator[Played]:
    """Each episode once, as they end; samples do not depend on the order.

    Final answers, and questions with one reply, are graded beside the sampling of the others, by `grading` if it is given: it
    then knows what that took. An environment that fails or takes too long leaves its episode unscored, with the reason.

    Raises EngineError if the engine fails or answers something else than it was asked; ChatError for a prompt that cannot be
    rendered.
    """
    with grading or Grading(task) as graders:
        table = _Table(engine, chat, task, graders)
        try:
            yield from table.play(asks)
        finally:
            table.close()


class _Table:
    """The episodes of one call of `play`."""

    def __init__(self, engine: RolloutEngine, chat: ChatFormat, task: PlayedTask, grading: Grading) -> None:
        self._engine, self._chat, self._task, self._grading = engine, chat, task, grading
        self._continuation: Continuation | None = None
        self._open: dict[str, _Episode] = {}
        self._thinking: set[str] = set()
        """Keys of episodes whose environment has been asked something."""
        self._sampling: dict[str, str] = {}
        """Keys of episodes by the id of the request that is sampled for them."""
        self._ended: list[Played] = []

    def play(self, asks: Sequence[Ask]) -> Iterator[Played]:
        requests = [self._begin(ask) for ask in asks]
        self._engine.submit(requests)
        while self._open:
            for completion in self._engine.completed(self._listen):
                self._replied(completion)
                self._listen()
                yield from self._taken()
            if self._sampling:
                raise EngineError(
                    f"{len(self._sampling)} requests were never completed", where=next(iter(self._sampling))
                )
            self._listen(WAIT_SECONDS)
            yield from self._taken()

    def close(self) -> None:
        """End what environments still work on."""
        for episode in self._open.values():
            if episode.runner is not None:
                episode.runner.end(episode.ask.key)
        self._open.clear()

    def _taken(self) -> Iterator[Played]:
        ended, self._ended = self._ended, []
        yield from ended

    # --- sampling -------------------------------------------------------------------------------------------------
    def _begin(self, ask: Ask) -> Request:
        if ask.key in self._open:
            raise EngineError("two episodes have this key", where=ask.key)
        ids = self._chat.render_prompt(ask.prompt)
        episode = _Episode(
            ask, ids, self._chat.shared_prefix(ids), self._task.limits(ask.prompt), self._task.runner(ask.prompt)
        )
        self._open[ask.key] = episode
        if episode.runner is not None:
            self._thinking.add(ask.key)
            episode.runner.begin(ask.key, ask.prompt, seed_for(*ask.seed, "environment"))
        return self._request(episode)

    def _request(self, episode: _Episode) -> Request:
        """The next reply. The first one's prompt is shared by the samples of a group, later ones are an episode's own."""
        ask, turn, room = episode.ask, len(episode.replies), episode.ask.sampling.max_tokens - len(episode.ids)
        tokens = room
        if episode.runner is not None and episode.limits.reply_tokens is not None:
            tokens = min(room, episode.limits.reply_tokens)
        name = f"{ask.key}/{turn}" if turn else ask.key
        self._sampling[name] = ask.key
        return Request(
            name,
            (*episode.prompt_ids, *episode.ids),
            name if turn else ask.prompt.id,
            seed_for(*ask.seed, turn) if turn else seed_for(*ask.seed),
            replace(ask.sampling, max_tokens=tokens),
            ask.version,
            episode.prefix,
            len(episode.prompt_ids) + ask.sampling.max_tokens if episode.runner is not None else 0,
        )

    def _replied(self, completion: Completion) -> None:
        key = self._sampling.pop(completion.request.id, None)
        if key is None:
            raise EngineError("the engine returned a reply that was not asked for", where=completion.request.id)
        episode = self._open[key]
        check_append(completion, episode.prompt_ids, episode.ids)
        episode.replies.append(Reply(len(episode.ids), completion))
        episode.ids += completion.ids
        episode.logprobs += completion.logprobs
        episode.trained += [True] * len(completion.ids)
        text = self._chat.answer(completion.ids)
        if episode.runner is None:
            self._grading.submit(key, episode.ask.prompt, text)
            return
        if episode.fault is not None:
            self._fail(episode, episode.fault)
            return
        episode.unread = text
        if episode.started:
            self._step(episode)

    # --- environments ---------------------------------------------------------------------------------------------
    def _listen(self, seconds: float = 0.0) -> None:
        """Take grades and what environments have said, and ask the engine for the replies to it."""
        for key in self._grading.done(0.0 if self._thinking else seconds):
            self._graded(self._open[key], self._grading.grade(key))
        if not self._thinking:
            return
        busy = {id(runner): runner for key in self._thinking if (runner := self._open[key].runner) is not None}
        answers = poll_all(list(busy.values()), min(seconds, SHORT_SECONDS) if self._grading.open else seconds)
        requests = [request for answer in answers if (request := self._answered(answer)) is not None]
        if requests:
            self._engine.submit(requests)

    def _step(self, episode: _Episode) -> None:
        assert episode.runner is not None
        assert episode.unread is not None
        reply, episode.unread = episode.unread, None
        self._thinking.add(episode.ask.key)
        episode.runner.step(episode.ask.key, reply)

    def _answered(self, answer: Answer) -> Request | None:
        key, said = answer
        episode = self._open.get(key)
        if episode is None:
            return None
        self._thinking.discard(key)
        if not episode.started:
            self._opened(episode, said)
            return None
        if isinstance(said, Fault):
            self._fail(episode, said)
            return None
        return self._turn(episode, said)

    def _opened(self, episode: _Episode, said: Turn | Fault) -> None:
        """The environment stands ready; its reply may be there already."""
        if isinstance(said, Turn) and said.observation not in ((), episode.ask.prompt.messages):
            said = Fault("error", "its opening is not that of the prompt: start depends on more than the prompt")
        episode.started = True
        if isinstance(said, Fault):
            self._fail(episode, said)
        elif episode.unread is not None:
            self._step(episode)

    def _turn(self, episode: _Episode, said: Turn) -> Request | None:
        """Take what followed a reply; the request for the next one, if there is to be one."""
        if said.answer:
            episode.said = replace(said, answer=False)
            text = self._chat.answer(episode.replies[-1].completion.ids)
            self._grading.submit(episode.ask.key, episode.ask.prompt, text)
            return None
        for name, value in said.metrics.items():
            episode.metrics[name] = episode.metrics.get(name, 0.0) + float(value)
        episode.extracted = said.extracted if said.extracted is not None else episode.extracted
        last = episode.replies[-1]
        if said.reward is None:
            self._end(episode, last.completion.finish, Grade(None, error=said.error))
            return None
        episode.replies[-1] = replace(last, reward=float(said.reward))
        budget, out = episode.ask.sampling.max_tokens, last.completion.finish is FinishReason.LENGTH
        if said.done:
            cut = out and len(episode.ids) >= budget
            self._score(episode, FinishReason.LENGTH if cut else FinishReason.STOP)
        elif len(episode.replies) >= episode.limits.limit:
            episode.out_of_turns = True
            self._score(episode, FinishReason.STOP)
        elif not self._observe(episode, said.observation):
            self._score(episode, FinishReason.LENGTH)
        else:
            return self._request(episode)
        return None

    def _observe(self, episode: _Episode, observation: Sequence[Message]) -> bool:
        """Append an observation, if that leaves room for a reply."""
        if self._continuation is None:
            self._continuation = self._chat.continuation()
        try:
            ids = self._continuation.after(episode.ids[-1], observation)
        except ChatError as error:
            raise ChatError(
                error.what, where=f"prompt {episode.ask.prompt.id}, {error.where}", fix=error.fix
            ) from error
        if len(episode.ids) + len(ids) >= episode.ask.sampling.max_tokens:
            return False
        episode.ids += ids
        episode.logprobs += [0.0] * len(ids)
        episode.trained += [False] * len(ids)
        return True

    def _graded(self, episode: _Episode, grade: Grade) -> None:
        """Take the task's grade of an only reply or a final answer, which ends the episode."""
        said = episode.said
        if said is None:
            self._end(episode, episode.replies[-1].completion.finish, grade)
        elif grade.reward is None or said.reward is None:
            self._turn(episode, replace(said, reward=None, error=grade.error or said.error))
        else:
            metrics, reward = {**said.metrics, **grade.metrics}, said.reward + grade.reward
            self._turn(episode, replace(said, reward=reward, done=True, metrics=metrics, extracted=grade.extracted))

    # --- endings --------------------------------------------------------------------------------------------------
    def _fail(self, episode: _Episode, fault: Fault) -> None:
        """Unscored. If its reply is still being sampled, the episode ends when that arrives."""
        episode.fault = fault
        if episode.ask.key not in self._sampling.values():
            self._end(episode, episode.replies[-1].completion.finish, Grade(None, error=f"environment: {fault.why}"))

    def _score(self, episode: _Episode, finish: FinishReason) -> None:
        total = sum(reply.reward for reply in episode.replies)
        metrics = {"correct": float(total >= 1), **episode.metrics}
        self._end(episode, finish, Grade(total, metrics, episode.extracted, "environment"))

    def _end(self, episode: _Episode, finish: FinishReason, grade: Grade) -> None:
        if episode.runner is not None:
            episode.runner.end(episode.ask.key)
        del self._open[episode.ask.key]
        by_turn = episode.runner is not None and episode.limits.credit == "turn" and grade.scored
        played = Played(
            episode.ask,
            episode.prompt_ids,
            episode.prefix,
            tuple(episode.ids),
            tuple(episode.logprobs),
            tuple(episode.trained),
            tuple(episode.replies),
            finish,
            grade,
            tuple((reply.end - 1, reply.reward) for reply in episode.replies) if by_turn else (),
            episode.runner is not None,
            episode.out_of_turns,
            episode.fault.kind if episode.fault is not None else "",
        )
        check_tokens(played)
        self._ended.append(played)
