"""vLLM's GPU worker with methods added for Lockstep. vLLM imports it by QUALNAME, which it receives as `worker_cls`.

The methods are called through collective_rpc. The class is built on first use: importing this module needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from lockstep.errors import EngineError
from lockstep.noise.apply import NoisyNorms
from lockstep.rollout.vllm.layout import checked, checkpoint_views, of_experts
from lockstep.rollout.vllm.quantised import refresh, set_numeric
from lockstep.text import reason_of
from lockstep.types import Forward, ForwardReport, WeightStream

QUALNAME = "lockstep.rollout.vllm.worker.LockstepWorker"


class WorkerCalls:
    """Calls added to vLLM's worker. Their names come before vLLM's own in the combined class."""

    def lockstep_views(self: Any) -> WeightStream:
        """Yield this worker's weights, under the checkpoint's names: see layout.checkpoint_views."""
        return checkpoint_views(self._lockstep_model())

    def lockstep_load(self: Any, weights: WeightStream, folder: str) -> None:
        """Copy checkpoint tensors into the live parameters through vLLM's own loader, in place; experts are copied as they are.

        Raises EngineError for a name unknown to vLLM, or a tensor that its loader refuses.
        """
        model = self._lockstep_model()
        views = dict(checkpoint_views(model))
        current = [""]
        try:
            with torch.no_grad():
                known = checked(weights, frozenset(views), type(model).__name__, folder)
                model.load_weights(_without_experts(_noting(known, current), views))
        except EngineError:
            raise
        except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise EngineError(
                f"vLLM's {type(model).__name__} cannot load {current[0]}: {reason_of(error)}",
                where=folder,
                fix="set rollout.engine=native, which runs any decoder of transformers",
            ) from error

        refresh(model)

    def lockstep_forward(self: Any, forward: Forward) -> ForwardReport:
        """Compute in this way from now on. Raises EngineError, with clean norms, if that would change no layer or no norm.

        Every rank draws the same noise: norms are replicated, and the numbers depend on the seed and the name alone.
        """
        model = self._lockstep_model()
        norms: NoisyNorms | None = vars(self).get("lockstep_norms")
        if norms is None:
            norms = self.lockstep_norms = NoisyNorms(model, checkpoint_views)
        count, share = norms.set(forward.noise)
        return ForwardReport(set_numeric(model, forward.numerics), count, share, norms.lost)

    def _lockstep_model(self: Any) -> nn.Module:
        model: nn.Module = self.get_model()
        return model

    # --- sleep that frees keys and values alone -------------------------------------------------------------------
    def _maybe_get_memory_pool_context(self: Any, tag: str) -> AbstractContextManager[None]:
        """Keep weights out of the pool that sleep empties: the learner's parameters may be views of them."""
        if tag == "weights":
            return nullcontext()
        pool: AbstractContextManager[None] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return pool

    def sleep(self: Any, level: int = 1) -> None:
        torch.cuda.synchronize()  # no step may still be reading the memory to be unmapped
        super().sleep(level)  # type: ignore[misc]

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        super().wake_up(tags)  # type: ignore[misc]
        with torch.inference_mode():  # fresh pages hold anything, and 0 × NaN would still be NaN under a mask
            for cache_tensor in getattr(self.model_runner, "kv_caches", ()):
                if isinstance(cache_tensor, torch.Tensor):
                    cache_tensor.zero_()


def _noting(stream: WeightStream, current: list[str]) -> WeightStream:
    """Yield the stream; `current` holds the name of the tensor that is being copied."""
    for name, tensor in stream:
        current[0] = name
        yield name, tensor


def _without_experts(stream: WeightStream, views: Mapping[str, torch.Tensor]) -> WeightStream:
    """Yield the stream without experts, which are copied: vLLM's loaders know them under other names, one by one.

    Raises ValueError for one of another shape.
    """
    for name, tensor in stream:
        if not of_experts(name):
            yield name, tensor
        elif tensor.shape != views[name].shape:
            raise ValueError(f"its shape is {list(tensor.shape)}, that of vLLM's experts {list(views[name].shape)}")
        else:
            views[name].copy_(tensor)


@cache
def _worker_class() -> type:
    from vllm.v1.worker.gpu_worker import Worker

    for method in ("_maybe_get_memory_pool_context", "get_model", "sleep", "wake_up"):
        if not hasattr(Worker, method):
            raise EngineError(
                f"the GPU worker of this vLLM has no method {method}",
                where="vllm.v1.worker.gpu_worker",
                fix="install the tested vLLM 0.24.0, or set rollout.engine=native",
            )
    return type("LockstepWorker", (WorkerCalls, Worker), {})


def __getattr__(name: str) -> type:
    if name == QUALNAME.rpartition(".")[2]:
        return _worker_class()
    raise AttributeError(name)


def steps_left(core: Any) -> bool:
    """Return whether vLLM's engine core still has steps in flight, or finished requests that its worker does not know of."""
    return bool(core.batch_queue) or bool(core.scheduler.has_requests())
