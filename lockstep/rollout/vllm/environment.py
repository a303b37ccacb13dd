"""Environment variables that vLLM reads at import and start, and the PyTorch allocator setting that vLLM cannot use."""

from __future__ import annotations

from collections.abc import MutableMapping

from lockstep.errors import EngineError
from lockstep.rollout.allocator import ALLOCATOR, SEGMENTS

FIXED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Fixed settings: the engine is stepped by hand in its own process."""
DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # measured: 35-48k tokens/s with log-probabilities, the first runner 31-39k
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return log-probabilities of the sampling distribution
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Values for settings that the user has not set."""


def prepare(environment: MutableMapping[str, str], *, cuda_started: bool) -> list[str]:
    """Set the variables that vLLM needs and remove expandable segments, which neither its memory pool nor CUDA IPC supports.

    Returns the removed settings, for the log. `cuda_started` means that this process has allocated on the GPU already: then the
    setting is in force and cannot be removed, and EngineError is raised.
    """
    environment.update(FIXED)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    removed = []
    for name in ALLOCATOR:
        parts = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        kept = [part for part in parts if part.partition(":")[0].strip() != SEGMENTS]
        enabled = [part for part in parts if part not in kept and part.partition(":")[2].strip().lower() == "true"]
        if enabled and cuda_started:
            raise EngineError(
                f"{SEGMENTS} works neither with vLLM's memory pool nor with CUDA IPC, but this process already uses it",
                where=f"{name}={environment[name]}",
                fix=f"unset {name} in the environment and start again, or set rollout.engine=native",
            )
        if len(kept) < len(parts):
            removed += [f"{name}: {part}" for part in parts if part not in kept]
            environment[name] = ",".join(kept)
            if not kept:
                del environment[name]
    return removed
