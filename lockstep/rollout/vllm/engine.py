"""The vLLM engine inside this process: Lockstep calls each step itself, and reads and writes the weights in place.

Requests go in as ids and come back as ids with the log-probabilities of the distribution that was sampled from (`logprobs_mode
= processed_logprobs`). The prefix cache is emptied whenever the weights change. The memory of keys and values is freed after a
rollout has been read to its end, and allocated again by the next request.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any, cast

import torch

from lockstep.device import make_room
from lockstep.errors import EngineError, LockstepError
from lockstep.models.weights import named_weights
from lockstep.numerics.spec import Scale
from lockstep.rollout.requests import Decode, check_clean, check_groups, check_idle, check_settled
from lockstep.rollout.vllm.environment import prepare
from lockstep.rollout.vllm.layout import FIX, share
from lockstep.rollout.vllm.plugin import register
from lockstep.rollout.vllm.quantised import Plan
from lockstep.rollout.vllm.requests import Pending, asked_of, check_servable, completion_of, look, streams
from lockstep.rollout.vllm.settings import GIB, VllmSettings
from lockstep.rollout.vllm.worker import QUALNAME, steps_left
from lockstep.text import reason_of
from lockstep.types import Completion, Forward, ForwardReport, Request, TokenIds, WeightStream

log = logging.getLogger(__name__)

OLDEST = (0, 24)
"""Oldest supported version of vLLM; earlier ones lack functions that are used."""
BATCHED_TOKENS = 16384
"""Prompt tokens of one step."""
MOST_DRAINED = 1000
"""Number of steps after which an engine that should be idle is considered broken."""
SMALLER = "lower rollout.vllm.kv_cache_gib or rollout.slots, or set rollout.engine=native"


class VllmEngine:
    """Implements types.RolloutEngine over vLLM in this process, with sleep() and wake().

    Weights are set by `load` or, with `share`, are the learner's own parameters from then on. vLLM starts with random weights
    and has no version before the first `load`.
    """

    def __init__(self, settings: VllmSettings, decode: Decode) -> None:
        """Start vLLM. `decode` turns ids into text, only to look for stop strings.

        Raises EngineError if vLLM is not installed, cannot run the model, or does not find room on the GPU.
        """
        self.version = -1
        self.forward = Forward()
        self.between: Callable[[], None] | None = None
        """Called after every step; may submit, score or raise."""
        self._settings, self._decode = settings, decode
        for removed in prepare(os.environ, cuda_started=torch.cuda.is_initialized() and settings.sleep):
            log.warning("removed from the environment, as vLLM's memory pool cannot work with it: %s", removed)
        _require_vllm()
        outer, precision = torch.cuda.current_stream(), torch.get_float32_matmul_precision()
        self._engine = _start(settings)
        self._stream = _stream_of(self._engine)
        torch.cuda.synchronize()
        torch.cuda.set_stream(outer)
        torch.set_float32_matmul_precision(precision)  # vLLM sets its own for the whole process
        self._pending: dict[str, Pending] = {}
        self._scores: dict[str, tuple[float, ...]] = {}
        self._done: deque[Completion] = deque()
        self._keys = count()
        self._asleep = self._busy = False
        self._failed = ""
        """Error that ended a step of vLLM; the engine is unusable afterwards."""

    # --- RolloutEngine --------------------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to vLLM. Raises StaleWeightsError for another version, EngineError for one that cannot be served."""
        self._check_alive()
        for request in requests:
            check_servable(request, self.version, self._settings.max_model_len)
        check_groups(requests, {entry.request.group: entry.request.prompt_ids for entry in self._pending.values()})
        self.wake()
        for request in requests:
            key = str(next(self._keys))
            self._pending[key] = Pending(request)
            kind = "CUMULATIVE" if streams(request) else "FINAL_ONLY"
            asked = asked_of(request, self._settings.stop_ids, seeded=self._settings.seeded)
            self._add(key, request.prompt_ids, kind, **asdict(asked))

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish, until nothing runs. Reading may be interrupted and resumed."""
        while self._pending or self._done:
            while self._done:
                yield self._done.popleft()
            if between is not None:
                between()
            if self._pending:
                self._step()
        if self._settings.sleep:
            self.sleep()

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        """Return the log-probability of every token but the first, at temperature 1, from vLLM's prompt log-probabilities."""
        self._check_alive()
        longest = self._settings.max_model_len - 1  # vLLM draws one more token, which is not read
        if too_long := [len(ids) for ids in sequences if len(ids) > longest]:
            raise EngineError(
                f"a sequence of {max(too_long)} tokens is too long to score: the limit is {longest} tokens",
                where="rollout.vllm.max_model_len",
                fix="raise rollout.vllm.max_model_len",
            )
        self.wake()
        keys = [f"score-{next(self._keys)}" for _ in sequences]
        asked = {key: ids for key, ids in zip(keys, sequences, strict=True) if len(ids) > 1}
        for key, ids in asked.items():
            self._add(key, ids, "FINAL_ONLY", max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True)
        while not all(key in self._scores for key in asked):
            self._step()
        found = [self._scores.pop(key, ()) for key in keys]
        for values, ids in zip(found, sequences, strict=True):
            if len(values) != max(0, len(ids) - 1):
                raise EngineError(
                    f"vLLM gave {len(values)} log-probabilities for a sequence of {len(ids)} tokens",
                    where="vLLM",
                    fix=FIX,
                )
        return found

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Compute in this way from now on, with the present weights; every prefix is dropped. Nothing may be running.

        Raises EngineError if no layer or no norm would be changed; the engine then computes in the precision of its weights.
        """
        self._check_alive()
        check_settled(len(self._pending))
        self._drain()
        try:
            return self._compute(forward)
        except EngineError:
            self._compute(Forward())
            raise

    def _compute(self, forward: Forward) -> ForwardReport:
        with self._on_stream():
            report: ForwardReport = self._worker("lockstep_forward", forward)
            torch.cuda.synchronize()
        self._forget_prefixes("a change of numerics or noise")
        self.forward = forward
        return report

    def _forget_prefixes(self, why: str) -> None:
        if not self._engine.reset_prefix_cache():
            raise EngineError(f"vLLM did not empty its prefix cache after {why}", where="vLLM", fix=FIX)

    def load(self, weights: WeightStream, version: int) -> None:
        """Copy checkpoint tensors into vLLM's parameters, drop every prefix, and become `version`. Nothing may be running."""
        self._check_alive()
        check_clean(self.forward, f"weights {version} arrived")
        check_idle(len(self._pending), version)
        self._drain()
        self.version = -1  # a load that fails half-way leaves weights that belong to no version
        with self._on_stream():
            self._worker("lockstep_load", weights, self._settings.folder)
            torch.cuda.synchronize()
        self._forget_prefixes(f"loading weights of version {version}")
        self.version = version

    def weights(self) -> WeightStream:
        """Yield views of vLLM's weights, under the checkpoint's names and shapes; quantised copies are made from them."""
        check_clean(self.forward, "the weights were requested")
        self._drain()
        views: WeightStream = self._worker("lockstep_views")
        return views

    def close(self) -> None:
        """Free all memory. The engine cannot be used afterwards."""
        if self._engine is not None:
            torch.cuda.synchronize()
            self._engine.engine_core.shutdown()
            self._engine = None
        self._pending.clear()
        self._done.clear()

    # --- memory ---------------------------------------------------------------------------------------------------
    def share(self, model: torch.nn.Module) -> list[str]:
        """Make the model's parameters views of vLLM's: see layout.share. Call before anything keeps the old tensors."""
        version = self.version
        self.load(named_weights(model), 0)
        self.version = version
        names = share(model, self.weights())
        torch.cuda.empty_cache()  # the tensors that are no longer referenced
        return names

    def sleep(self) -> None:
        """Free the memory of keys and values; weights stay in place. Nothing may be running."""
        if self._asleep or not self._settings.sleep:
            return
        if self._pending:
            raise EngineError(
                f"vLLM cannot sleep while {len(self._pending)} requests run", fix="read all completions first"
            )
        self._drain()
        with self._on_stream():
            self._engine.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        """Allocate the memory of keys and values again. A request or a score does so by itself.

        Raises EngineError if the GPU has no room for it. The engine cannot be used any more then.
        """
        if self._asleep:
            make_room(size := self._settings.kv_cache_bytes)
            try:
                with self._on_stream():
                    self._engine.wake_up()
            except RuntimeError as error:  # of vLLM's own allocator
                if "out of memory" not in str(error):
                    raise
                what = f"vLLM could not take its {size / GIB:.1f} GiB of keys and values again: {reason_of(error)}"
                raise EngineError(what, fix=SMALLER) from error
            self._asleep = False

    # --- vLLM -----------------------------------------------------------------------------------------------------
    def _add(self, key: str, prompt: TokenIds, kind: str, **parameters: Any) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            **({"detokenize": False, "ignore_eos": True} | parameters),
            output_kind=RequestOutputKind[kind],
            skip_clone=True,
        )
        self._engine.add_request(key, tokens_input(list(prompt)), asked)

    def _step(self) -> None:
        """Run one step of vLLM, and take its finished outputs."""
        outputs = self._vllm_step()
        ended = [key for output in outputs if (key := self._take(output))]
        if ended:
            self._engine.abort_request(ended)
        if self.between is not None and not self._busy:
            self._busy = True
            try:
                self.between()
            finally:
                self._busy = False

    def _vllm_step(self) -> Any:
        """Let vLLM run a step. Raises EngineError if it fails; running requests and the engine are then lost."""
        self._check_alive()
        try:
            with self._on_stream():
                return self._engine.step()
        except Exception as error:
            self._failed = reason_of(error, 400)
            raise self._dead() from error

    def _check_alive(self) -> None:
        if self._failed:
            raise self._dead()

    def _dead(self) -> EngineError:
        return EngineError(f"a step of vLLM failed: {self._failed}", where=self._settings.folder, fix=FIX)

    def _take(self, output: Any) -> str:
        """Record an output; returns its request's key if vLLM must be told to stop it, else ""."""
        key, reply = output.request_id, output.outputs[0]
        if key not in self._pending:
            if output.finished:
                self._scores[key] = tuple(output.prompt_logprobs.logprobs)
            return ""
        pending, ids = self._pending[key], reply.token_ids
        end = look(pending, ids, output.finished, self._decode)
        if end is None and not output.finished:
            return ""
        del self._pending[key]
        logprobs = reply.logprobs.logprobs
        self._done.append(completion_of(pending, ids, logprobs, end, reply.finish_reason, self.version))
        return "" if output.finished else key

    def _drain(self) -> None:
        """Finish the steps that vLLM began ahead of reading results: the last may run after the last completion."""
        core = self._engine.engine_core.engine_core
        for _ in range(MOST_DRAINED):
            if not steps_left(core) or self._pending:
                return
            self._vllm_step()
        raise EngineError(f"vLLM still has work after {MOST_DRAINED} steps without a request", where="vLLM", fix=FIX)

    def _worker(self, call: str, *arguments: Any) -> Any:
        (result,) = self._engine.collective_rpc(call, args=arguments)
        return result

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on vLLM's stream: after earlier work on this stream, and before later work."""
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            outer.wait_stream(self._stream)
            torch.cuda.set_stream(outer)


def _start(settings: VllmSettings) -> Any:
    """Return vLLM's LLMEngine. Raises EngineError for any error that prevents its start."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))
    except LockstepError:
        raise
    except Exception as error:
        text = reason_of(error, 400)
        memory = isinstance(error, torch.cuda.OutOfMemoryError) or "memory" in text.lower()
        raise EngineError(
            f"vLLM cannot start: {text}",
            where=settings.folder,
            fix=SMALLER if memory else FIX,
        ) from error


def _stream_of(engine: Any) -> Any:
    """Return vLLM's CUDA stream: it may have made its own the current one, and its second runner keeps one."""
    runner = engine.model_executor.driver_worker.model_runner
    return getattr(runner, "main_stream", None) or torch.cuda.current_stream()


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Return the arguments of vllm.EngineArgs. No compilation and graphs of decode steps alone measured fastest."""
    slots = captured(settings.slots)
    quantised = Plan(settings.numerics, cast(Scale, settings.scale), settings.exclude)
    return {
        "model": settings.folder,
        "quantization": register(quantised) if settings.numerics else None,
        "skip_tokenizer_init": True,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "dummy",  # random: a tensor that is never sent must not look correct
        "dtype": settings.dtype,
        "seed": 0,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": slots,
        "max_num_batched_tokens": max(BATCHED_TOKENS, slots),
        "gpu_memory_utilization": 0.01,  # kv_cache_memory_bytes decides; this is only checked against the free memory
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enforce_eager": settings.enforce_eager,
        "enable_sleep_mode": settings.sleep,
        "moe_backend": "triton",  # which leaves the weights of experts as they are loaded; the fastest on Hopper, says vLLM
        "worker_cls": QUALNAME,
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE" if settings.enforce_eager else "FULL_DECODE_ONLY"},
        "max_cudagraph_capture_size": None if settings.enforce_eager else slots,
    }


def captured(slots: int) -> int:
    """Return the next number of sequences for which vLLM captures a decode step: beyond the largest it would run without a
    graph.

    The grid is that of VllmConfig._set_cudagraph_sizes (vLLM 0.24): 1, 2, 4, then multiples of 8, from 256 on of 16.
    """
    if slots <= 4:
        return slots if slots != 3 else 4
    step = 8 if slots <= 256 else 16
    return -(-slots // step) * step


def _require_vllm() -> None:
    if not torch.cuda.is_available():
        raise EngineError("vLLM needs a CUDA GPU", where="rollout.engine=vllm", fix="set rollout.engine=native")
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"vLLM is not installed or does not import: {error}",
            where="rollout.engine=vllm",
            fix="run pip install 'lockstep-rl[vllm]', or set rollout.engine=native",
        ) from error
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if len(version) == 2 and version < OLDEST:
        raise EngineError(
            f"vLLM {vllm.__version__} is too old", where="rollout.engine=vllm", fix="install vLLM 0.24 or later"
        )
