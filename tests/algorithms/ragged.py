"""Random ragged batches for the comparison with the reference, and the two ways in which code sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config.schema import Recipe
from lockstep.types import LossInput, TrainSequence
from tests.algorithms.reference import Token
from tests.algorithms.replies import episode

MAX_TOKENS = 50


@dataclass(frozen=True)
class Ragged:
    """Trained tokens of each sequence; a sequence may have none."""

    rows: tuple[tuple[Token, ...], ...]
    prompts: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.rows)


def recipe(algorithm: dict[str, Any], **more: Any) -> Recipe:
    """GRPO, unless `algorithm` says otherwise."""
    return Recipe.model_validate(
        {"algorithm": {"kind": "grpo"} | algorithm, "rollout": {"max_tokens": MAX_TOKENS}} | more
    )


def loss_input(rows: Sequence[Sequence[Token]], kl_coef: float = 0.0) -> LossInput:
    """The packed tensors that a loss sees, in float64; log π_θ is a leaf."""
    flat = [token for row in rows for token in row]

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(token, name) for token in flat], dtype=torch.float64)

    return LossInput(
        column("logp").requires_grad_(),
        column("old"),
        column("rollout"),
        column("advantage"),
        column("entropy"),
        torch.tensor([number for number, row in enumerate(rows) for _ in row], dtype=torch.int64),
        len(rows),
        column("ref"),
        kl_coef,
    )


def moved(row: Sequence[Token], place: int, step: float) -> list[Token]:
    """The same sequence with log π_θ of one token changed; what stands under a stop-gradient stays."""
    return [replace(t, logp=t.logp + step) if number == place else t for number, t in enumerate(row)]


GAPS = (0.0, 0.01, 0.3, 2.0, 25.0)
"""Spread of log-ratios: none, as in practice, wide, and beyond every clamp."""


@st.composite
def batches(draw: st.DrawFn) -> Ragged:
    """One to five sequences of up to six tokens, of up to three prompts; hypothesis shrinks shapes, a seed gives the numbers."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    prompts = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    to_old, to_rollout, to_ref = (draw(st.sampled_from(GAPS)) for _ in range(3))
    shared = draw(st.booleans())

    def token(advantage: float) -> Token:
        logp = -float(rng.exponential(2))
        old = logp + to_old * float(rng.normal())
        rollout = old + to_rollout * float(rng.normal())
        own = advantage if shared else float(rng.normal())
        ref, entropy = logp + to_ref * float(rng.normal()), float(rng.exponential(1))
        return Token(logp, logp, old, rollout, own, ref, entropy)

    rows = []
    for length in lengths:
        advantage = float(rng.normal()) if rng.random() < 0.9 else 0.0
        rows.append(tuple(token(advantage) for _ in range(length)))
    return Ragged(tuple(rows), tuple(prompts))


@st.composite
def steps(draw: st.DrawFn, *, penalties: bool = False, values: bool = False) -> tuple[TrainSequence, ...]:
    """Graded replies of a step in mixed order: ragged, with observation tokens, some unscored, rewards often equal."""
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("binary", "levels", "normal", "equal")))
    trained_share = draw(st.sampled_from((1.0, 0.7)))

    def reward() -> float | None:
        if rng.random() < 0.12:
            return None
        match kind:
            case "binary":
                return float(rng.random() < 0.5)
            case "levels":
                return float(rng.integers(0, 4)) / 3
            case "normal":
                return abs(float(rng.normal(0.3, 1)))
        return 0.1

    def numbers(count: int) -> tuple[float, ...]:
        return tuple(float(x) for x in rng.normal(0, 0.4, count))

    made = []
    for group in groups:
        length = int(rng.integers(0, 8))
        trained = tuple(bool(x) for x in rng.random(length) < trained_share)
        made.append(
            episode(
                group,
                reward(),
                trained,
                numbers(length) if penalties else (),
                numbers(length) if values else (),
            )
        )
    return tuple(made)
