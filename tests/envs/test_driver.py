"""Playing episodes: what is sampled is what is trained, samples do not depend on the order, failures are one sample's own."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.envs.driver import check_tokens
from lockstep.envs.runners import ProcessRunner
from lockstep.envs.tasks import SeededEpisodes, build_own
from lockstep.errors import EngineError
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.tasks.build import build_task
from lockstep.types import FinishReason
from tests.envs.played import LIMITS, OWN, asks, by_key, chat_of, engine_of


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


def test_every_prompt_continues_the_ids_that_are_there_and_only_sampled_ids_are_trained(tiny_model_dir: Path) -> None:
    task, chat = own(), chat_of(tiny_model_dir)
    played = by_key(engine_of(tiny_model_dir), chat, task, asks(task.batch(0, 3)))
    for one in played.values():
        assert len(one.replies) == 3
        before = one.prompt_ids
        for reply in one.replies:
            prompt = reply.completion.request.prompt_ids
            assert prompt[: len(before)] == before
            assert one.ids[reply.start : reply.end] == reply.completion.ids
            before = prompt + reply.completion.ids
        assert one.prompt_ids + one.ids == before
        sampled = [token for reply in one.replies for token in reply.completion.ids]
        assert [token for token, trained in zip(one.ids, one.trained, strict=True) if trained] == sampled
        observed = [i for i, trained in enumerate(one.trained) if not trained]
        assert observed
        assert all(one.logprobs[i] == 0 for i in observed)
        said = chat.tokenizer.decode([one.ids[i] for i in observed])
        assert said.count("< |im_end|> go on<|im_end|>\n<|im_start|>assistant\n") == 2  # a control token was broken up
        assert one.grade.reward == 0.75
        assert one.grade.metrics["correct"] == 0.0


def test_the_check_of_tokens_notices_one_wrong_token(tiny_model_dir: Path) -> None:
    task = own()
    played = next(
        iter(by_key(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, asks(task.batch(0, 1), 1)).values())
    )
    first, gap = played.replies[0], played.trained.index(False)
    broken = [
        replace(played, ids=(*played.ids[:1], played.ids[1] + 1, *played.ids[2:])),
        replace(played, ids=(*played.ids[:gap], played.ids[gap] + 1, *played.ids[gap + 1 :])),
        replace(played, trained=(*played.trained[:gap], True, *played.trained[gap + 1 :])),
        replace(played, trained=(False, *played.trained[1:])),
        replace(played, logprobs=(0.5, *played.logprobs[1:])),
        replace(played, prompt_ids=(*played.prompt_ids, 5)),
        replace(played, replies=played.replies[:-1]),
        replace(played, replies=(replace(first, start=1), *played.replies[1:])),
    ]
    check_tokens(played)
    for wrong in broken:
        with pytest.raises(EngineError):
            check_tokens(wrong)


def test_samples_depend_on_neither_slots_nor_delays_nor_company(tiny_model_dir: Path) -> None:
    chat = chat_of(tiny_model_dir)
    quick, slow = own(), own(delay=0.05)
    prompts = quick.batch(0, 4)
    many = by_key(engine_of(tiny_model_dir, slots=8), chat, quick, asks(prompts))
    few = by_key(engine_of(tiny_model_dir, slots=2), chat, slow, asks(prompts))
    alone = by_key(engine_of(tiny_model_dir, slots=3), chat, quick, asks(prompts)[5:6])
    for key, one in many.items():
        assert (one.ids, one.logprobs, one.trained) == (few[key].ids, few[key].logprobs, few[key].trained)
    for key, one in alone.items():
        assert (one.ids, one.logprobs) == (many[key].ids, many[key].logprobs)
    assert len({one.ids for one in many.values()}) == len(many)


def test_the_paged_engine_plays_the_same_episodes(tiny_model_dir: Path) -> None:
    chat, task = chat_of(tiny_model_dir), own()
    prompts = task.batch(0, 3)
    plain = by_key(engine_of(tiny_model_dir, slots=2), chat, task, asks(prompts))
    paged = by_key(engine_of(tiny_model_dir, slots=2, kind=PagedEngine), chat, task, asks(prompts))
    same = sum(paged[key].ids == one.ids for key, one in plain.items())
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
    played = by_key(engine_of(tiny_model_dir), chat_of(tiny_model_dir), bad, asks(bad.batch(0, 1), 2))
    for one in played.values():
        assert one.grade.reward is None
        assert why in (one.grade.error or "")
        assert one.fault == kind
        assert len(one.replies) == 2
        check_tokens(one)


def test_only_the_episode_whose_process_is_killed_is_lost(tiny_model_dir: Path) -> None:
    task, chat = own(), chat_of(tiny_model_dir)
    prompts = task.batch(0, 4)
    whole = by_key(engine_of(tiny_model_dir), chat, task, asks(prompts, 1))
    runner = task.runner(prompts[0])
    assert isinstance(runner, ProcessRunner)
    victim, step = f"{prompts[1].id}#0", runner.step

    def kill_first(key: str, reply: str) -> None:
        if key == victim:
            os.kill(runner._open[key].pid, signal.SIGKILL)
        step(key, reply)

    runner.step = kill_first  # type: ignore[method-assign]
    played = by_key(engine_of(tiny_model_dir), chat, task, asks(prompts, 1))
    assert played[victim].grade.error == "environment: its process ended"
    assert all(played[key] == one for key, one in whole.items() if key != victim)


@pytest.mark.parametrize("what", ["none", "text", "inf", "assistant", "no_reason"])
def test_what_is_no_turn_is_named_and_not_scored(tiny_model_dir: Path, what: str) -> None:
    settings = schema.EnvTask(path=f"{OWN}:Returns", settings={"what": what}, seeds=2, turns=LIMITS)
    task = build_task(settings, 0)
    (one,) = by_key(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, asks(task.batch(0, 1), 1)).values()  # type: ignore[arg-type]
    assert one.grade.reward is None
    assert (one.grade.error or "").startswith("environment: it")


def test_budgets_end_an_episode_and_keep_what_it_earned(tiny_model_dir: Path) -> None:
    chat, engine = chat_of(tiny_model_dir), engine_of(tiny_model_dir)
    task = own(limit=2)
    for one in by_key(engine, chat, task, asks(task.batch(0, 1))).values():
        assert (len(one.replies), one.out_of_turns, one.finish) == (2, True, FinishReason.STOP)
        assert one.grade.reward == 0.5
    task = own()
    whole = by_key(engine, chat, task, asks(task.batch(0, 1)))
    for key, one in by_key(engine, chat, task, asks(task.batch(0, 1), budget=40)).items():
        assert len(one.ids) <= 40
        assert one.finish is FinishReason.LENGTH
        assert one.ids == whole[key].ids[: len(one.ids)]
        assert one.trained[-1]  # an observation behind which there is no room for a reply is left out
        assert one.grade.scored


def test_credit_by_turns_says_where_each_reward_stands(tiny_model_dir: Path) -> None:
    task = own(credit="turn")
    (one,) = by_key(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, asks(task.batch(0, 1), 1)).values()
    assert one.turn_rewards == tuple((reply.end - 1, 0.25) for reply in one.replies)
    assert all(one.trained[place] for place, _ in one.turn_rewards)


def test_questions_of_an_environment_task_of_ones_own(tiny_model_dir: Path) -> None:
    task = build_task(schema.EnvTask(path=f"{OWN}:Sums", turns=LIMITS), 0)
    (one,) = by_key(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, asks(task.batch(0, 1), 1)).values()  # type: ignore[arg-type]
    assert one.episode
    assert one.grade.reward == 0.75
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
    by_key(Watched(), chat_of(tiny_model_dir), task, asks(prompts, 1))
    second = {name: place for place, name in enumerate(order)}
    assert min(second[f"{p}#0/1"] for p in slow) > max(second[f"{p}#0/2"] for p in quick)
