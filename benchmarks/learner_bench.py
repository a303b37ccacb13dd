"""What the sections of gpu_learner.py share: the measuring, and the work that is measured."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from random_model import random_model

from lockstep.config.schema import Lora, Recipe
from lockstep.learner.adapters import attach
from lockstep.models.attention import NAME
from lockstep.types import TrainSequence

GIB = 2**30


# --- measuring ------------------------------------------------------------------------------------------------------
@dataclass
class Bench:
    """What all sections share."""

    device: str
    shape: str
    prompts: int
    samples: int
    prompt: int
    response: int
    flops: float = 790e12
    bandwidth: float = 4.3e12
    failed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], runs: int = 5) -> float:
        """Median after a warm-up."""
        function()
        times = []
        for _ in range(runs):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    @contextmanager
    def peak(self) -> Iterator[dict[str, float]]:
        """GiB, allocated and reserved."""
        found: dict[str, float] = {}
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield found
        self.wait()
        if self.cuda:
            found |= {
                "allocated": torch.cuda.max_memory_allocated() / GIB,
                "reserved": torch.cuda.max_memory_reserved() / GIB,
            }


class Clock:
    """Marks on the device's own time line."""

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._marks = cuda, []

    def mark(self, name: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def add_to(self, totals: dict[str, float]) -> None:
        """Seconds before each mark since the one before it."""
        if self._cuda:
            torch.cuda.synchronize()
        for (_, one), (name, two) in zip(self._marks, self._marks[1:], strict=False):
            elapsed = one.elapsed_time(two) / 1000 if self._cuda else two - one
            totals[name] = totals.get(name, 0.0) + elapsed


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.detach().double() - truth.detach().double()).norm() / (truth.detach().double().norm() + 1e-30))


# --- work -----------------------------------------------------------------------------------------------------------
def sequences_of(bench: Bench, prompts: int | None = None, seed: int = 0) -> list[TrainSequence]:
    draw = random.Random(seed)
    vocab = 900 if bench.shape == "tiny" else 150000
    result = []
    for group in range(prompts or bench.prompts):
        prompt = tuple(draw.randrange(vocab) for _ in range(bench.prompt))
        for _ in range(bench.samples):
            ids = tuple(draw.randrange(vocab) for _ in range(bench.response))
            logprobs = tuple(-11 + draw.random() for _ in ids)
            advantages = (draw.gauss(0, 1),) * len(ids)
            weight = 1 / (bench.samples * (prompts or bench.prompts) * bench.response)
            result.append(TrainSequence(prompt, ids, (True,) * len(ids), logprobs, advantages, weight, group))
    return result


def recipe(bench: Bench, *, lora: bool = False, states: str = "fp32") -> Recipe:
    return Recipe.model_validate(
        {
            "prompts_per_step": bench.prompts,
            "samples_per_prompt": bench.samples,
            "adapter": {"kind": "lora", "rank": 32, "alpha": 64} if lora else {"kind": "none"},
            "optimizer": {"kind": "adamw", "lr": 1e-6, "states": states},
            "update": {"recompute": "none"},
        }
    )


def build(bench: Bench, *, lora: bool = False, dtype: str = "bfloat16") -> Any:
    model = random_model(bench.shape, dtype, bench.device, attention=NAME)
    return attach(model, Lora(rank=32, alpha=64), seed=0) if lora else model
