"""Settings of the vLLM engine, and a check that no two of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from lockstep.config.numerics import Numerics
from lockstep.config.section import Section

LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 0.01, 2.0
"""vLLM refuses higher temperatures and raises lower ones, except 0."""
PROMPT_ROOM = 8192
"""Prompt tokens that fit beside the longest reply if nothing else is set."""


class Vllm(Section):
    """The vLLM engine, used by rollout.engine = vllm alone. Needs vLLM 0.24 or later."""

    process: Literal["in", "own"] = "in"
    """in: inside the trainer's process; own: in a process of its own on the same GPU, reached by a private socket."""
    transport: Literal["auto", "view", "copy", "ipc"] = "auto"
    """view: the trained parameters are views of vLLM's tensors, so that there is one set and nothing is sent; copy: a
    second set, copied after every update (through host memory to a process of its own); ipc: the same, handed over on the GPU.
    auto is view in process, ipc to a process of its own, and copy in process under an adapter, which is merged into the weights
    that are sent."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory of keys and values; none is room for rollout.slots sequences (auto: 64) of max_model_len, at most
    gpu_memory_utilization."""
    gpu_memory_utilization: float = Field(default=0.3, gt=0, lt=1)
    """Most that the automatic kv_cache_gib may take, as a share of the GPU's memory."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and reply together; none is 8192 beyond the longest reply asked for, at most the model's context."""
    seeded: bool = True
    """Give every sample its own seed. Costs nothing with vLLM's second model runner, which is used; with the first
    (VLLM_USE_V2_MODEL_RUNNER=0) seeded samples are drawn one by one. Off, samples depend on what was sampled before."""
    enforce_eager: bool = False
    """No CUDA graphs: starts sooner, samples slower."""
    sleep: bool = True
    """Free the memory of keys and values between rollouts."""


def transport_of(vllm: Vllm, *, adapter: bool) -> Literal["view", "copy", "ipc"]:
    """Return the transport in force, with auto resolved."""
    if vllm.transport != "auto":
        return vllm.transport
    if vllm.process == "own":
        return "ipc"
    return "copy" if adapter else "view"


def longest_of(vllm: Vllm, reply: int, context: int | None) -> int:
    """Return the most tokens of prompt and reply together, for this longest reply and the model's context."""
    return vllm.max_model_len or min(reply + PROMPT_ROOM, context or reply + PROMPT_ROOM)


def cache_bytes(vllm: Vllm, wanted: int, gpu: float) -> int:
    """Return the bytes of keys and values, of which `wanted` are enough, on a GPU that has `gpu` bytes."""
    if vllm.kv_cache_gib is not None:
        return int(vllm.kv_cache_gib * 2**30)
    return min(wanted, int(vllm.gpu_memory_utilization * gpu))


def quantised_numerics(numerics: Numerics) -> tuple[str, ...]:
    """Return the numerics with quantised layers that some phase of a run computes in, sorted."""
    return tuple(sorted({numerics.of("train"), numerics.of("rollout"), numerics.of("eval")} - {""}))


def numerics_mistake(numerics: Numerics, *, adapter: bool) -> str:
    """Return why vLLM cannot compute in these numerics, "" if it can."""
    quantised = quantised_numerics(numerics)
    if quantised and adapter:
        return (
            f"numerics {quantised[0]} with an adapter needs rollout.engine=native: vLLM gets the adapter added into the "
            "weights, and the quantised sum differs from a quantised base with an adapter"
        )
    formats = sorted({numeric.split("-")[0] for numeric in quantised if numeric.endswith("w4a4")})
    if len(formats) > 1:
        return f"numerics in {' and '.join(formats)}: vLLM's captured steps quantise inputs in one format; take one, or native"
    return ""


def mistake_of(vllm: Vllm, longest_reply: int, temperatures: Iterable[float], *, adapter: bool) -> str:
    """Return which settings contradict each other or cannot be served; "" if none do."""
    if vllm.process == "in" and vllm.transport == "ipc":
        return "rollout.vllm.transport=ipc needs process=own"
    if vllm.process == "own" and vllm.transport == "view":
        return "rollout.vllm.transport=view needs process=in: a view cannot reach into another process"
    if vllm.transport == "view" and adapter:
        return "rollout.vllm.transport=view cannot carry an adapter, which is merged into a second set of weights; take copy"
    if vllm.max_model_len is not None and vllm.max_model_len <= longest_reply:
        return f"rollout.vllm.max_model_len={vllm.max_model_len} leaves no room for a prompt with {longest_reply} new tokens"
    for temperature in temperatures:
        if temperature and not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
            return (
                f"temperature {temperature:g}: vLLM samples at 0 or from {LEAST_TEMPERATURE} to {LARGEST_TEMPERATURE:g}"
            )
    return ""
