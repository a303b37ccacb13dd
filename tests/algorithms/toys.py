"""Policies so small that every reply can be listed: exact policy gradients, and what an objective makes of a group of replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.algorithms.build import Objective
from lockstep.types import LossInput, TrainSequence
from tests.algorithms.replies import episode

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Path:
    """One possible reply."""

    logp: tuple[float, ...]
    """log π of each token."""
    logmu: tuple[float, ...]
    """The same under the policy that sampled."""
    scores: Vector
    """∇ log π of each token, [T, parameters]."""
    reward: float
    states: tuple[str, ...]

    @property
    def p(self) -> float:
        return math.exp(sum(self.logp))

    @property
    def mu(self) -> float:
        return math.exp(sum(self.logmu))


@dataclass(frozen=True)
class Toy:
    """All replies of a policy to its one prompt."""

    paths: tuple[Path, ...]

    @property
    def gradient(self) -> Vector:
        """∇ E_π[R] = Σ_τ π(τ) R(τ) Σ_t ∇log π_t, summed over all replies: exact."""
        return sum((path.p * path.reward * path.scores.sum(0) for path in self.paths), np.zeros(1))

    @property
    def value(self) -> float:
        return math.fsum(path.p * path.reward for path in self.paths)

    def groups(self, size: int) -> tuple[NDArray[np.int64], Vector]:
        """Every group of `size` replies, as indices [M, size], and how often μ samples it, [M]."""
        table = np.array(list(product(range(len(self.paths)), repeat=size)))
        return table, np.array([path.mu for path in self.paths])[table].prod(1)


def softmax_toy(
    tree: dict[str, dict[str, float]], ends: dict[str, float], mu: dict[str, dict[str, float]] | None = None
) -> Toy:
    """`tree` has the logit of each action in each state; action a in state s leads to the state, or the end, named s + a.

    The parameters are the logits, in order; μ has the same shape, and is π if not given.
    """
    places = {(state, action): i for i, (state, action) in enumerate((s, a) for s in tree for a in tree[s])}
    behaviour = mu or tree

    def walk(state: str, path: Path) -> list[Path]:
        if state in ends:
            return [Path(path.logp, path.logmu, path.scores, ends[state], path.states)]
        found = []
        for action in tree[state]:
            score = np.zeros(len(places))
            for other in tree[state]:
                score[places[state, other]] = (other == action) - math.exp(_log_softmax(tree[state], other))
            longer = Path(
                (*path.logp, _log_softmax(tree[state], action)),
                (*path.logmu, _log_softmax(behaviour[state], action)),
                np.concatenate([path.scores, score[None]]),
                0.0,
                (*path.states, state),
            )
            found += walk(state + action, longer)
        return found

    return Toy(tuple(walk("", Path((), (), np.zeros((0, len(places))), 0.0, ()))))


def _log_softmax(logits: dict[str, float], action: str) -> float:
    return logits[action] - math.log(sum(math.exp(x) for x in logits.values()))


def updates(
    toy: Toy, objective: Objective, groups: NDArray[np.int64], values: dict[str, float] | None = None
) -> Vector:
    """What one update on each group would add to the parameters, [M, parameters]: -∂loss/∂θ through the objective's own parts.

    groups: [M, G] indices of replies. A step is one group; `values` are a critic's, by state.
    """
    rows = [[toy.paths[i] for i in group] for group in groups.tolist()]
    factors: list[float] = []
    advantages: list[float] = []
    for row in rows:
        credits = objective.credit([_episode(path, values) for path in row])
        advantages += (a for credit in credits for a in credit.advantages)
        weights = objective.weights([len(path.logp) for path in row], [0] * len(row))
        factors += (weight for weight, path in zip(weights, row, strict=True) for _ in path.logp)
    flat = [path for row in rows for path in row]
    slope_T = _slopes(flat, advantages, objective) * np.array(factors)
    scores_TP = np.concatenate([path.scores for path in flat])
    owner_T = np.repeat(np.arange(len(rows)), [sum(len(path.logp) for path in row) for row in rows])
    found = np.zeros((len(rows), scores_TP.shape[1]))
    np.add.at(found, owner_T, -slope_T[:, None] * scores_TP)
    return found


def _episode(path: Path, values: dict[str, float] | None) -> TrainSequence:
    return episode(
        0,
        path.reward,
        (True,) * len(path.logp),
        values=() if values is None else tuple(values[state] for state in path.states),
    )


def _slopes(flat: Sequence[Path], advantages: Sequence[float], objective: Objective) -> Vector:
    """∂loss_t / ∂log π_t of each token, all replies packed."""

    def column(rows: Sequence[tuple[float, ...]]) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    logp_T = column([path.logp for path in flat]).requires_grad_()
    inputs = LossInput(
        logp_T,
        logp_T.detach(),
        column([path.logmu for path in flat]),
        torch.tensor(advantages, dtype=torch.float64),
        torch.zeros_like(logp_T),
        torch.repeat_interleave(torch.tensor([len(path.logp) for path in flat])),
        len(flat),
    )
    (slope_T,) = torch.autograd.grad(objective.loss(inputs).loss_T.sum(), logp_T)
    return slope_T.numpy()


# --- the two-step bandit of sequence against token weights --------------------------------------------------------------
class TwoStep(NamedTuple):
    """Gradients by the three logits' differences: first step (right over left), then the second after left and after right."""

    g_true: tuple[float, float, float]
    """∇ E_π[R]."""
    g_seq: tuple[float, float, float]
    """E_μ[ w_1 w_2 · R · (∇log π_1 + ∇log π_2) ], w = π/μ: the weight of the whole reply."""
    g_tok: tuple[float, float, float]
    """E_μ[ w_1 · R · ∇log π_1 + w_2 · R · ∇log π_2 ]: each token has its own weight."""


PI = (0.5, 0.5, 0.9)
"""π(right), π(up | left), π(up | right)."""
MU = (0.4, 0.5, 0.2)
"""The same of the policy that sampled, before it learned to go up."""
REWARD = {("left", "down"): 0.5, ("left", "up"): 0.5, ("right", "down"): 0.0, ("right", "up"): 1.0}


def two_step_bandit(pi: Sequence[float] = PI, mu: Sequence[float] = MU) -> TwoStep:
    """Go left (0.5 for sure) or right (1 if then up, 0 if down). π has learned to go up, μ had not: enumerated, not sampled.

    Under π right is worth 0.9, under μ 0.2. Token weights judge the first step by what μ did next, and so point to the left.
    """
    g_true, g_seq, g_tok = np.zeros(3), np.zeros(3), np.zeros(3)
    for (first, second), reward in REWARD.items():
        place = 2 if first == "right" else 1
        one, two = _two(pi[0], first == "right"), _two(pi[place], second == "up")
        w_1, w_2 = one.p / _two(mu[0], first == "right").p, two.p / _two(mu[place], second == "up").p
        sampled = one.p * two.p / (w_1 * w_2)
        grad_1, grad_2 = one.score * np.eye(3)[0], two.score * np.eye(3)[place]
        g_true += one.p * two.p * reward * (grad_1 + grad_2)
        g_seq += sampled * w_1 * w_2 * reward * (grad_1 + grad_2)
        g_tok += sampled * reward * (w_1 * grad_1 + w_2 * grad_2)
    return TwoStep(*(tuple(float(x) for x in g) for g in (g_true, g_seq, g_tok)))  # type: ignore[arg-type]


class _Two(NamedTuple):
    p: float
    score: float


def _two(yes: float, chosen: bool) -> _Two:
    """Probability of the choice and d log p / d logit, for a choice that is `yes` likely to be true."""
    return _Two(yes, 1 - yes) if chosen else _Two(1 - yes, -yes)


def two_step_toy(pi: Sequence[float] = PI, mu: Sequence[float] = MU) -> Toy:
    """The same bandit as a toy; its parameters are (left, right, left-down, left-up, right-down, right-up)."""

    def tree(p: Sequence[float]) -> dict[str, dict[str, float]]:
        names = (("", "L", "R"), ("L", "d", "u"), ("R", "d", "u"))
        return {state: {no: 0.0, yes: math.log(q / (1 - q))} for (state, no, yes), q in zip(names, p, strict=True)}

    return softmax_toy(tree(pi), {"Ld": 0.5, "Lu": 0.5, "Rd": 0.0, "Ru": 1.0}, tree(mu))
