"""The native engine for a GPU: the learner's own weights, a paged key-value cache, and decode steps as CUDA graphs.

Prompts are processed once per group and their pages are shared by its samples. Decoding runs several steps without the host;
then the host removes finished sequences and admits waiting requests. The memory of keys and values is allocated when a rollout
begins and freed when it ends. Pages of finished rows stay for later turns (Request.keep) until `forget`.

Legend: B rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import EngineError
from lockstep.models.decoder import Decoder
from lockstep.models.heads import logits_logprobs
from lockstep.models.weights import active_adapter, load_weights, named_weights
from lockstep.rollout.forward import Computation
from lockstep.rollout.paged.cut import cuts, draw_cut
from lockstep.rollout.paged.fused import fuse_or_log
from lockstep.rollout.paged.ops import ops_for
from lockstep.rollout.paged.pool import Pool
from lockstep.rollout.paged.prefill import Prefill, Span
from lockstep.rollout.paged.scheduler import Running, begin_rows, check_room, ended_at, pages_for, pages_of, room_of
from lockstep.rollout.paged.snapshot import Snapshot, read_tokens
from lockstep.rollout.paged.state import PAGE, PageCache, Rows
from lockstep.rollout.paged.steps import DecodeStep, captured_rows
from lockstep.rollout.requests import check_adapter, check_groups, check_idle, check_request, closing_on_error
from lockstep.types import Completion, Forward, ForwardReport, Request, Sampled, TokenIds, WeightStream

CHUNK = 16
"""Number of decode steps between two checks for finished sequences. The device makes the last of them during the check."""
ENDLESS = 32768
"""Positions of the rotary tables for a model that states no longest context."""
FORCED = 8
"""Tokens at the end of a scored sequence that run through decode steps instead of the prefill."""


class PagedEngine:
    """Implements types.RolloutEngine over a transformers causal language model loaded with Lockstep's attention."""

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        fused: bool = True,
    ) -> None:
        """Take the model. `decode` turns ids into text, to look for stop strings. `fused` off runs the model's own forward pass.

        Raises ModelError for a model that cannot run here.
        """
        self.version, self._adapter = -1, active_adapter(model)
        self._model, self._decode, self._slots, self._stop_ids = model, decode, slots, stop_ids
        decoder = Decoder.of(model)
        self._decoder, self._head, self._context = decoder.module, decoder.head, decoder.context
        weight = self._head.weight_VH
        self._device = weight.device
        self._cache = PageCache(decoder.layers, decoder.kv_heads, decoder.head_size, weight.dtype, weight.device)
        self._computation = Computation(model)
        self._fused = fuse_or_log(decoder.model, self._context or ENDLESS) if fused else None
        self._pool = Pool(self._cache)
        self._ops = ops_for(self._device)
        self._prefill = Prefill(self._decoder, self._head, self._cache)
        self._step = DecodeStep(self._decoder, self._fused, self._head, self._cache, self._ops)
        self._stops_X = torch.tensor(sorted(stop_ids) or [-1], dtype=torch.int64, device=self._device)
        self._rows: Rows | None = None
        self._bound: tuple[object, ...] = ()
        self._parameters = [module._parameters for module in model.modules() if module._parameters]
        """Those of each module: to look for the modules each time takes longer than all else before a rollout."""
        layers: list[Any] = [module for module in model.modules() if "lora_A" in module._modules]
        self._scalings: list[dict[str, float]] = [layer.scaling for layer in layers if hasattr(layer, "scaling")]
        """Scalings of the adapters: captured steps hold them as constants."""
        self._queue: deque[Request] = deque()
        self._waiting: Counter[str] = Counter()
        self._active: list[Running] = []
        self._done: deque[Completion] = deque()
        self.processed = self.reused = 0

    # --- RolloutEngine --------------------------------------------------------------------------------------------
    @property
    def forward(self) -> Forward:
        return self._computation.forward

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Compute in this way from now on; captured steps of other numerics are kept, histories are not.

        Raises EngineError as in the protocol.
        """
        self.forget()
        report = self._computation.set(forward, len(self._queue) + len(self._active) + len(self._done))
        fused = None if self._fused is None else self._fused.computing(self._computation.numerics, forward.numerics)
        self._step.use(forward.numerics, fused)
        return report

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises StaleWeightsError for another version, EngineError for a request that cannot be served."""
        for request in requests:
            check_request(request, self.version, self._context)
        there = {group: prompt.ids for group, prompt in self._pool.prompts.items()}
        check_groups(requests, there | {request.group: request.prompt_ids for request in self._queue})
        self._queue.extend(requests)
        self._waiting.update(request.group for request in requests)
        if not self._active and self._queue:
            try:
                self._reserve()
                check_room(requests, self._cache.pages)
            except BaseException:  # refused as a whole: no part of it may block later requests
                for _ in requests:
                    self._queue.pop()
                self._waiting.subtract(request.group for request in requests)
                if not self._queue:
                    self._pool.rest()
                raise

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish, until nothing is queued or running. Reading may be interrupted and resumed."""
        with closing_on_error(self):
            while self._queue or self._active or self._done:
                while any(one.request.keep for one in self._done):  # the next turn need not wait for another chunk
                    yield self._done.popleft()
                self._admit()
                snapshot = self._start_chunk() if self._active else None
                while self._done:  # the device decodes while the caller works on these
                    yield self._done.popleft()
                if snapshot is not None:
                    self._collect(snapshot)
                if between is not None:
                    between()
        self._pool.rest()

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return log-probabilities of all tokens but the first, at temperature 1; the last by decode steps as in a rollout."""
        if self._queue or self._active:
            raise EngineError("sequences cannot be scored while requests run", fix="read all completions first")
        result: list[tuple[float, ...]] = [()] * len(sequences)
        long = [i for i, ids in enumerate(sequences) if len(ids) > 1]
        for start in range(0, len(long), self._slots):
            places = long[start : start + self._slots]
            with closing_on_error(self):  # formerly active rows must not write into pages that others will get
                scored = self._score([sequences[i] for i in places])
            for place, logprobs in zip(places, scored, strict=True):
                result[place] = logprobs
        return result

    def load(self, weights: WeightStream, version: int) -> None:
        """Copy the stream's tensors into this engine's model and become `version`. Nothing may be running."""
        check_idle(len(self._queue) + len(self._active) + len(self._done), version)
        check_adapter(self._model, self._adapter)
        self._computation.require_clean(f"weights {version} arrived")
        self.forget()
        load_weights(self._model, weights)
        self._computation.loaded()
        self.version = version

    def refresh(self) -> None:
        """Update what is made of the weights, as merged ones, in place. The next request would wait for it."""
        self._computation.refresh()

    def weights(self) -> WeightStream:
        """Yield the weights that decoding reads: the fused tensors if there are any, else the model's parameters."""
        self._computation.require_clean("the weights were requested")
        for name, tensor in named_weights(self._model):
            yield name, self._fused.read(name, tensor) if self._fused else tensor

    def close(self) -> None:
        """Free all memory and drop queued and running requests."""
        self._pool.release()
        self._rows = None
        self._step.forget()
        for kept in (self._queue, self._active, self._done, self._waiting):
            kept.clear()

    def cancel(self, id: str) -> None:
        """Drop a request, between two chunks; unknown and finished ones are passed over."""
        for request in [request for request in self._queue if request.id == id]:
            self._queue.remove(request)
            self._waiting[request.group] -= 1
            self._leave(request.group)
        self._remove([row for row, sequence in enumerate(self._active) if sequence.request.id == id])

    def sampled(self, ids: Collection[str]) -> dict[str, Sampled]:
        if self._active:
            read_tokens(self._live, self._active)
        found = (one for one in self._active if one.request.id in ids)
        return {one.request.id: Sampled(tuple(one.ids), tuple(one.logprobs)) for one in found}

    def forget(self) -> None:
        """Drop what is kept for later turns, and free the memory if nothing runs."""
        self._pool.kept.clear()
        if not (self._queue or self._active):
            self._pool.rest()

    @property
    def held(self) -> int:
        """Number of rows, waiting requests and prompts in memory for them; 0 when no request is open."""
        return len(self._active) + len(self._queue) + len(self._pool.prompts) + len(self._waiting)

    # --- memory ---------------------------------------------------------------------------------------------------
    def _reserve(self) -> None:
        """Allocate rows and cache for the queue: for all of it if the memory allows, else for as much as fits.

        Nothing may be running. Processed prompts that wait for more of their samples are dropped with the pages.
        """
        needs = room_of(self._queue, self._slots)
        self._prepare_rows(needs.longest, needs.tokens)
        self._pool.allocate(needs.pages)

    def _prepare_rows(self, pages: int, tokens: int) -> None:
        rows = self._rows
        if rows is None or not rows.fits(pages, tokens):
            # Rounded up: a rollout that is a little longer than the last keeps its rows, and with them the captured steps.
            pages = max(-(-pages // 16) * 16, rows.table_BS.shape[1] if rows else 0)
            tokens = max(-(-tokens // 256) * 256, rows.ids_BN.shape[1] if rows else 0)
            self._rows = Rows.empty(self._slots, pages, tokens, self._device)
            self._step.prepare(self._rows, self._stops_X)
        self._rebind()

    @property
    def _live(self) -> Rows:
        assert self._rows is not None, "rows must be prepared before anything runs"
        return self._rows

    def _rebind(self) -> None:
        """Drop captured steps if an address or an adapter's scaling in them changed; update what is made of weights in place."""
        self.refresh()
        bound: tuple[object, ...] = tuple(
            p.data_ptr() for held in self._parameters for p in held.values() if p is not None
        )
        bound += tuple(factor for factors in self._scalings for factor in factors.values())
        if bound != self._bound:
            self._step.forget()
            self._pool.kept.clear()
            self._bound = bound

    def _fits(self, request: Request) -> bool:
        """Return whether rows and cache are large enough for a request that arrived while others ran."""
        rows, prompt, tokens = self._live, len(request.prompt_ids), request.sampling.max_tokens
        return rows.fits(pages_of(prompt + tokens), tokens) and pages_for(request) <= self._cache.pages

    # --- admission ------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _admit(self) -> None:
        """Admit queued requests, in order, as long as there are rows and pages for them."""
        admitted: list[Running] = []
        while self._queue and len(self._active) < self._slots:
            request = self._queue[0]
            if not self._fits(request):
                if self._active:
                    break  # it waits until nothing reads the present ones
                self._reserve()
                check_room([request], self._cache.pages)
            row = self._pool.admit(request)
            if row is None:
                break
            self._queue.popleft()
            self._active.append(row)
            admitted.append(row)
        if not admitted:
            return
        self._pool.copy()
        new = list({row.request.group: row for row in admitted if row.prompt.logits_V is None}.values())
        with self._computation.running():
            self._prefill.prompts([row.prompt for row in new])
        for row in new:
            self.processed += len(row.prompt.ids) - row.prompt.begun
            self.reused += row.prompt.begun
            self._pool.keep(row, ())
        self._start(admitted)
        self._waiting.subtract(row.request.group for row in admitted)

    def _start(self, started: Sequence[Running]) -> None:
        """Give new sequences the rows after those in use, their own copy of a half-filled page, and their first token."""
        copies = [(s.prompt.pages[-1], s.own[0]) for s in started if len(s.prompt.ids) % PAGE]
        if copies:
            self._cache.copy([source for source, _ in copies], [target for _, target in copies])
        view = self._live.part(slice(len(self._active) - len(started), len(self._active)))
        begin_rows(view, started)
        logits_BV = torch.stack([s.prompt.logits_V for s in started if s.prompt.logits_V is not None])
        if any(cuts(s.request.sampling) for s in started):
            draw_cut(started, logits_BV, view)
        else:
            self._ops.draw(logits_BV, view)
        self._ops.advance(view, len(started), self._stops_X)
        for sequence in started:
            sequence.drawn = 1

    # --- decoding -------------------------------------------------------------------------------------------------
    def _start_chunk(self) -> Snapshot:
        """Start some steps for every active sequence; a GPU makes them later. Returns the state before the last of them."""
        left = max(s.request.sampling.max_tokens - s.drawn for s in self._active)
        steps = min(CHUNK, left)
        behind = int(left > steps)  # if it is the last chunk of all, nothing is left to do meanwhile
        self._start_steps(steps - behind)
        snapshot = Snapshot(self._live, self._active, behind)
        self._start_steps(behind)
        return snapshot

    def _start_steps(self, steps: int) -> None:
        rows, count = self._live, captured_rows(len(self._active), self._slots)
        cut = any(cuts(s.request.sampling) for s in self._active)
        self.processed += steps * len(self._active)
        for _ in range(steps):
            with self._computation.running():
                if not cut:
                    self._step.sample(count)
                    continue
                logits_BV = self._step.forward(count)
            draw_cut(self._active, logits_BV, rows)
            self._ops.advance(rows, count, self._stops_X)

    def _collect(self, snapshot: Snapshot) -> None:
        """Read a chunk's snapshot, emit completions of finished sequences, and compact the batch."""
        snapshot.read()
        finished = []
        with snapshot.beside(self._active):
            read_tokens(self._live, self._active)
        for row, sequence in enumerate(self._active):
            if (end := ended_at(sequence, self._decode, self._stop_ids)) is not None:
                tokens, reason = end
                kept = tuple(sequence.ids[:tokens]), tuple(sequence.logprobs[:tokens])
                self._done.append(Completion(sequence.request, *kept, reason, self.version))
                self._pool.keep(sequence, kept[0])
                finished.append(row)
        snapshot.catch_up()
        self._remove(finished)

    def _remove(self, finished: Sequence[int]) -> None:
        if not finished:
            return
        for row in finished:
            sequence = self._active[row]
            self._pool.leave(sequence)
            self._leave(sequence.request.group)
        kept = sorted(set(range(len(self._active))) - set(finished))
        self._active = [self._active[row] for row in kept]
        self._live.keep(kept)

    def _leave(self, group: str) -> None:
        """Free the pages of a group's prompt if none of its requests runs or waits."""
        prompt = self._pool.prompts.get(group)
        if self._waiting[group] or (prompt is not None and prompt.users):
            return
        del self._waiting[group]
        self._pool.end(group)

    # --- scoring --------------------------------------------------------------------------------------------------
    def _score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Score by prefill up to the last few tokens, then by decode steps with the given token instead of a drawn one."""
        forced = [min(FORCED, len(ids) - 1) for ids in sequences]
        pages = [pages_of(len(ids)) for ids in sequences]
        self._prepare_rows(max(pages), 1)
        self._pool.release()
        self._pool.allocate(sum(pages))
        if self._cache.pages < sum(pages):
            raise EngineError(
                f"{len(sequences)} sequences to score need {sum(pages)} pages of {PAGE} tokens, but only {self._cache.pages} fit "
                "into free memory",
                fix="score fewer or shorter sequences per call, or free memory on the device",
            )
        rows = self._live
        tables = [self._cache.take(number) for number in pages]
        spans = [Span(ids, t, 0, len(ids) - n) for ids, t, n in zip(sequences, tables, forced, strict=True)]
        with self._computation.running():
            result = [list(logprobs) for logprobs in self._prefill.logprobs(spans)]
        rows.rest(0)
        for row, table in enumerate(tables):
            rows.table_BS[row, : len(table)] = torch.tensor(table, dtype=torch.int32, device=self._device)
        for place in range(max(forced) - 1):
            self._force(sequences, forced, place, result)
        rows.rest(0)
        self._cache.release()
        return [tuple(values) for values in result]

    def _force(
        self, sequences: Sequence[TokenIds], forced: Sequence[int], place: int, result: list[list[float]]
    ) -> None:
        """Feed token `place` of the forced ones, and score the one after it."""
        rows, count = self._live, captured_rows(len(sequences), self._slots)
        at = [min(len(ids) - n + place, len(ids) - 2) for ids, n in zip(sequences, forced, strict=True)]
        fed = torch.tensor([ids[i] for ids, i in zip(sequences, at, strict=True)], device=self._device)
        rows.next_B[: len(fed)] = fed
        rows.position_B[: len(at)] = torch.tensor(at, dtype=torch.int32, device=self._device)
        with self._computation.running():
            logits_BV = self._step.forward(count)[: len(at)]
        targets_B = torch.tensor([ids[i + 1] for ids, i in zip(sequences, at, strict=True)], device=self._device)
        logprobs = logits_logprobs(logits_BV, targets_B).tolist()
        for row, n in enumerate(forced):
            if place < n - 1:
                result[row].append(logprobs[row])
