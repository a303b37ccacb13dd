"""Playing episodes with an engine over the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Chat, Turns
from lockstep.envs.driver import Ask, Played, PlayedTask, play
from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.types import Prompt, Sampling

OWN = Path(__file__).with_name("own_env.py")


def chat_of(folder: Path) -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(folder), Chat())


def engine_of(folder: Path, slots: int = 4, kind: type = NativeEngine) -> NativeEngine | PagedEngine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME).requires_grad_(False)
    engine = kind(model, slots=slots, stop_ids=frozenset([2]), decode=tokenizer.decode)
    engine.load(iter(()), 0)
    return engine


def asks(prompts: Sequence[Prompt], samples: int = 2, budget: int = 200, **sampling: float) -> list[Ask]:
    return [
        Ask(f"{p.id}#{s}", p, (7, p.id, s), Sampling(budget, **sampling), 0)  # type: ignore[arg-type]
        for p in prompts
        for s in range(samples)
    ]


def by_key(engine: object, chat: ChatFormat, task: PlayedTask, asked: Sequence[Ask]) -> dict[str, Played]:
    found = list(play(engine, chat, task, asked))  # type: ignore[arg-type]
    assert sorted(p.ask.key for p in found) == sorted(a.key for a in asked)
    return {played.ask.key: played for played in found}


LIMITS = Turns(limit=4, reply_tokens=8, step_seconds=20)
