"""Rollouts: what is sampled is what is trained, samples do not depend on the order, failures are one sample's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.envs.runners import ProcessRunner
from lockstep.errors import EngineError, StaleWeightsError
from lockstep.rollout.episode import Episode, Reply, check_tokens
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.tasks.build import build_task
from lockstep.tasks.multi_turn import SeededEpisodes, build_own
from lockstep.types import Completion, FinishReason, Prompt, Request, Sampling
from tests.envs.played import LIMITS, OWN, chat_of, engine_of, play


def own(mode: str = "good", delay: float = 0.0, **turns: object) -> SeededEpisodes:
    settings = schema.EnvTask(
        path=f"{OWN}:Counter",
        settings={"mode": mode, "delay": delay},
        seeds=8,
        turns=LIMITS.model_copy(update=turns),
    )
    made = build_own(settings, 0)
    assert isinstance(made, SeededEpisodes)
    return made


@pytest.fixture(scope="module")
def good() -> SeededEpisodes:
    """A task that several tests share: whatever became of the episodes of one, those of the next are as if it had been alone."""
    return own()


def test_every_prompt_continues_the_ids_that_are_there_and_only_sampled_ids_are_trained(
    tiny_model_dir: Path, good: SeededEpisodes
) -> None:
    task, chat = good, chat_of(tiny_model_dir)
    played = play(engine_of(tiny_model_dir), chat, task, task.batch(0, 3))
    for one in played.values():
        rollout = one.rollout
        assert len(one.replies) == rollout.turns == 3
        before = rollout.prompt_ids
        for reply in one.replies:
            prompt = reply.request.prompt_ids
            assert prompt[: len(before)] == before
            before = prompt + reply.ids
        assert rollout.prompt_ids + rollout.ids == before
        sampled = [token for reply in one.replies for token in reply.ids]
        drawn = [logprob for reply in one.replies for logprob in reply.logprobs]
        assert [token for token, trained in zip(rollout.ids, rollout.trained, strict=True) if trained] == sampled
        assert [value for value, trained in zip(rollout.logprobs, rollout.trained, strict=True) if trained] == drawn
        observed = [i for i, trained in enumerate(rollout.trained) if not trained]
        assert observed
        assert all(rollout.logprobs[i] == 0 for i in observed)
        said = chat.tokenizer.decode([rollout.ids[i] for i in observed])
        assert said.count("< |im_end|> go on<|im_end|>\n<|im_start|>assistant\n") == 2  # a control token was broken up
        assert rollout.grade.reward == 0.75
        assert rollout.grade.metrics["correct"] == 0.0


def episode() -> Episode:
    """Two replies with an observation of two tokens between them."""
    prompt, sampling = Prompt("p", (), ""), Sampling(20)

    def completion(before: tuple[int, ...], ids: tuple[int, ...]) -> Completion:
        return Completion(Request("p#0", before, "p", 0, sampling, 0), ids, (-0.5,) * len(ids), FinishReason.STOP, 0)

    return Episode(
        "p#0",
        prompt,
        0,
        0,
        20,
        (1, 2),
        0,
        LIMITS,
        None,
        ids=(3, 4, 9, 9, 5, 6),
        logprobs=(-0.5, -0.5, 0.0, 0.0, -0.5, -0.5),
        trained=(True, True, False, False, True, True),
        replies=[Reply(0, completion((1, 2), (3, 4))), Reply(4, completion((1, 2, 3, 4, 9, 9), (5, 6)))],
    )


def test_the_check_of_tokens_notices_one_wrong_token() -> None:
    good = episode()
    check_tokens(good)
    for change in (
        {"ids": (3, 5, 9, 9, 5, 6)},
        {"ids": (3, 4, 8, 9, 5, 6)},
        {"trained": (True, True, True, False, True, True)},
        {"trained": (False, True, False, False, True, True)},
        {"logprobs": (-0.25, -0.5, 0.0, 0.0, -0.5, -0.5)},
        {"prompt_ids": (1, 2, 5)},
        {"replies": good.replies[:-1]},
        {"replies": [replace(good.replies[0], start=1), good.replies[1]]},
    ):
        with pytest.raises(EngineError):
            check_tokens(replace(good, **change))


class Tampered(NativeEngine):
    """Changes each completion before it is read."""

    def __init__(self, folder: Path, change: Callable[[Completion], list[Completion]]) -> None:
        self.__dict__ = engine_of(folder).__dict__
        self._change = change

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        for completion in super().completed(between):
            yield from self._change(completion)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (lambda one: [replace(one, version=3)], StaleWeightsError, "version 3 of the weights, but version 0"),
        (lambda one: [one, one], EngineError, "not requested"),
        (lambda one: [], EngineError, "did not complete"),
        (lambda one: [replace(one, ids=(), logprobs=())], EngineError, "the reply is empty"),
        (
            lambda one: [replace(one, request=replace(one.request, prompt_ids=(7,)))],
            EngineError,
            "other tokens than those of its episode",
        ),
    ],
)
def test_an_engine_that_answers_something_else_is_refused(
    tiny_model_dir: Path,
    good: SeededEpisodes,
    change: Callable[[Completion], list[Completion]],
    error: type[Exception],
    why: str,
) -> None:
    task = good
    engine = Tampered(tiny_model_dir, change)
    with pytest.raises(error, match=why):
        make_rollouts(
            engine, chat_of(tiny_model_dir), task, task.batch(0, 2), 2, Sampling(60), (7,), 0, AsyncGrader(task)
        )


def test_samples_depend_on_neither_slots_nor_delays_nor_company(tiny_model_dir: Path, good: SeededEpisodes) -> None:
    chat = chat_of(tiny_model_dir)
    quick, slow = good, own(delay=0.05)
    prompts = quick.batch(0, 4)
    many = play(engine_of(tiny_model_dir, slots=8), chat, quick, prompts)
    few = play(engine_of(tiny_model_dir, slots=2), chat, slow, prompts)
    alone = play(engine_of(tiny_model_dir, slots=3), chat, quick, prompts[2:3])
    for key, one in many.items():
        assert one.rollout == few[key].rollout
    for key, one in alone.items():
        assert one.rollout == many[key].rollout
    assert len({one.replies[0].ids for one in many.values()}) == len(many)  # before any observation


def test_the_paged_engine_plays_the_same_episodes(tiny_model_dir: Path, good: SeededEpisodes) -> None:
    chat, task = chat_of(tiny_model_dir), good
    prompts = task.batch(0, 3)
    plain = play(engine_of(tiny_model_dir, slots=2), chat, task, prompts)
    paged = play(engine_of(tiny_model_dir, slots=2, kind=PagedEngine), chat, task, prompts)
    same = sum(paged[key].rollout.ids == one.rollout.ids for key, one in plain.items())
    assert same >= len(plain) - 1  # a number within rounding of two tokens' bounds may fall to either


@pytest.mark.parametrize(
    ("mode", "kind", "why"),
    [
        ("hangs", "timeout", "longer than 1 s"),
        ("throws", "error", "the dice are lost"),
        ("dies", "error", "its process ended"),
        ("forks", "timeout", "longer than 1 s"),
        ("grows", "error", "MemoryError"),
    ],
)
def test_an_environment_that_fails_leaves_its_own_sample_unscored(
    tiny_model_dir: Path, mode: str, kind: str, why: str
) -> None:
    bad = own(mode, step_seconds=1 if kind == "timeout" else 20, memory_gib=2)
    played = play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), bad, bad.batch(0, 1), 2)
    for one in played.values():
        assert one.rollout.grade.reward is None
        assert why in (one.rollout.grade.error or "")
        assert (one.rollout.cut, one.rollout.turns) == (kind, 2)


def test_only_the_episode_whose_process_is_killed_is_lost(tiny_model_dir: Path) -> None:
    task, chat = own(), chat_of(tiny_model_dir)
    prompts = task.batch(0, 4)
    whole = play(engine_of(tiny_model_dir), chat, task, prompts, 1)
    runner = task.runner(prompts[0])
    assert isinstance(runner, ProcessRunner)
    victim, step = f"{prompts[1].id}#0", runner.step

    def kill_first(key: str, reply: str) -> None:
        if key == victim:
            os.kill(runner._open[key].process.pid, signal.SIGKILL)
        step(key, reply)

    runner.step = kill_first  # type: ignore[method-assign]
    played = play(engine_of(tiny_model_dir), chat, task, prompts, 1)
    assert played[victim].rollout.grade.error == "environment: its process ended"
    assert all(played[key].rollout == one.rollout for key, one in whole.items() if key != victim)


@pytest.mark.sampled("none", "inf")
@pytest.mark.parametrize("what", ["none", "text", "inf", "assistant", "no_reason"])
def test_what_is_no_turn_is_named_and_not_scored(tiny_model_dir: Path, what: str) -> None:
    settings = schema.EnvTask(path=f"{OWN}:Returns", settings={"what": what}, seeds=2, turns=LIMITS)
    task = build_task(settings, 0)
    (one,) = play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, task.batch(0, 1), 1).values()  # type: ignore[arg-type]
    assert one.rollout.grade.reward is None
    assert (one.rollout.grade.error or "").startswith("environment: the ")


def test_budgets_end_an_episode_and_keep_what_it_earned(tiny_model_dir: Path, good: SeededEpisodes) -> None:
    chat, engine = chat_of(tiny_model_dir), engine_of(tiny_model_dir)
    task = own(limit=2)
    for one in play(engine, chat, task, task.batch(0, 1)).values():
        assert (one.rollout.turns, one.rollout.cut, one.rollout.finish) == (2, "turns", FinishReason.STOP)
        assert one.rollout.grade.reward == 0.5
    task = good
    whole = play(engine, chat, task, task.batch(0, 1))
    for key, one in play(engine, chat, task, task.batch(0, 1), budget=40).items():
        assert len(one.rollout.ids) <= 40
        assert one.rollout.finish is FinishReason.LENGTH
        assert one.rollout.ids == whole[key].rollout.ids[: len(one.rollout.ids)]
        assert one.rollout.trained[-1]  # an observation behind which there is no room for a reply is left out
        assert one.rollout.grade.scored


def test_credit_by_turns_says_where_each_reward_stands(tiny_model_dir: Path) -> None:
    task = own(credit="turn")
    (one,) = play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, task.batch(0, 1), 1).values()
    ends = [len(reply.request.prompt_ids) + len(reply.ids) - len(one.rollout.prompt_ids) for reply in one.replies]
    assert one.rollout.turn_rewards == tuple((end - 1, 0.25) for end in ends)
    assert all(one.rollout.trained[place] for place, _ in one.rollout.turn_rewards)


def test_questions_of_an_environment_task_of_ones_own(tiny_model_dir: Path) -> None:
    task = build_task(schema.EnvTask(path=f"{OWN}:Sums", turns=LIMITS), 0)
    (one,) = play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, task.batch(0, 1), 1).values()  # type: ignore[arg-type]
    assert one.rollout.turns
    assert one.rollout.grade.reward == 0.75
    assert [prompt.answer for prompt in task.heldout("id_probe", 2)] == ["0", "1"]


def test_a_slow_environment_does_not_stall_the_others(tiny_model_dir: Path) -> None:
    """The engine samples other episodes while one environment thinks: replies of others come between its turns."""
    task = own(delay=0.3)
    prompts = task.batch(0, 6)
    order: list[str] = []
    engine = engine_of(tiny_model_dir)

    class Watched(NativeEngine):
        def __init__(self) -> None:
            self.__dict__ = engine.__dict__

        def submit(self, requests: object) -> None:
            order.extend(request.id for request in requests)  # type: ignore[attr-defined]
            super().submit(requests)  # type: ignore[arg-type]

    slow = {p.id for p in prompts if p.data["seed"] % 3 == 2}  # type: ignore[operator]
    quick = {p.id for p in prompts if p.data["seed"] % 3 == 0}  # type: ignore[operator]
    if not slow or not quick:
        pytest.skip("these seeds are all alike")
    play(Watched(), chat_of(tiny_model_dir), task, prompts, 1)
    second = {name: place for place, name in enumerate(order)}
    assert min(second[f"{p}#0/1"] for p in slow) > max(second[f"{p}#0/2"] for p in quick)
