"""Checks that try features out: attention kernels and uvloop, and on a GPU also CUDA graphs, torch's allocator and vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys

from lockstep.doctor.check import Check, Checking, failure_of
from lockstep.doctor.gpu import gpus_here
from lockstep.doctor.imports import PIP

SECONDS = 600.0
CLOSE = 2e-2
"""Largest difference of a bf16 attention kernel from the same in fp32; values are of size 1."""
LOOP = "import asyncio, uvloop; asyncio.set_event_loop_policy(uvloop.EventLoopPolicy()); asyncio.get_event_loop()"
CAPTURE = """
import torch
x = torch.ones(64, 64, device="cuda")
for _ in range(3):
    y = x @ x
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
x.fill_(2.0)
graph.replay()
torch.cuda.synchronize()
assert float(y[0, 0]) == 256.0, float(y[0, 0])
"""
SEGMENTS = """
import torch
blocks = [torch.empty(1 << 24, device="cuda") for _ in range(8)]
del blocks[::2]
torch.empty(1 << 25, device="cuda")
"""
SERVE = """
from lockstep.config.schema import Model
from lockstep.models import resolve
from vllm import LLM, SamplingParams
folder = str(resolve(Model(path="smollm2-135m-instruct")).path)
engine = LLM(model=folder, max_model_len=128, gpu_memory_utilization=0.15, enforce_eager=True)
(reply,) = engine.generate(["1 + 1 ="], SamplingParams(temperature=0, max_tokens=4))
assert len(reply.outputs[0].token_ids) == 4
"""


def exercises(*, gpu: bool) -> list[tuple[str, Checking]]:
    """Return what is tried here; `gpu`: also what takes memory of the GPU, and is a failure without one."""
    checks: list[tuple[str, Checking]] = [("uvloop", check_uvloop)]
    if not gpu:
        return [("attention", lambda: check_attention("cpu")), *checks]
    return [
        ("gpu", check_builds),
        ("attention", lambda: check_attention("cuda")),
        ("capture", lambda: check_program("capture", CAPTURE, "a captured step can be replayed")),
        ("segments", lambda: check_program("segments", SEGMENTS, "the allocator gives and takes")),
        *checks,
        ("vllm", check_vllm),
    ]


def check_attention(device: str) -> Check:
    """Run torch's attention kernels on the device, forward and backward; each must agree with fp32."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return Check("attention", "fail", "torch finds no GPU", "lockstep doctor")
    works = [
        name for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION") if _agrees(name, device)
    ]
    shown = ", ".join(name.removesuffix("_ATTENTION").lower() for name in works)
    if "MATH" not in works:
        return Check("attention", "fail", f"of {device}'s kernels only these work: {shown or 'none'}", f"{PIP} check")
    return Check("attention", "ok", f"on {device}: {shown}")


def _agrees(name: str, device: str) -> bool:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    values: torch.Tensor = torch.linspace(-1, 1, 3 * 2 * 32 * 64, device=device).sin().reshape(3, 1, 2, 32, 64)
    q, k, v = (part.bfloat16().requires_grad_() for part in values)
    with sdpa_kernel(SDPBackend.MATH):
        right = scaled_dot_product_attention(values[0], values[1], values[2], is_causal=True)
    try:
        with sdpa_kernel(getattr(SDPBackend, name)):
            found = scaled_dot_product_attention(q, k, v, is_causal=True)
            found.float().sum().backward()
    except RuntimeError:  # this device has no such kernel
        return False
    return bool((found.float() - right).abs().max() < CLOSE) and v.grad is not None


def check_uvloop() -> Check:
    """Ask uvloop for an event loop in the main thread, as engines do: 0.22 gives none."""
    if importlib.util.find_spec("uvloop") is None:
        return Check("uvloop", "ok", "not installed, and not needed")
    trouble = failure_of([sys.executable, "-W", "ignore", "-c", LOOP], SECONDS, "it")
    engines = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None]
    if trouble and not engines:
        return Check("uvloop", "ok", f"installed, and used by no engine here ({trouble})")
    if trouble:
        fix = f"{PIP} install 'uvloop<0.22'"
        return Check("uvloop", "warn", f"{trouble} ({engines[0]} asks for one)", fix)
    return Check("uvloop", "ok", "gives an event loop in the main thread")


def check_builds() -> Check:
    """Say for which architectures other packages are to be built here."""
    gpus = gpus_here()
    if not gpus:
        return Check("gpu", "fail", "there is none here, or no driver", "lockstep doctor, without --gpu")
    archs = ";".join(sorted({str(gpu.capability) for gpu in gpus}))
    jobs = max(1, min((os.cpu_count() or 2) // 2, 8))
    found = (
        f'to build an extension here: MAX_JOBS={jobs} TORCH_CUDA_ARCH_LIST="{archs}" pip install --no-build-isolation …'
    )
    return Check("gpu", "ok", found)


def check_program(name: str, program: str, good: str) -> Check:
    """Run a small program on the GPU in a process of its own."""
    trouble = failure_of([sys.executable, "-P", "-c", program], SECONDS, "it")
    return (
        Check(name, "fail", trouble, "lockstep doctor names what is wrong with torch")
        if trouble
        else Check(name, "ok", good)
    )


def check_vllm() -> Check:
    if importlib.util.find_spec("vllm") is None:
        return Check("vllm", "ok", "not installed, and not needed by rollout.engine=native")
    return check_program("vllm", SERVE, "starts and answers")
