"""Maps samples to training rows: an episode whose history was rewritten or forked is one graded sample in several rows."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.types import TrainSequence


def by_sample(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Return the positions of each sample's rows, samples in the order of their first row."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, sequence in enumerate(sequences):
        key = ("alone", place) if sequence.sample is None else ("sample", sequence.sample)
        found.setdefault(key, []).append(place)
    return list(found.values())
