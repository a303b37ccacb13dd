"""Every estimator, loss, mean, divergence and correction once more: plain loops over Python floats, written from the papers.

Nothing here comes from `lockstep`: tests compare the two. A batch is a list of sequences, a sequence is a list of `Token`.
Losses are what is minimised, one number per token. `stopped` stands wherever a paper writes a stop-gradient, so that a
finite difference over `logp` alone is the gradient that the paper means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CLAMP = 20.0
"""Log-ratios are taken within ±20 everywhere, as verl does: exp of more is of no use as a weight."""


@dataclass(frozen=True)
class Token:
    """A trained token."""

    logp: float
    """log π_θ, which carries the gradient."""
    stopped: float
    """log π_θ again, as a constant."""
    old: float
    rollout: float
    advantage: float
    ref: float
    entropy: float


Row = list[float]
Batch = Sequence[Sequence[Token]]
PolicyLoss = Callable[[Sequence[Token]], Row]


# --- advantages -----------------------------------------------------------------------------------------------------
def group(rewards: Sequence[float | None], *, divide: bool, eps: float, ddof: int) -> Row:
    """GRPO, arXiv 2402.03300 §4.1.2: (r_i - mean(r)) / std(r). Dr.GRPO, arXiv 2503.20783: without the division.

    Ours: unscored rewards are not there, groups without any spread give 0.
    """
    there = [r for r in rewards if r is not None]
    if len(there) < 2 or all(r == there[0] for r in there):
        return [0.0 for _ in rewards]
    mean = sum(there) / len(there)
    spread = 1.0
    if divide:
        square = 0.0
        for r in there:
            square += (r - mean) ** 2
        spread = math.sqrt(square / (len(there) - ddof)) + eps
    return [0.0 if r is None else (r - mean) / spread for r in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> Row:
    """RLOO, arXiv 2402.14740 eq. 8: r_i minus the mean of the others."""
    found = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and r is not None]
        found.append(0.0 if own is None or not others else own - sum(others) / len(others))
    return found


def max_rl(rewards: Sequence[float | None], *, eps: float) -> Row:
    """MaxRL: (r_i - mean(r)) / mean(r), nothing where no sample earned anything."""
    there = [r for r in rewards if r is not None]
    if len(there) < 2 or all(r == there[0] for r in there):
        return [0.0 for _ in rewards]
    mean = sum(there) / len(there)
    return [0.0 if r is None else (r - mean) / (mean + eps) for r in rewards]


def token_rewards(reward: float, penalties: Sequence[float], trained: Sequence[bool]) -> Row:
    """The reward stands at the last trained token, a penalty at each (arXiv 2203.02155 §3.5); observations earn nothing."""
    rewards = [-p if t else 0.0 for p, t in zip(penalties, trained, strict=True)]
    for place in reversed(range(len(trained))):
        if trained[place]:
            rewards[place] += reward
            break
    return rewards


def returns(rewards: Sequence[float], trained: Sequence[bool], *, gamma: float) -> Row:
    """REINFORCE++, arXiv 2501.03262: G_t = Σ_{k >= 0} γ^k r_{t+k}, counted over the tokens that the policy chose."""
    found = [0.0] * len(rewards)
    for place, chosen in enumerate(trained):
        if chosen:
            later = [r for r, t in zip(rewards[place:], trained[place:], strict=True) if t]
            found[place] = sum(gamma**k * r for k, r in enumerate(later))
    return found


def gae(
    rewards: Sequence[float], values: Sequence[float], trained: Sequence[bool], *, gamma: float, lam: float
) -> tuple[Row, Row]:
    """arXiv 1506.02438 eq. 16: A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} - V_t, V = 0 after the end; returns A + V."""
    chosen = [place for place, t in enumerate(trained) if t]
    deltas = []
    for number, place in enumerate(chosen):
        after = values[chosen[number + 1]] if number + 1 < len(chosen) else 0.0
        deltas.append(rewards[place] + gamma * after - values[place])
    advantages, targets = [0.0] * len(rewards), [0.0] * len(rewards)
    for number, place in enumerate(chosen):
        advantages[place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[number:]))
        targets[place] = advantages[place] + values[place]
    return advantages, targets


def whiten(rows: Sequence[Sequence[float]], trained: Sequence[Sequence[bool]], *, eps: float, ddof: int) -> list[Row]:
    """(x - mean) / sqrt(var + eps) over all trained tokens of all rows."""
    pool = [x for row, mask in zip(rows, trained, strict=True) for x, t in zip(row, mask, strict=True) if t]
    if len(pool) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = sum(pool) / len(pool)
    variance = sum((x - mean) ** 2 for x in pool) / (len(pool) - ddof)
    return [
        [(x - mean) / math.sqrt(variance + eps) if t else 0.0 for x, t in zip(row, mask, strict=True)]
        for row, mask in zip(rows, trained, strict=True)
    ]


def overlong(tokens: int, max_tokens: int, *, buffer: int, penalty: float) -> float:
    """DAPO, arXiv 2503.14476 eq. 13, as a positive number: 0, then linear over the buffer, then the whole penalty."""
    if buffer == 0 or tokens <= max_tokens - buffer:
        return 0.0
    if tokens <= max_tokens:
        return penalty * (tokens - (max_tokens - buffer)) / buffer
    return penalty


# --- losses ---------------------------------------------------------------------------------------------------------
def bounded(low: float, value: float, high: float) -> float:
    return low if value < low else high if value > high else value


def ratio(above: float, below: float) -> float:
    return math.exp(bounded(-CLAMP, above - below, CLAMP))


def clip_loss(tokens: Sequence[Token], *, low: float, high: float, dual: float | None = None) -> Row:
    """PPO, arXiv 1707.06347 eq. 7, bounds apart as in DAPO (arXiv 2503.14476 eq. 10); dual clip arXiv 1912.09729 eq. 5."""
    found = []
    for token in tokens:
        r, a = ratio(token.logp, token.old), token.advantage
        objective = min(r * a, bounded(1 - low, r, 1 + high) * a)
        if dual is not None and a < 0:
            objective = max(objective, dual * a)
        found.append(-objective)
    return found


def gspo_loss(tokens: Sequence[Token], *, low: float, high: float) -> Row:
    """GSPO-token, arXiv 2507.18071 eq. 13-14: s_t = sg(s) · π_θ / sg(π_θ), s the geometric mean of the token ratios."""
    if not tokens:
        return []
    mean = sum(token.stopped - token.old for token in tokens) / len(tokens)
    whole = math.exp(bounded(-CLAMP, mean, CLAMP))
    found = []
    for token in tokens:
        s, a = whole * math.exp(token.logp - token.stopped), token.advantage
        found.append(-min(s * a, bounded(1 - low, s, 1 + high) * a))
    return found


def gspo_sequence_objective(tokens: Sequence[Token], *, low: float, high: float) -> float:
    """GSPO itself, eq. 5: min(s A, clip(s) A), one number for a sequence whose tokens share A; differentiable through logp."""
    s = math.exp(bounded(-CLAMP, sum(t.logp - t.old for t in tokens) / len(tokens), CLAMP))
    a = tokens[0].advantage
    return min(s * a, bounded(1 - low, s, 1 + high) * a)


def cispo_loss(tokens: Sequence[Token], *, floor: float, cap: float) -> Row:
    """CISPO, arXiv 2506.13585 eq. 4-5: sg(bounded r) · A · log π_θ."""
    return [-bounded(floor, ratio(t.stopped, t.old), cap) * t.advantage * t.logp for t in tokens]


def reinforce_loss(tokens: Sequence[Token]) -> Row:
    """Williams (1992): A · log π_θ."""
    return [-t.advantage * t.logp for t in tokens]


def value_loss(values: Sequence[float], old: Sequence[float], targets: Sequence[float], clip: float | None) -> Row:
    """½ max((V - R)², (clip(V, V_old ± c) - R)²), as in the code of arXiv 2005.12729 and verl."""
    found = []
    for v, v_old, target in zip(values, old, targets, strict=True):
        worst = (v - target) ** 2
        if clip is not None:
            worst = max(worst, (bounded(v_old - clip, v, v_old + clip) - target) ** 2)
        found.append(worst / 2)
    return found


# --- divergence -----------------------------------------------------------------------------------------------------
def kl(own: float, ref: float, estimator: str) -> float:
    """Schulman, joschu.net/blog/kl-approx.html, with his r = π_ref / π_θ: -log r, (log r)² / 2, (r - 1) - log r."""
    log_r = bounded(-CLAMP, ref - own, CLAMP)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r**2 / 2
    assert estimator == "k3"
    return (math.exp(log_r) - 1) - log_r


# --- correction -----------------------------------------------------------------------------------------------------
def raw_weights(tokens: Sequence[Token], level: str) -> Row:
    """π_old / π_rollout of each token, of the whole sequence (product), or its geometric mean; the same for all its tokens."""
    logs = [token.old - token.rollout for token in tokens]
    if level == "token":
        return [math.exp(bounded(-CLAMP, x, CLAMP)) for x in logs]
    if not logs:
        return []
    total = sum(logs) if level == "sequence" else sum(logs) / len(logs)
    assert level in ("sequence", "geometric")
    return [math.exp(bounded(-CLAMP, total, CLAMP))] * len(logs)


def truncated(tokens: Sequence[Token], *, level: str, cap: float) -> Row:
    """TIS: min(w, cap). It multiplies the loss as a constant."""
    return [min(w, cap) for w in raw_weights(tokens, level)]


def masked(tokens: Sequence[Token], *, level: str, low: float, high: float, weigh: bool) -> Row:
    """MIS: w, or 1 if not weighed, where low <= w <= high; 0 elsewhere."""
    return [(w if weigh else 1.0) if low <= w <= high else 0.0 for w in raw_weights(tokens, level)]


# --- means over a batch ---------------------------------------------------------------------------------------------
def aggregate(rows: Sequence[Sequence[float]], prompts: Sequence[int], mode: str, max_tokens: int) -> float:
    """One number of the losses of all tokens. Sequences without a token are not there."""
    alive = [(row, prompt) for row, prompt in zip(rows, prompts, strict=True) if row]
    if not alive:
        return 0.0
    if mode == "token-mean":
        return sum(sum(row) for row, _ in alive) / sum(len(row) for row, _ in alive)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row, _ in alive) / len(alive)
    if mode == "seq-mean-token-sum":
        return sum(sum(row) for row, _ in alive) / len(alive)
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(row) / max_tokens for row, _ in alive) / len(alive)
    assert mode == "prompt-mean"
    means = []
    for one in sorted({prompt for _, prompt in alive}):
        pooled = [x for row, prompt in alive if prompt == one for x in row]
        means.append(sum(pooled) / len(pooled))
    return sum(means) / len(means)


def total_loss(
    tokens: Sequence[Token],
    policy: PolicyLoss,
    weights: Callable[[Sequence[Token]], Row] | None,
    *,
    kl_coef: float = 0.0,
    estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> Row:
    """Per token: weight · policy loss + kl_coef · KL - entropy_coef · H. The correction concerns the policy term alone."""
    factors = weights(tokens) if weights else [1.0] * len(tokens)
    found = []
    for token, factor, loss in zip(tokens, factors, policy(tokens), strict=True):
        found.append(factor * loss + kl_coef * kl(token.logp, token.ref, estimator) - entropy_coef * token.entropy)
    return found
