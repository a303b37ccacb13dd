"""Rollouts with an engine over the tiny model, and the replies that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Chat, Turns
from lockstep.models.attention import NAME
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.tasks.base import BuiltTask
from lockstep.types import Completion, Prompt, Request, Rollout, Sampling

OWN = Path(__file__).with_name("own_env.py")


def chat_of(folder: Path) -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(folder), Chat())


def engine_of(folder: Path, slots: int = 4, kind: type = NativeEngine) -> NativeEngine | PagedEngine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME).requires_grad_(False)
    engine = kind(model, slots=slots, stop_ids=frozenset([2]), decode=tokenizer.decode)
    engine.load(iter(()), 0)
    return engine


@dataclass(frozen=True)
class Played:
    """A rollout and its replies as the engine returned them."""

    rollout: Rollout
    replies: tuple[Completion, ...]


class Recorder:
    """An engine whose completions are kept."""

    version = 0

    def __init__(self, engine: NativeEngine | PagedEngine) -> None:
        self.engine = engine
        self.seen: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        for completion in self.engine.completed(between):
            self.seen.append(completion)
            yield completion


def play(
    engine: NativeEngine | PagedEngine,
    chat: ChatFormat,
    task: BuiltTask,
    prompts: Sequence[Prompt],
    samples: int = 2,
    *,
    budget: int = 200,
    grader: AsyncGrader | None = None,
) -> dict[str, Played]:
    """The rollouts of the prompts by prompt id and sample."""
    recorder = Recorder(engine)
    groups = make_rollouts(
        recorder,  # type: ignore[arg-type]
        chat,
        task,
        prompts,
        samples,
        Sampling(budget),
        (7,),
        0,
        grader or AsyncGrader(task),
    )

    def replies(key: str) -> tuple[Completion, ...]:
        names = [key, *(f"{key}/{turn}" for turn in range(1, 20))]
        return tuple(one for name in names for one in recorder.seen if one.request.id == name)

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [(one.prompt, one.sample) for one in rollouts] == [(p, s) for p in prompts for s in range(samples)]
    keys = [f"{one.prompt.id}#{one.sample}" for one in rollouts]
    return {key: Played(rollout, replies(key)) for key, rollout in zip(keys, rollouts, strict=True)}


LIMITS = Turns(limit=4, reply_tokens=8, step_seconds=20)
