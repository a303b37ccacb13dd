"""Records the learner's log-probability and entropy of each trained token, from the forward passes of the update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.track.rollouts import Learned
from lockstep.types import Batch, Scored, TokenIds, count_trained


class TokenLog:
    """Keeps log-probability and entropy of the trained tokens of a step, by the weights that their first update began with.

    A reply without a gradient goes through no forward pass, so nothing is known of it.
    """

    def __init__(self) -> None:
        self._found: dict[TokenIds, Learned] = {}

    def after(self, batch: Batch, scored: Sequence[Scored]) -> None:
        """Add the numbers of an update. If a reply is trained in several passes the first counts."""
        for one in (one for one in scored if one.order):
            sequences = [batch.sequences[index] for index in one.order]
            ends = np.cumsum([count_trained(sequence.trained) for sequence in sequences])[:-1]
            logprobs, entropies = (np.split(np.frombuffer(n, np.float32), ends) for n in (one.logprobs, one.entropies))
            for sequence, own, spread in zip(sequences, logprobs, entropies, strict=True):
                self._found.setdefault(sequence.prompt_ids + sequence.ids, Learned(own, spread))

    def take(self) -> dict[TokenIds, Learned]:
        """Return the numbers of a step by all ids of a row, and forget them."""
        found, self._found = self._found, {}
        return found
