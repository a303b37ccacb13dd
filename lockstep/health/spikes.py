"""The spike log (spikes.jsonl): updates whose ratio, loss or gradient norm stands out, with the ids of the rows behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.config.schema import Recipe
from lockstep.types import Batch, Group, Metrics, Rollout, Scored, TokenIds, TrainSequence, count_trained

Floats: TypeAlias = NDArray[np.float64]
Cause: TypeAlias = Literal["ratio", "advantage", "data"]

LEAST = 5
"""Updates that a median is of, at least."""
RECENT = 50
LEAST_LOSS = 1.0
"""Losses below this size are no spike: of a single update the loss is near 0, and so is its median."""
LARGE_ADVANTAGE = 4.0
"""An advantage this many times the median of the other rows' stands out."""
LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, slots=True)
class Extreme:
    """The most extreme token of a row by one measure."""

    value: float
    token: str
    position: int
    """Index among the reply's tokens."""


@dataclass(frozen=True, slots=True)
class SpikeRow:
    """One reply of a spike."""

    id: str
    """Id of the prompt, which names the row of the data."""
    sample: int
    prompt: str
    reply: str
    reward: float | None
    advantage: float
    """The largest in size of its tokens."""
    log_ratio: Extreme
    """log π_θ - log π_old, signed."""
    engine_gap: Extreme
    """log π_θ - log π_rollout, signed."""
    mean_logprob: float
    pull: float
    """Estimated share of the gradient: weight · Σ |advantage| · ratio · (1 - p), over that of all rows."""
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class Spike:
    """One update that stands out."""

    step: int
    update: int
    """Its number within the step, from 0."""
    triggers: tuple[str, ...]
    """ratio, loss or gradient."""
    grad_norm: float
    loss: float
    microbatches: tuple[float, ...]
    """Largest |log ratio| of each micro-batch."""
    cause: Cause
    """Cause of the first row."""
    rows: tuple[SpikeRow, ...]

    @property
    def line(self) -> str:
        """A sentence for the log."""
        first = self.rows[0]
        return (
            f"spike ({', '.join(self.triggers)}): gradient norm {self.grad_norm:.4g}, loss {self.loss:.4g}; most by row "
            f"{first.id}, sample {first.sample} ({first.pull:.0%} of the gradient, estimated); cause: {first.cause}, {first.why}"
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """Per-token numbers of one sequence of an update."""

    sequence: TrainSequence
    log_ratio: Floats
    engine_gap: Floats
    logprobs: Floats
    advantages: Floats

    @property
    def pull(self) -> float:
        ratio = np.exp(np.clip(self.log_ratio, -LARGEST_EXPONENT, LARGEST_EXPONENT))
        return float(self.sequence.weight * np.sum(np.abs(self.advantages) * ratio * (1 - np.exp(self.logprobs))))


class SpikeLog:
    """Watches the updates of a run; `settle` gives the spikes of a step their rows.

    `decode` turns token ids into text. `recent`: sizes in the last updates, for the medians; it is kept up to date.
    """

    def __init__(self, recipe: Recipe, decode: Callable[[TokenIds], str], recent: dict[str, list[float]]) -> None:
        self._settings, self._decode, self._recent = recipe.health.spikes, decode, recent
        self._two_policies = recipe.algorithm.old_logprobs == "rollout"
        self._norm_limit = recipe.health.spikes.norm * recipe.optimizer.max_grad_norm
        self._pending: list[tuple[Spike, list[_Row]]] = []
        self._update = 0
        self.found: list[Spike] = []
        """Settled spikes that nothing has stored yet."""

    def after(self, batch: Batch, metrics: Metrics, scored: Sequence[Scored]) -> Metrics:
        """Judge an update by its metrics and by the log-probabilities that it computed, one entry a micro-batch.

        Returns further metrics: signed extremes and a percentile of the log ratio.
        """
        if self._two_policies:  # the ratio is to the engine's own
            own = (replace(one, old_logprobs=one.rollout_logprobs) for one in batch.sequences)
            batch = replace(batch, sequences=tuple(own))
        seen = [[_log_ratio(*one) for one in _learned(part, batch)] for part in scored]
        if not any(seen):
            return {}
        triggers = self._triggers(metrics)
        if triggers:
            rows = [_row(*one) for part in scored for one in _learned(part, batch)]
            tails = tuple(float(np.max([np.abs(one).max() for one in found], initial=0.0)) for found in seen)
            norm, loss = metrics.get("grad/norm", math.nan), metrics.get("loss/policy", math.nan)
            self._pending.append((Spike(0, self._update, triggers, norm, loss, tails, "data", ()), rows))
        self._update += 1
        self._remember(metrics)
        ratio_T = np.concatenate([values for found in seen for values in found])
        return {
            "ratio/log_min": float(ratio_T.min()),
            "ratio/log_max": float(ratio_T.max()),
            # a selection among zeros takes longer than all else here, and the first update of a step has nothing else
            "ratio/log_abs_p99": float(np.quantile(np.abs(ratio_T), 0.99)) if ratio_T.any() else 0.0,
        }

    def settle(self, step: int, groups: Sequence[Group]) -> None:
        """Describe the spikes of a step's updates by the replies of its groups."""
        for spike, rows in self._pending:
            by_ratio = "ratio" in spike.triggers and len(spike.triggers) == 1
            sizes = [_ratio_size(row) if by_ratio else row.pull for row in rows]
            order = [rows[place] for place in np.argsort(-np.nan_to_num(sizes, nan=math.inf), kind="stable")]
            told = tuple(self._described(row, rows, groups) for row in order[: self._settings.rows])
            self.found.append(replace(spike, step=step, cause=told[0].cause, rows=told))
        self._pending, self._update = [], 0

    def take(self) -> list[Spike]:
        """Return the spikes found since the last call."""
        found, self.found = self.found, []
        return found

    def _triggers(self, metrics: Metrics) -> tuple[str, ...]:
        s, norm, loss = self._settings, metrics.get("grad/norm", 0.0), abs(metrics.get("loss/policy", 0.0))
        # NaN if one is
        tail = np.maximum(metrics.get("ratio/log_abs_max", 0.0), metrics.get("mismatch/max_abs_dlogp", 0.0))
        far = {
            "ratio": not tail <= s.log_ratio,
            "loss": not loss <= max(LEAST_LOSS, s.times * _median(self._recent, "loss/policy")),
            "gradient": not norm <= min(self._norm_limit, s.times * _median(self._recent, "grad/norm")),
        }
        return tuple(name for name, outside in far.items() if outside)

    def _remember(self, metrics: Mapping[str, float]) -> None:
        for name in ("grad/norm", "loss/policy"):
            value = abs(metrics.get(name, 0.0))
            if value and math.isfinite(value):
                self._recent[name] = [*self._recent.get(name, ())[1 - RECENT :], value]

    def _described(self, row: _Row, rows: Sequence[_Row], groups: Sequence[Group]) -> SpikeRow:
        rollout = _rollout_of(row.sequence, groups)
        cause, why = cause_of(row, rows, self._settings.log_ratio)
        total = sum(one.pull for one in rows) or 1.0
        places = [place for place, own in enumerate(row.sequence.trained) if own]

        def extreme(values: Floats) -> Extreme:
            worst = int(np.argmax(np.abs(values)))
            place = places[worst]
            return Extreme(float(values[worst]), self._decode((row.sequence.ids[place],)), place)

        return SpikeRow(
            rollout.prompt.id,
            rollout.sample,
            rollout.prompt.messages[-1]["content"],
            rollout.text,
            rollout.grade.reward,
            float(row.advantages[np.argmax(np.abs(row.advantages))]),
            extreme(row.log_ratio),
            extreme(row.engine_gap),
            float(row.logprobs.mean()),
            row.pull / total,
            cause,
            why,
        )


def cause_of(row: _Row, rows: Sequence[_Row], limit: float) -> tuple[Cause, str]:
    """Return whether ratio, advantage or data made a row stand out, and the evidence."""
    ratio, gap = _ratio_size(row), float(np.abs(row.engine_gap).max())
    if not (worst := float(np.maximum(ratio, gap))) <= limit:  # NaN if one is
        between = "engine and learner" if ratio <= limit else "the update"
        return "ratio", f"a token's log-probability differs by {worst:.3g} nats across {between}"
    own = float(np.abs(row.advantages).max())
    others = statistics.median([float(np.abs(one.advantages).max()) for one in rows if one is not row] or [own])
    if own > LARGE_ADVANTAGE * others:
        return "advantage", f"its advantage is {own:.3g} in size, the median of the others {others:.3g}"
    usual = statistics.median(float(one.logprobs.mean()) for one in rows)
    lengths = statistics.median(one.logprobs.size for one in rows)
    return "data", (
        f"neither ratio nor advantage stands out; its tokens have a mean log-probability of {row.logprobs.mean():.3g} "
        f"(median of the rows {usual:.3g}), it has {row.logprobs.size} (median {lengths:g})"
    )


def _learned(scored: Scored, batch: Batch) -> Iterator[tuple[TrainSequence, Floats]]:
    """Yield the sequences of a micro-batch that have trained tokens, with the new log-probabilities of these."""
    new_T, start = np.frombuffer(scored.logprobs, np.float32).astype(np.float64), 0
    for index in scored.order:
        sequence = batch.sequences[index]
        new = new_T[start : (start := start + count_trained(sequence.trained))]
        if new.size:
            yield sequence, new


def _log_ratio(sequence: TrainSequence, new: Floats) -> Floats:
    return new - (new if sequence.old_logprobs is None else _own(sequence, sequence.old_logprobs))


def _row(sequence: TrainSequence, new: Floats) -> _Row:
    gap = new - _own(sequence, sequence.rollout_logprobs)
    return _Row(sequence, _log_ratio(sequence, new), gap, new, _own(sequence, sequence.advantages))


def _own(sequence: TrainSequence, values: Sequence[float]) -> Floats:
    """Return the values of the trained tokens, as the learner reads them."""
    trained = np.frombuffer(bytes(sequence.trained), np.bool_)
    with np.errstate(over="ignore"):  # the learner reads what is too large as infinity, too
        return np.fromiter(values, np.float64, len(values)).astype(np.float32)[trained].astype(np.float64)


def _rollout_of(sequence: TrainSequence, groups: Sequence[Group]) -> Rollout:
    """Return the reply that a sequence was made from; for a sequence without its sample, the first with equal ids."""
    if sequence.sample is not None:
        return [one for group in groups for one in group.rollouts][sequence.sample]
    return next(one for one in groups[sequence.group].rollouts if one.ids == sequence.ids)


def _ratio_size(row: _Row) -> float:
    return float(np.abs(row.log_ratio).max())


def _median(recent: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the median, infinity while there are too few values."""
    values = recent.get(name, ())
    return statistics.median(values) if len(values) >= LEAST else math.inf
