"""What the arms of gpu_step.py do: prompts, replies and their lengths, the reward; and the least time that a GPU needs for it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_rollout import lengths_of

PROMPT_TOKENS, RANK = 256, 32
FULL = "Lockstep full"
"""Beside LoRA, our own full training."""


@dataclass(frozen=True)
class Work:
    tokens: int
    """Of the longest reply."""
    lora: bool = False
    merged: bool = False
    """With adapter.merged."""
    lognormal: bool = False
    prompts: int = 64

    @property
    def left_out(self) -> str:
        """The arm that says nothing here."""
        return "TRL tuned bf16" if self.lora else FULL


WORKS = {"full": Work(512), "long": Work(1024), "lora": Work(512, lora=True), "lognormal": Work(1024, lognormal=True)}
WORKS["double"] = Work(512, prompts=128)
WORKS["lora-merged"] = Work(512, lora=True, merged=True)


@dataclass(frozen=True)
class Size:
    """What a step consists of."""

    prompts: int
    samples: int
    longest: int
    lengths: tuple[int, ...]
    """Tokens of each reply, prompt by prompt."""

    @staticmethod
    def of(name: str, tokens: int = 0, *, cpu: bool = False) -> Size:
        """`tokens` is another longest reply, to try things out."""
        work = WORKS[name]
        prompts, samples = (2, 2) if cpu else (work.prompts, 8)
        longest = tokens or (24 if cpu else work.tokens)
        lengths = [longest] * (prompts * samples)
        if work.lognormal:  # scaled, if another length is tried
            rows = lengths_of("lognormal")[:prompts]
            lengths = [max(1, count * longest // work.tokens) for row in rows for count in row[:samples]]
        return Size(prompts, samples, longest, tuple(lengths))

    @property
    def replies(self) -> int:
        return self.prompts * self.samples


def prompt_texts(count: int, seed: int = 1, tokens: int = PROMPT_TOKENS) -> list[str]:
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return ["".join(draw.choices(letters, k=tokens)) for _ in range(count)]


def score(ids: list[int]) -> float:
    """Differs within each group, and does not depend on what was learnt."""
    return float(sum(ids[:16]) % 2)


class BenchmarkTask:
    """The fixed prompts; the reward is of the characters, each of which is a token."""

    name, notes = "benchmark", ()

    def __init__(self, prompts: int = 512, tokens: int = PROMPT_TOKENS) -> None:
        self._texts = prompt_texts(prompts, tokens=tokens)

    def batch(self, step: int, size: int) -> list[Any]:
        from lockstep.types import Prompt

        rows = range(step * size, step * size + size)
        return [
            Prompt(f"q{i}", ({"role": "user", "content": self._texts[i % len(self._texts)]},), "", "b") for i in rows
        ]

    def heldout(self, role: str, size: int) -> list[Any]:
        from lockstep.types import Prompt

        texts = enumerate(prompt_texts(size, seed=2))
        return [Prompt(f"h{i}", ({"role": "user", "content": text},), "", "b") for i, text in texts]

    def grade(self, prompt: Any, reply: str) -> Any:
        from lockstep.types import Grade

        return Grade(score(list(reply.encode())))


def floors_of(work: str, model: str, size: Size, *, offload: str = "") -> dict[str, float]:
    """Seconds that the GPU's own matrix products and memory need (docs/benchmarks.md). `offload`: optimizer.states of our own
    arms, if their masters and moments lie in main memory.
    """
    from lockstep.plan import floors
    from lockstep.plan.memory_inputs import STATE_BYTES
    from lockstep.plan.model_shape import read_shape

    shape, lora = read_shape(Path(model)), WORKS[work].lora
    # Adapters of rank r on an OxI matrix have r (O + I) parameters.
    adapters = sum(RANK * (linear.outputs + linear.inputs) for linear in shape.linears) * shape.layers
    starts = range(0, size.replies, size.samples)
    lengths = floors.Work(tuple((PROMPT_TOKENS, size.lengths[start : start + size.samples]) for start in starts))
    # The bound that every arm is measured by: each sample's prompt is trained with it, as TRL does.
    moved = 4 + STATE_BYTES[offload] if offload else 0.0
    update = floors.Update(adapters if lora else shape.parameters, lora, share_prompts=False, offloaded=moved)
    floor = floors.step_floor(shape, lengths, update, floors.H200)
    return {"step": floor.total, "generate": floor.generate, "train": floor.train, "optimizer": floor.optimizer}


def title(work: str, size: Size) -> str:
    kind = f"LoRA rank {RANK}{', merged' if WORKS[work].merged else ''}" if WORKS[work].lora else "full training"
    reply = str(size.longest)
    if WORKS[work].lognormal:
        reply = f"log-normal, mean {sum(size.lengths) / size.replies:.0f}, at most {max(size.lengths)}"
    return f"{kind}, {size.prompts} x {size.samples} x ({PROMPT_TOKENS} + {reply}) tokens"
