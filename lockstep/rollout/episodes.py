"""Samples and grades rollouts of prompts, in training and evaluation, for single questions and for episodes of several turns.

A question has one reply, which the task grades. An episode has an environment, which answers each reply until it ends. Replies
are graded and environments step while the engine samples, and a slow grader or environment delays no other reply. Token ids are
only ever appended: the prompt of each turn begins with exactly the ids that were sampled and observed before, and this is
checked in every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lockstep.chat.chat import ChatFormat
from lockstep.chat.continuation import Continuation
from lockstep.envs.runners import Answer, Fault, poll_all
from lockstep.errors import DEFECT, ChatError, EngineError
from lockstep.rollout.agents import AgentEpisode, Agents, verdict
from lockstep.rollout.episode import Episode, Reply, check_reply, check_tokens
from lockstep.rollout.grading import AsyncGrader
from lockstep.seeds import seed_for
from lockstep.tasks.base import BuiltTask
from lockstep.types import (
    Completion,
    FinishReason,
    Grade,
    Group,
    Message,
    NativeRollouts,
    Prompt,
    ReplyText,
    Request,
    Rollout,
    RolloutEngine,
    Sampling,
    TokenIds,
    Turn,
    all_trained,
)

WAIT_SECONDS = 1.0
"""Longest wait for an environment or a grade, while the engine has nothing to do."""
SHORT_SECONDS = 0.005
"""The same wait if both are pending."""


def make_rollouts(
    engine: RolloutEngine,
    chat: ChatFormat,
    task: BuiltTask,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    version: int,
    grader: AsyncGrader,
    progress: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Return a group of `samples` rollouts for each prompt, in order, sampled by the weights of `version`.

    `sampling.max_tokens` is the budget of a whole rollout: everything after the first prompt. A rollout's seed is
    seed_for(*seed, prompt id, sample); those of later turns and of its environment follow from it: a rollout does not depend on
    others sampled at the same time. `progress` is called with the numbers of rollouts done and requested. An environment or a
    grader that fails leaves its rollout unscored, with the reason.

    Raises EngineError if the engine fails or does not answer every request exactly once; StaleWeightsError if it has another
    version of the weights; ChatError for a prompt that cannot be rendered.
    """
    table = Table(engine, chat, task, sampling, seed, version, grader, samples)
    asked = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    done: dict[str, Rollout] = {}
    try:
        with grader:
            for key, rollout in table.play(asked):
                done[key] = rollout
                if progress is not None:
                    progress(len(done), len(asked))
    finally:
        table.close()
    return [Group(prompt, tuple(done[_key(prompt, sample)] for sample in range(samples))) for prompt in prompts]


def _key(prompt: Prompt, sample: int) -> str:
    """Return the key of a rollout. Example: "chain_sum/17#0"."""
    return f"{prompt.id}#{sample}"


class Table:
    """The episodes of one call of `make_rollouts`."""

    def __init__(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        task: BuiltTask,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        version: int,
        grader: AsyncGrader,
        samples: int,
    ) -> None:
        self._samples = samples
        self._agents = Agents(engine, chat, sampling, seed, version)
        self._engine, self._chat, self._task, self._grader = engine, chat, task, grader
        self._sampling, self._seed, self._version = sampling, seed, version
        self._continuation: Continuation | None = None
        self._rendered: dict[str, TokenIds] = {}
        """Token ids by prompt id: the samples of a group share them."""
        self._open: dict[str, Episode] = {}
        self._thinking: set[str] = set()
        """Keys of episodes whose environment is working."""
        self._requested: dict[str, str] = {}
        """Keys of episodes by the id of the request that is sampled for them."""
        self._groups: dict[str, dict[int, tuple[str, ReplyText]]] = {}
        """Keys and replies by sample, of prompts whose samples are graded together and are not all there yet."""
        self._ended: list[tuple[str, Rollout]] = []

    def play(self, asked: Sequence[tuple[Prompt, int]]) -> Iterator[tuple[str, Rollout]]:
        """Yield each rollout once, by its key, as they end."""
        self._engine.submit(self.begin(asked))
        while self._open or self._agents.open:
            for completion in self._engine.completed(self._listen):
                if not self._agents.takes(completion):
                    self._replied(completion)
                self._listen()
                yield from self._take_ended()
            if self._requested:
                raise EngineError(
                    f"the engine did not complete {len(self._requested)} requests, of which this is the first",
                    where=f"request {next(iter(self._requested))}",
                    fix=f"resume from the last checkpoint; {DEFECT}",
                )
            self._listen(WAIT_SECONDS)
            yield from self._take_ended()

    def close(self) -> None:
        """Stop the environments and programs that still work; the engine keeps nothing for their next turns."""
        self._agents.close()
        for episode in self._open.values():
            if episode.runner is not None:
                episode.runner.end(episode.key)
        self._open.clear()
        if isinstance(self._engine, NativeRollouts):
            self._engine.forget()

    def _take_ended(self) -> list[tuple[str, Rollout]]:
        ended, self._ended = self._ended, []
        return ended

    # --- sampling -------------------------------------------------------------------------------------------------
    def begin(self, asked: Sequence[tuple[Prompt, int]]) -> list[Request]:
        """Begin rollouts; returns their first requests (programs have none). Raises ChatError if a prompt cannot be rendered."""
        begun = [self._begin(prompt, sample) for prompt, sample in asked]
        return [request for request in begun if request is not None]

    def _begin(self, prompt: Prompt, sample: int) -> Request | None:
        """Begin a rollout; returns its first request. A program makes its own."""
        key = _key(prompt, sample)
        if key in self._open or key in self._agents.open:
            raise EngineError("two rollouts have the same key", where=f"rollout {key}", fix=DEFECT)
        programs = self._task.programs(prompt)
        if programs is not None:
            self._agents.begin(key, prompt, sample, self._task.limits(prompt), programs, self._task.open_endpoint)
            return None
        ids = self._rendered.get(prompt.id)
        if ids is None:
            ids = self._rendered[prompt.id] = self._chat.render_prompt(prompt)
        limits, runner = self._task.limits(prompt), self._task.runner(prompt)
        prefix, budget = self._chat.shared_prefix(ids), self._sampling.max_tokens
        episode = Episode(key, prompt, sample, self._version, budget, ids, prefix, limits, runner)
        self._open[key] = episode
        if episode.runner is not None:
            self._thinking.add(key)
            episode.runner.begin(key, prompt, seed_for(*self._seed, prompt.id, sample, "environment"))
        return self._request(episode)

    def _request(self, episode: Episode) -> Request:
        """Return the request for the next reply. Samples of a group share the first prompt; later ones are an episode's own."""
        turn, room, key = len(episode.replies), episode.budget - len(episode.ids), episode.key
        tokens = room
        if episode.runner is not None and episode.limits.reply_tokens is not None:
            tokens = min(room, episode.limits.reply_tokens)
        name, seed = (f"{key}/{turn}", (turn,)) if turn else (key, ())
        self._requested[name] = key
        return Request(
            name,
            episode.prompt_ids + episode.ids,
            name if turn else episode.prompt.id,
            seed_for(*self._seed, episode.prompt.id, episode.sample, *seed),
            self._sampling if tokens == self._sampling.max_tokens else replace(self._sampling, max_tokens=tokens),
            episode.version,
            episode.prefix,
            len(episode.prompt_ids) + episode.budget if episode.runner is not None else 0,
            episode.runner is not None,
            self._grader.question(episode.prompt) if episode.runner is None else "",
        )

    def _replied(self, completion: Completion) -> None:
        key = self._requested.pop(completion.request.id, None)
        if key is None:
            what = "the engine returned a reply that was not requested"
            raise EngineError(what, where=f"reply {completion.request.id}", fix=DEFECT)
        episode = self._open[key]
        check_reply(completion, episode)
        episode.replies.append(Reply(len(episode.ids), completion))
        episode.ids += completion.ids
        episode.logprobs += completion.logprobs
        episode.trained += all_trained(len(completion.ids))
        episode.routes += completion.routes[len(episode.routes) :]
        began = time.perf_counter()
        episode.text, answer = completion.read or self._chat.read(completion.ids)
        self._grader.held += time.perf_counter() - began
        if completion.graded is not None:
            self._graded(episode, self._grader.noted(*completion.graded))
            return
        if episode.runner is None:
            self._grade(episode, ReplyText(answer, episode.text, completion.ids), self._samples)
            return
        if episode.fault is not None:
            self._fail(episode, episode.fault)
            return
        episode.unread = answer
        if episode.started:
            self._step(episode)

    def _program_ended(self, episode: AgentEpisode) -> None:
        grade = verdict(episode)
        if grade is not None:
            self._end_program(episode, grade)
            return
        text = episode.outcome.text if episode.outcome is not None else ""
        self._grade(episode, ReplyText(text, text, episode.done[max(episode.done)].ids), 1)

    def _end_program(self, episode: AgentEpisode, grade: Grade) -> None:
        self._ended.append((episode.key, self._agents.finish(episode, grade)))

    def _grade(self, episode: Episode | AgentEpisode, reply: ReplyText, samples: int) -> None:
        """Have a reply graded; where the grader takes all `samples` of a prompt at once, when the last of them is there."""
        prompt = episode.prompt
        reads = self._task.reads(prompt)
        if reads == "answer":
            self._grader.submit(episode.key, prompt, reply.answer)
            return
        group = self._groups.setdefault(prompt.id, {})
        group[episode.sample] = (episode.key, reply)
        if reads == "reply" or len(group) == samples:
            self._grader.submit_replies(prompt, dict(group[sample] for sample in sorted(group)))
            del self._groups[prompt.id]

    # --- environments ---------------------------------------------------------------------------------------------
    def _listen(self, seconds: float = 0.0) -> None:
        """Take grades and turns of environments, and ask the engine for the next replies."""
        playing = self._agents.playing
        for key in self._grader.done(0.0 if self._thinking or playing else seconds):
            if key in self._open:
                self._graded(self._open[key], self._grader.grade(key))
            else:
                self._end_program(self._agents.open[key], self._grader.grade(key))
        if playing:
            for ended in self._agents.listen(
                min(seconds, SHORT_SECONDS) if self._thinking or self._grader.open else seconds
            ):
                self._program_ended(ended)
        if not self._thinking:
            return
        busy = {id(runner): runner for key in self._thinking if (runner := self._open[key].runner) is not None}
        answers = poll_all(
            list(busy.values()), min(seconds, SHORT_SECONDS) if self._grader.open or playing else seconds
        )
        requests = [request for answer in answers if (request := self._answered(answer)) is not None]
        if requests:
            self._engine.submit(requests)

    def _step(self, episode: Episode) -> None:
        assert episode.runner is not None
        assert episode.unread is not None
        reply, episode.unread = episode.unread, None
        self._thinking.add(episode.key)
        episode.runner.step(episode.key, reply)

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

    def _opened(self, episode: Episode, said: Turn | Fault) -> None:
        """Start the episode once its environment is ready; its reply may be there already."""
        if isinstance(said, Turn) and said.observation not in ((), episode.prompt.messages):
            said = Fault("error", "its opening is not that of the prompt: start depends on more than the prompt")
        episode.started = True
        if isinstance(said, Fault):
            self._fail(episode, said)
        elif episode.unread is not None:
            self._step(episode)

    def _turn(self, episode: Episode, said: Turn) -> Request | None:
        """Take the turn that followed a reply; returns the request for the next one, if there is one."""
        if said.answer:
            episode.final = replace(said, answer=False)
            ids = episode.replies[-1].completion.ids
            text, answer = self._chat.read(ids)
            self._grade(episode, ReplyText(answer, text, ids), 1)
            return None
        for name, value in said.metrics.items():
            episode.metrics[name] = episode.metrics.get(name, 0.0) + float(value)
        episode.extracted = said.extracted if said.extracted is not None else episode.extracted
        last = episode.replies[-1]
        if said.reward is None:
            self._end(episode, last.completion.finish, Grade(None, error=said.error))
            return None
        episode.replies[-1] = replace(last, reward=float(said.reward))
        out = last.completion.finish is FinishReason.LENGTH
        if said.done:
            cut = out and len(episode.ids) >= episode.budget
            self._score(episode, FinishReason.LENGTH if cut else FinishReason.STOP)
        elif len(episode.replies) >= episode.limits.limit:
            episode.cut = "turns"
            self._score(episode, FinishReason.STOP)
        elif not self._observe(episode, said.observation):
            self._score(episode, FinishReason.LENGTH)
        else:
            return self._request(episode)
        return None

    def _observe(self, episode: Episode, observation: Sequence[Message]) -> bool:
        """Append an observation, if that leaves room for a reply."""
        if self._continuation is None:
            self._continuation = self._chat.continuation()
        try:
            ids = self._continuation.after(episode.ids[-1], observation)
        except ChatError as error:
            raise ChatError(error.what, where=f"prompt {episode.prompt.id}, {error.where}", fix=error.fix) from error
        if len(episode.ids) + len(ids) >= episode.budget:
            return False
        episode.ids += ids
        episode.logprobs += (0.0,) * len(ids)
        episode.trained += (False,) * len(ids)
        return True

    def _graded(self, episode: Episode, grade: Grade) -> None:
        """Take the task's grade of an only reply or a final answer, which ends the episode."""
        final = episode.final
        if final is None:
            self._end(episode, episode.replies[-1].completion.finish, grade)
        elif grade.reward is None or final.reward is None:
            self._turn(episode, replace(final, reward=None, error=grade.error or final.error))
        else:
            metrics, reward = {**final.metrics, **grade.metrics}, final.reward + grade.reward
            self._turn(episode, replace(final, reward=reward, done=True, metrics=metrics, extracted=grade.extracted))

    # --- endings --------------------------------------------------------------------------------------------------
    def _fail(self, episode: Episode, fault: Fault) -> None:
        """Leave the episode unscored; if its reply is still being sampled, it ends when that arrives."""
        episode.fault, episode.cut = fault, fault.kind
        if episode.key not in self._requested.values():
            self._end(episode, episode.replies[-1].completion.finish, Grade(None, error=f"environment: {fault.why}"))

    def _score(self, episode: Episode, finish: FinishReason) -> None:
        total = sum(reply.reward for reply in episode.replies)
        metrics = {"correct": float(total >= 1), **episode.metrics}
        self._end(episode, finish, Grade(total, metrics, episode.extracted, "environment"))

    def _end(self, episode: Episode, finish: FinishReason, grade: Grade) -> None:
        turns = 0
        if episode.runner is not None:
            episode.runner.end(episode.key)
            turns = len(episode.replies)
            episode.text = self._chat.decode(episode.ids)
        del self._open[episode.key]
        by_turn = turns and episode.limits.credit == "turn" and grade.scored
        check_tokens(episode)
        rollout = Rollout(
            prompt=episode.prompt,
            prompt_ids=episode.prompt_ids,
            ids=episode.ids,
            logprobs=episode.logprobs,
            trained=episode.trained,
            text=episode.text,
            finish=finish,
            version=episode.version,
            grade=grade,
            sample=episode.sample,
            prefix=episode.prefix,
            turn_rewards=tuple((reply.end - 1, reply.reward) for reply in episode.replies) if by_turn else (),
            turns=turns,
            routes=episode.routes,
            cut=episode.cut,
        )
        self._ended.append((episode.key, rollout))
