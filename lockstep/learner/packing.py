"""Packs sequences into token streams without padding: micro-batches within a token budget, a group's prompt stored once.

Legend: T tokens of the stream, R response tokens with loss, N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DEFECT, LearnerError
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models.host import on_device
from lockstep.models.routing import NONE, Row
from lockstep.types import Batch, LossInput, TokenIds, TrainSequence

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, ready for the model. Per-token arrays hold only tokens with loss, sequence by sequence."""

    ids_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    rows_R: Tensor
    """Stream positions whose hidden states predict the tokens with loss."""
    targets_R: Tensor
    sequence_R: Tensor
    """Index of each token's sequence in the micro-batch."""
    order: tuple[int, ...]
    """The micro-batch's sequences, as indices into the packed list."""
    routes_TX: Tensor | None = None
    """Recorded experts of each token, of all routers; models.routing.NONE where there are none."""

    @property
    def tokens(self) -> int:
        return int(self.ids_T.shape[0])


def microbatches(
    sequences: Sequence[TrainSequence], budget: int, *, share_prompts: bool, prefix: int = 0
) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget` tokens each; a single longer sequence gets its own.

    Sequences of one group with equal prompts stay together if they fit, so that their prompt is processed once. There are as few
    micro-batches as fit, or a few more: from three on an even number, from eight on a multiple of four. If the budget leaves room
    they are about equally large; else each is filled before the next begins. The largest come first, so that ranks that take one
    each work for about the same time.
    """
    prefix = prefix if share_prompts else 0
    return [[cost.index for cost in chunk] for chunk in split(_costs(sequences, share_prompts, prefix), budget, prefix)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of a sequence in a micro-batch."""

    index: int
    whole: int
    """Number if it is the first of its prompt."""
    more: int
    """Number behind the sequence before it."""


def split(costs: Sequence[Cost], budget: int, prefix: int = 0) -> list[list[Cost]]:
    """Split sequences with these costs as `microbatches` says."""
    fewest = _filled(costs, budget, prefix)
    multiple = 1 if len(fewest) < 3 else 2 if len(fewest) < 8 else 4
    count = -(-len(fewest) // multiple) * multiple
    even = _filled(costs, budget, prefix, count)
    chunks = even if len(even) <= count else fewest
    return sorted(chunks, key=lambda chunk: -chunk[0].whole - sum(cost.more for cost in chunk[1:]))


def _costs(sequences: Sequence[TrainSequence], share_prompts: bool, prefix: int) -> list[Cost]:
    """Return the costs of sequences, those with one prompt side by side."""
    first: dict[tuple[int, TokenIds], int] = {}
    shared = [first.setdefault((one.group, one.prompt_ids), place) for place, one in enumerate(sequences)]
    costs: list[Cost] = []
    before = -1
    for index in sorted(range(len(sequences)), key=lambda i: (sequences[i].group, shared[i])):
        sequence = sequences[index]
        response = _fed(sequence)
        whole = response + len(sequence.prompt_ids) - prefix
        costs.append(Cost(index, whole, response if share_prompts and shared[index] == before else whole))
        before = shared[index]
    return costs


def _filled(costs: Sequence[Cost], budget: int, prefix: int, count: int = 1) -> list[list[Cost]]:
    """Fill micro-batches in order, each up to the budget, or up to its share of what is left if there are to be `count`."""
    chunks: list[list[Cost]] = []
    left = sum(cost.more for cost in costs)
    tokens, own, share = 0, 0.0, math.inf
    for cost in costs:
        tokens, own = tokens + cost.more, own + cost.more
        if not chunks or tokens > budget or own - cost.more / 2 > share:
            share = left / (count - len(chunks)) if len(chunks) < count else math.inf
            chunks.append([])
            tokens, own = prefix + cost.whole, cost.more
        chunks[-1].append(cost)
        left -= cost.more
    return chunks


@dataclass(slots=True)
class _Shared:
    """A prompt and the sequences that continue it, as positions in the micro-batch."""

    prompt: TokenIds
    """Prompt without the root."""
    fed: list[int] = field(default_factory=list)
    """Number of response tokens that each of them feeds to the model."""


def pack(
    sequences: Sequence[TrainSequence],
    chosen: Sequence[int],
    *,
    share_prompts: bool,
    device: torch.device,
    prefix: int = 0,
    prompts_first: bool | None = None,
    row: Row | None = None,
) -> Packed:
    """Return the stream of one micro-batch: `chosen` are indices into `sequences`; adjacent ones of one group with
    equal prompts share it.

    The first `prefix` tokens, which all of them share, are processed once. The order of the stream is PackedLayout's; None
    chooses by device. `row`: experts were recorded in this form. Raises LearnerError if a sequence does not begin with the
    prefix, or for a record that is not its own.
    """
    members = [sequences[index] for index in chosen]
    root = members[0].prompt_ids[:prefix] if share_prompts else ()
    shared = _shared(members, chosen, root, share_prompts)
    if prompts_first is None:
        prompts_first = device.type == "cuda" and any(len(one.fed) > 1 for one in shared)
    stream = sorted(range(len(shared)), key=lambda i: not any(shared[i].fed)) if prompts_first else range(len(shared))
    branches = [Branch(len(shared[i].prompt), tuple(shared[i].fed)) for i in stream]
    layout = PackedLayout(branches, device, len(root), prompts_first=prompts_first)

    tokens = len(root) + sum(branch.tokens for branch in branches)
    ids, positions = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    ids[: len(root)], positions[: len(root)] = root, np.arange(len(root))
    starts: dict[int, tuple[int, int]] = {}
    for i, prompt, tail in zip(stream, layout.prompt_starts, layout.tail_starts, strict=True):
        starts[i] = prompt, tail
        end = prompt + len(shared[i].prompt)
        ids[prompt:end], positions[prompt:end] = shared[i].prompt, np.arange(len(root), len(root) + end - prompt)

    rows, targets, owner = _Column(), _Column(), _Column()
    routes = np.full((tokens, row.numbers if row else 0), NONE, np.int64)
    places = ((i, fed, n == 0) for i, one in enumerate(shared) for n, fed in enumerate(one.fed))
    first = 0
    for place, (sequence, (i, fed, begins)) in enumerate(zip(members, places, strict=True)):
        response: Ints = np.array(sequence.ids, np.int64)
        first = starts[i][1] if begins else first
        ids[first : first + fed] = response[:fed]
        positions[first : first + fed] = np.arange(len(sequence.prompt_ids), len(sequence.prompt_ids) + fed)
        predicting = np.arange(first - 1, first - 1 + len(response))
        predicting[:1] = starts[i][0] + len(shared[i].prompt) - 1
        trained = np.array(sequence.trained, np.bool_)
        rows.add(predicting[trained])
        targets.add(response[trained])
        owner.add(np.full(int(trained.sum()), place))
        if row is not None:
            known = _record(sequence, fed, row)
            if begins:
                prompt, size = starts[i][0], len(sequence.prompt_ids)
                routes[prompt : prompt + size - len(root)] = known[len(root) : size]
                routes[: len(root)] = known[: len(root)]
            routes[first : first + fed] = known[len(sequence.prompt_ids) :]
        first += fed
    columns = (on_device(array, device) for array in (ids, positions, rows.all(), targets.all(), owner.all()))
    ids_T, positions_T, rows_R, targets_R, sequence_R = columns
    routes_TX = None if row is None else on_device(routes, device)
    return Packed(ids_T, positions_T, layout, rows_R, targets_R, sequence_R, tuple(chosen), routes_TX)


def _record(sequence: TrainSequence, fed: int, row: Row) -> Ints:
    """Return the experts of every token that is fed, NONE for tokens behind the record, which only untrained ones may follow.

    Raises LearnerError for a record that cannot be this sequence's.
    """
    tokens, size = len(sequence.prompt_ids) + fed, row.numbers * row.kind().itemsize
    known: Ints = np.full((tokens, row.numbers), NONE, np.int64)
    recorded = len(sequence.routes) // size
    needed = len(sequence.prompt_ids) + max((i for i, on in enumerate(sequence.trained) if on), default=-tokens)
    if needed > 0 and not needed <= recorded <= tokens:
        what = f"the recorded routes are for {recorded} tokens, but their sequence needs between {needed} and {tokens}"
        raise LearnerError(what, where="update.replay_routing", fix=DEFECT)
    if needed > 0:
        known[:recorded] = row.unpack(sequence.routes, recorded)
    return known


class _Column:
    """Integer arrays that are concatenated into one."""

    def __init__(self) -> None:
        self._pieces: list[Ints] = [np.empty(0, np.int64)]

    def add(self, piece: Ints) -> None:
        self._pieces.append(piece)

    def all(self) -> Ints:
        return np.concatenate(self._pieces)


def _shared(
    members: Sequence[TrainSequence], chosen: Sequence[int], root: TokenIds, share_prompts: bool
) -> list[_Shared]:
    """Put adjacent sequences of one group with equal prompts together; without sharing each is alone."""
    result: list[_Shared] = []
    group, prompt = None, root
    for index, sequence in zip(chosen, members, strict=True):
        if not share_prompts or sequence.group != group or sequence.prompt_ids != prompt:
            if sequence.prompt_ids[: len(root)] != root or len(sequence.prompt_ids) <= len(root):
                raise LearnerError(
                    f"sequence {index} does not begin with the {len(root)} tokens that all sequences should share",
                    fix=DEFECT,
                )
            group, prompt = sequence.group, sequence.prompt_ids
            result.append(_Shared(sequence.prompt_ids[len(root) :]))
        result[-1].fed.append(_fed(sequence))
    return result


def streams(
    sequences: Sequence[TrainSequence], budget: int, *, share_prompts: bool, device: torch.device, prefix: int = 0
) -> Iterator[Packed]:
    """Yield all sequences as packed micro-batches of at most `budget` tokens; `Packed.order` holds the sequences of each."""
    for chosen in microbatches(sequences, budget, share_prompts=share_prompts, prefix=prefix):
        yield pack(sequences, chosen, share_prompts=share_prompts, device=device, prefix=prefix)


def per_token(sequences: Sequence[TrainSequence], values: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Return per-token lists of a micro-batch's sequences, for tokens with loss only, as a tensor [R] like `like`."""
    kept: list[npt.NDArray[np.float64]] = [np.empty(0)]
    for row, sequence in zip(values, sequences, strict=True):
        if len(row) != len(sequence.trained):
            raise ValueError(f"{len(row)} values for a response of {len(sequence.trained)} tokens")
        array = np.array(row, np.float64)
        kept.append(array if all(sequence.trained) else array[np.array(sequence.trained, np.bool_)])
    narrow = torch.from_numpy(np.concatenate(kept)).to(like.dtype).numpy()
    return on_device(narrow, like.device)


def loss_input(
    sequences: Sequence[TrainSequence], packed: Packed, logprobs_R: Tensor, entropy_R: Tensor, batch: Batch
) -> LossInput:
    """Return what a loss reads of a micro-batch's `sequences`, which are those of its order."""
    old_R, count = logprobs_R.detach(), len(sequences)
    if batch.supervised:
        none = old_R[:0]
        return LossInput(logprobs_R, old_R, none, none, entropy_R, packed.sequence_R, count)
    rollout_R = per_token(sequences, [s.rollout_logprobs for s in sequences], logprobs_R)
    if sequences[0].old_logprobs is not None:
        old_R = per_token(sequences, [s.old_logprobs or () for s in sequences], logprobs_R)
    ref_R = None
    if sequences[0].ref_logprobs is not None:
        ref_R = per_token(sequences, [s.ref_logprobs or () for s in sequences], logprobs_R)
    advantages_R = per_token(sequences, [s.advantages for s in sequences], logprobs_R)
    return LossInput(
        logprobs_R,
        old_R,
        rollout_R,
        advantages_R,
        entropy_R,
        packed.sequence_R,
        count,
        ref_R,
        batch.kl_coef,
        packed.order,
    )


def number_tokens(
    sequences: Sequence[TrainSequence], packed_streams: Iterable[Packed], number: Callable[[Packed], Tensor]
) -> list[tuple[float, ...]]:
    """Return one number per response token (0 where not trained), from a function that returns [R] for a stream."""
    result: list[tuple[float, ...]] = [()] * len(sequences)
    queued = [(packed.order, number(packed)) for packed in packed_streams]  # avoids a wait for the GPU in between
    for order, values_R in queued:
        values, start = values_R.double().cpu().numpy(), 0
        for index in order:
            trained = np.array(sequences[index].trained, np.bool_)
            row, end = np.zeros(len(trained)), start + int(trained.sum())
            row[trained] = values[start:end]
            result[index], start = tuple(row.tolist()), end
    return result


def _fed(sequence: TrainSequence) -> int:
    """Return the number of response tokens that the model reads: the last one is only predicted."""
    return max(0, len(sequence.ids) - 1)


def as_sequence(ids: TokenIds, group: int) -> TrainSequence:
    """Return a plain sequence for scoring: one prompt token, every other token with loss."""
    rest = len(ids) - 1
    return TrainSequence(ids[:1], ids[1:], (True,) * rest, (0.0,) * rest, (0.0,) * rest, 0.0, group)
