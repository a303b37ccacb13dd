"""Merges the learner's adapter into its base for an engine without adapters: base + scaling · B·A in one matrix.

With DoRA (arXiv 2402.09353) each row of that sum is then scaled to its trained length. The sum is made again from the frozen
base each time, in fp32, and rounded once: nothing is ever added to the engine's weights, so a hundred syncs give the same bits
as one. Rounding to the nearest bf16 drops everything below half a unit in the last place of the base's weight; the probe measures
the effect. With adapter.merged the learner computes with the same weights, and keeps it on average (models.low_rank.dither_into).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SyncError
from lockstep.models.low_rank import base_of, merge
from lockstep.types import Batch, Learner, Loss, Metrics, TokenIds, WeightStream

DOWN, UP, SCALING, LENGTH = ".lora_A", ".lora_B", ".lora_scaling", ".lora_magnitude_vector"
"""Suffixes in lockstep.models.weights of the tensors that an adapter adds to a layer."""


def merged(weights: WeightStream, *, dithered: bool = False) -> WeightStream:
    """Yield the stream without adapters, each adapted matrix merged with its own. Tensors without one are passed on unchanged.

    `dithered`: rounded as the learner rounds its own merged weights (adapter.merged), which adapters on experts have none of.
    Raises SyncError for an adapter that lacks a part, or whose layer has no matrix of its shape.
    """
    tensors = dict(weights)
    parts = (DOWN, UP, SCALING, LENGTH)
    layers = {name.removesuffix(part) for name in tensors for part in parts if name.endswith(part)}
    for layer in sorted(layers):
        wanted = *(layer + part for part in (DOWN, UP, SCALING)), base_of(layer)
        if missing := [name.removeprefix(layer) for name in wanted if name not in tensors]:
            raise SyncError(
                f"the weights of the adapted layer lack {', '.join(missing)}",
                where=layer,
                fix="check what learner.weights() yields",
            )
    adapted = {base_of(layer): layer for layer in layers}
    for name, tensor in tensors.items():
        layer = adapted.get(name, "")
        if layer:
            factors = tensors[layer + DOWN], tensors[layer + UP], float(tensors[layer + SCALING].item())
            own = dithered and tensor.ndim == 2
            yield name, merge(name, tensor, *factors, tensors.get(layer + LENGTH), dithered=own)
        elif not name.endswith(parts):
            yield name, tensor


def merged_names(frozen: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    """Return the frozen tensors that no adapter changes, given all names of the learner's weights."""
    adapted = {base_of(name.removesuffix(DOWN)) for name in names if name.endswith(DOWN)}
    return frozen - adapted


@dataclass(slots=True)
class MergedLearner:
    """A learner whose weights() are merged. Made for one push: `version` is the learner's then."""

    learner: Learner
    version: int
    dithered: bool = False
    """True if the learner itself computes with merged weights."""

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        return self.learner.logprobs(sequences)

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        return self.learner.update(batch, loss)

    def weights(self) -> WeightStream:
        return merged(self.learner.weights(), dithered=self.dithered)
