"""State of running sequences, read by the host while the device decodes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from lockstep.rollout.paged.scheduler import Running
from lockstep.rollout.paged.state import Rows


class Snapshot:
    """State of running sequences at one moment. The host can read it while the device makes later steps."""

    def __init__(self, rows: Rows, sequences: Sequence[Running], behind: int) -> None:
        """Take the state of the first rows, which are those of `sequences`, after all that was launched so far.

        `behind`: number of steps that are launched after it and before it is read.
        """
        self._sequences, self._behind = list(sequences), behind
        state_2B = torch.stack([rows.done_B[: len(sequences)].int(), rows.drawn_B[: len(sequences)]])
        self._state_2B = state_2B.to("cpu", non_blocking=True)
        self._taken = torch.cuda.current_stream().record_event() if state_2B.is_cuda else None

    def read(self) -> None:
        """Wait for the state and tell it to the sequences."""
        if self._taken is not None:
            self._taken.synchronize()
        for sequence, done, drawn in zip(self._sequences, *self._state_2B.tolist(), strict=True):
            sequence.done, sequence.drawn = bool(done), drawn

    def catch_up(self) -> None:
        """Count the later steps, which every sequence makes that was not done."""
        for sequence in self._sequences:
            sequence.drawn += 0 if sequence.done else self._behind

    def beside(self, active: Sequence[Running]) -> AbstractContextManager[object]:
        """Return a context in which reads do not wait for the later steps. Tokens that are there stay as they are in these.

        `active` are the sequences that run now: if some were cancelled meanwhile, rows move after these steps, and reads wait.
        """
        moved = len(active) != len(self._sequences)
        return nullcontext() if self._taken is None or moved else torch.cuda.stream(_reading_stream())


def read_tokens(rows: Rows, sequences: Sequence[Running]) -> None:
    """Tell the sequences, which have the first rows, the tokens and log-probabilities that they drew since the last time."""
    new = max((one.drawn - len(one.ids) for one in sequences), default=0)
    if not new:
        return
    device, (count, most) = rows.ids_BN.device, (len(sequences), rows.ids_BN.shape[1])
    begun_B = torch.tensor([len(one.ids) for one in sequences], device=device)
    place_BN = (begun_B[:, None] + torch.arange(new, device=device)).clamp(max=most - 1)
    found = [tensor_BN[:count].gather(1, place_BN).cpu().numpy() for tensor_BN in (rows.ids_BN, rows.logprobs_BN)]
    # NumPy's lists take less than half the time of torch's.
    for one, ids, logprobs in zip(sequences, *(numbers_BN.tolist() for numbers_BN in found), strict=True):
        one.ids += ids[: one.drawn - len(one.ids)]
        one.logprobs += logprobs[: one.drawn - len(one.logprobs)]


@cache
def _reading_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()
