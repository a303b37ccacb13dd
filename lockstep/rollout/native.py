"""The native engine: it samples from the same model object that the learner trains.

There is no second copy of the weights and nothing to send. Sequences live in slots; a free slot is refilled; a prompt is
processed once for all samples of its group; a sample depends on its own prompt and seed alone.

Legend: B rows being decoded, T tokens of the padded stream, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.models.attention import Layout
from lockstep.models.decoder import Decoder
from lockstep.models.heads import token_logprobs
from lockstep.models.states import state_layers
from lockstep.models.weights import load_weights, named_weights
from lockstep.rollout.forward import Computation
from lockstep.rollout.kept import Kept
from lockstep.rollout.requests import check_groups, check_idle, check_request, closing_on_error, stopped_at
from lockstep.rollout.routes import Routes
from lockstep.rollout.sampler import sample, uniforms
from lockstep.rollout.slots import STREAM_MULTIPLE, DecodeLayout, PrefillLayout, Prefix, Slots
from lockstep.types import (
    Completion,
    FinishReason,
    Forward,
    ForwardReport,
    Request,
    Sampled,
    Sampling,
    TokenIds,
    WeightStream,
)

PREFILL_TOKENS = 8192
"""Prompt tokens processed in one pass."""
KEPT_BYTES = 2 * 2**30
"""Most memory of keys and values that are kept for later turns."""


@dataclass(slots=True)
class _Sequence:
    """One request being decoded."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[bytes] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Number of tokens whose keys and values are in the slot: all but the last sampled one."""
        return len(self.request.prompt_ids) + len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A processed prompt, kept while requests of its group wait."""

    prefix: Prefix
    logits_V: Tensor
    routes: bytes = b""


class NativeEngine:
    """Implements types.RolloutEngine over a transformers causal language model loaded with Lockstep's attention."""

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        routes: bool = False,
    ) -> None:
        """Take the model, which may be a PEFT model. `decode` turns ids into text, only to look for stop strings. `routes`
        records the experts of each token.

        Raises ModelError for a model that cannot run here.
        """
        self.version = -1
        self._model, self._stop_ids, self._decode = model, stop_ids, decode
        decoder = Decoder.of(model)
        self._decoder, self._head, self._context = decoder.module, decoder.head, decoder.context
        self._computation = Computation(model)
        self._routes = Routes(decoder.model, record=routes)
        weight = self._head.weight_VH
        self._device = weight.device
        self._slots = Slots(slots)
        self._capacity = slots
        self._queue: deque[Request] = deque()
        self._waiting: Counter[str] = Counter()
        self._prompts: dict[str, _Prompt] = {}
        self._roots: dict[TokenIds, Prefix] = {}
        self._root_routes: dict[TokenIds, bytes] = {}
        self._active: list[_Sequence] = []
        self._done: deque[Completion] = deque()
        self._kept: Kept[Prefix] = Kept(KEPT_BYTES, lambda prefix: prefix.bytes)
        # A state is that behind a prompt's last token, so no shorter beginning can be cut from it; a record of routes neither.
        self._keeps = not routes and not state_layers(decoder.model)
        self.processed = self.reused = 0

    # --- RolloutEngine --------------------------------------------------------------------------------------------
    @property
    def forward(self) -> Forward:
        return self._computation.forward

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Compute in this way from now on; cached prompts are dropped. Raises EngineError as the protocol says."""
        try:
            return self._computation.set(forward, len(self._queue) + len(self._active) + len(self._done))
        finally:  # a refused setting may have removed the previous one
            self._forget()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises StaleWeightsError for another version, EngineError for a request that cannot be served."""
        for request in requests:
            check_request(request, self.version, self._context)
        check_groups(requests, {request.group: request.prompt_ids for request in self._queue})
        self._queue.extend(requests)
        self._waiting.update(request.group for request in requests)
        longest = max((max(r.room, len(r.prompt_ids) + r.sampling.max_tokens) for r in self._queue), default=0)
        self._slots.reserve(longest, idle=not self._active)

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish, until nothing is queued or running. Reading may be interrupted and resumed."""
        with closing_on_error(self):
            while self._queue or self._active or self._done:
                self._admit()
                if self._active:
                    self._step()
                if between is not None:
                    between()
                while self._done:
                    yield self._done.popleft()

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return log-probabilities of all tokens but the first, at temperature 1; half of them through cached keys and values."""
        return [self._score(ids) for ids in sequences]

    def load(self, weights: WeightStream, version: int) -> None:
        """Copy the stream's tensors into this engine's model and become `version`. Nothing may be running."""
        check_idle(len(self._queue) + len(self._active) + len(self._done), version)
        self._computation.require_clean(f"weights {version} arrived")
        load_weights(self._model, weights)
        self._computation.loaded()
        self._forget()
        self.version = version

    def weights(self) -> WeightStream:
        self._computation.require_clean("the weights were requested")
        return named_weights(self._model)

    def close(self) -> None:
        self._slots.release()
        self._forget()
        for kept in (self._queue, self._active, self._done, self._waiting):
            kept.clear()

    def cancel(self, id: str) -> None:
        """Drop a request; its slot is free for the next. Called between tokens; an unknown or finished one is passed over."""
        for request in [request for request in self._queue if request.id == id]:
            self._queue.remove(request)
            self._left(request.group, 1)
        for slot in [slot for slot, sequence in enumerate(self._active) if sequence.request.id == id]:
            self._free(slot)

    def sampled(self, ids: Collection[str]) -> dict[str, Sampled]:
        running = [one for one in self._active if one.request.id in ids]
        return {one.request.id: Sampled(tuple(one.ids), tuple(one.logprobs)) for one in running}

    def forget(self) -> None:
        """Drop what is kept for later turns."""
        self._kept.clear()

    @property
    def held(self) -> int:
        """Number of rows, waiting requests and prompts in memory for them; 0 when no request is open."""
        return len(self._active) + len(self._queue) + len(self._prompts) + len(self._waiting)

    def _forget(self) -> None:
        """Drop all processed prompts: they are of other weights, or were computed in another way."""
        self._prompts.clear()
        self._roots.clear()
        self._root_routes.clear()
        self._kept.clear()

    # --- admission ------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _admit(self) -> None:
        """Move requests from the queue into free slots and sample their first tokens."""
        count = min(self._capacity - len(self._active), len(self._queue))
        if not count:
            return
        admitted = [self._queue.popleft() for _ in range(count)]
        self._prefill(admitted)
        sequences = [_Sequence(r, routes=[self._prompts[r.group].routes]) for r in admitted]
        logits_BV = torch.stack([self._prompts[r.group].logits_V for r in admitted])
        self._draw(sequences, logits_BV)
        used = len(self._active)
        places: dict[str, list[int]] = {}
        for sequence in sequences:
            if reason := self._finish(sequence):
                self._done.append(self._completion(sequence, reason))
            else:
                places.setdefault(sequence.request.group, []).append(used + sum(map(len, places.values())))
        for group, slots in places.items():
            self._slots.fill(slots, self._prompts[group].prefix)
        open_sequences = [s for s in sequences if not self._finish(s)]
        order = {group: iter(slots) for group, slots in places.items()}
        self._active.extend(sorted(open_sequences, key=lambda s: next(order[s.request.group])))
        for group, number in Counter(request.group for request in admitted).items():
            self._left(group, number)

    def _left(self, group: str, number: int) -> None:
        """Note that requests of a group have left the queue; without others its processed prompt is dropped."""
        self._waiting[group] -= number
        if not self._waiting[group]:
            del self._waiting[group]
            self._prompts.pop(group, None)

    def _prefill(self, admitted: list[Request]) -> None:
        """Process the prompts that are not cached yet, each once; the prefix of all prompts is processed once per version."""
        new = deque({r.group: r for r in admitted if r.group not in self._prompts}.values())
        while new:
            chunk = [new.popleft()]
            tokens = len(chunk[0].prompt_ids)
            while new and tokens + len(new[0].prompt_ids) <= PREFILL_TOKENS:
                tokens += len(new[0].prompt_ids)
                chunk.append(new.popleft())
            begun = [self._begun(request) for request in chunk]
            starts = [prefix.tokens if prefix else 0 for prefix in begun]
            rests = [request.prompt_ids[start:] for request, start in zip(chunk, starts, strict=True)]
            layout = PrefillLayout([len(rest) for rest in rests], begun)
            ids = [token for rest in rests for token in rest]
            positions = [p for r, start in zip(chunk, starts, strict=True) for p in range(start, len(r.prompt_ids))]
            self.processed += len(ids)
            self.reused += sum(starts)
            hidden_TH = self._forward(ids, positions, layout)
            ends = torch.tensor(layout.lengths).cumsum(0) - 1
            logits_BV = self._head.logits(_padded(hidden_TH[ends.to(self._device)]))
            for request, prefix, logits_V in zip(chunk, layout.processed(), logits_BV, strict=False):
                routes = self._root_routes.get(request.prompt_ids[: request.prefix], b"") + self._routes.next(
                    len(request.prompt_ids) - request.prefix
                )
                self._prompts[request.group] = _Prompt(prefix, logits_V.clone(), routes)
                if request.keep and self._keeps:
                    self._kept.keep(request.prompt_ids, prefix)

    def _begun(self, request: Request) -> Prefix | None:
        """Return the longest beginning of a prompt that is processed already."""
        kept = self._kept.longest(request.prompt_ids, request.prefix + 1)
        return kept[1].begin(kept[0]) if kept else self._root(request.prompt_ids[: request.prefix])

    def _root(self, ids: TokenIds) -> Prefix | None:
        if ids and ids not in self._roots:
            layout = PrefillLayout([len(ids)], [None])
            self._forward(list(ids), list(range(len(ids))), layout)
            self.processed += len(ids)
            self.reused -= len(ids)  # its first prompt reuses nothing
            self._roots[ids], self._root_routes[ids] = layout.processed()[0], self._routes.next(len(ids))
        return self._roots.get(ids)

    # --- decoding -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _step(self) -> None:
        """Sample one token for every active sequence."""
        active = self._active
        positions = [s.cached for s in active]
        positions_B = torch.tensor(positions, device=self._device)
        layout = DecodeLayout(self._slots, positions_B, max(positions) + 1, len(active))
        hidden_TH = self._forward([s.ids[-1] for s in active], positions, layout)
        for sequence in active:
            sequence.routes.append(self._routes.next(1))
        self._draw(active, self._head.logits(hidden_TH)[: len(active)])
        self.processed += len(active)
        for slot in range(len(active) - 1, -1, -1):
            sequence = active[slot]
            if reason := self._finish(sequence):
                self._free(slot)
                self._done.append(self._completion(sequence, reason))

    def _free(self, slot: int) -> None:
        """Give up a slot: the last one's sequence moves into it, so that used slots stay the first."""
        last = self._active.pop()
        if slot < len(self._active):
            self._slots.move(len(self._active), slot, last.cached)
            self._active[slot] = last

    def _forward(self, ids: list[int], positions: list[int], layout: Layout) -> Tensor:
        """Return hidden states [T, H] of a stream, padded to a multiple of STREAM_MULTIPLE."""
        padding = [0] * (-len(ids) % STREAM_MULTIPLE)
        ids_1T = torch.tensor([ids + padding], device=self._device)
        positions_1T = torch.tensor([positions + padding], device=self._device)
        with self._computation.running(), self._routes.of(len(ids)):
            output = self._decoder(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, layout=layout)
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH

    def _draw(self, sequences: list[_Sequence], logits_BV: Tensor) -> None:
        """Append one sampled token to each sequence."""
        kinds: dict[Sampling, list[int]] = {}
        for row, sequence in enumerate(sequences):
            kinds.setdefault(sequence.request.sampling, []).append(row)
        for sampling, rows in kinds.items():
            chosen = [sequences[row] for row in rows]
            numbers = uniforms([s.request.seed for s in chosen], [len(s.ids) for s in chosen])
            uniform_B = torch.from_numpy(numbers).to(self._device)
            own_BV = logits_BV if len(rows) == len(sequences) else logits_BV[rows]
            tokens_B, logprobs_B = sample(own_BV, sampling, uniform_B)
            for sequence, token, logprob in zip(chosen, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                sequence.ids.append(token)
                sequence.logprobs.append(logprob)

    def _finish(self, sequence: _Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        if not sampling.ignore_eos:
            if sequence.ids[-1] in self._stop_ids:
                return FinishReason.STOP
            if sampling.stop and stopped_at(sequence.ids, len(sequence.ids) - 1, sampling.stop, self._decode):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.ids) >= sampling.max_tokens else None

    def _completion(self, sequence: _Sequence, reason: FinishReason) -> Completion:
        kept = tuple(sequence.ids), tuple(sequence.logprobs)
        return Completion(sequence.request, *kept, reason, self.version, routes=b"".join(sequence.routes))

    # --- scoring --------------------------------------------------------------------------------------------------
    def _score(self, ids: TokenIds) -> tuple[float, ...]:
        half = max(1, len(ids) // 2)
        first = PrefillLayout([half], [None])
        hidden_TH = [self._forward(list(ids[:half]), list(range(half)), first)[:half]]
        rest = len(ids) - half
        if rest:
            layout = PrefillLayout([rest], [first.processed()[0]])
            hidden_TH.append(self._forward(list(ids[half:]), list(range(half, len(ids))), layout)[:rest])
        targets_T = torch.tensor(ids[1:], device=self._device)
        logprobs_T, _ = token_logprobs(self._head, torch.cat(hidden_TH)[:-1], targets_T)
        return tuple(logprobs_T.tolist())


def _padded(rows_BH: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows_BH, (0, 0, 0, -rows_BH.shape[0] % STREAM_MULTIPLE))
