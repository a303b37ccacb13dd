"""Checks of the GPU, its driver and the installed torch. Facts about the driver come from nvidia-smi, which uses no GPU memory;
torch is asked only what its build supports.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import psutil

from lockstep.doctor.check import Check, failure_of
from lockstep.plan.devices import visible

SMI_SECONDS = 5.0
IMPORT_SECONDS = 120.0
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest driver, major and minor number, that a CUDA of this major version runs on (NVIDIA, CUDA compatibility)."""
BF16 = 8.0
"""Compute capability from which on bf16 is native."""
TAKEN_MIB = 1024
"""Memory in use that is more than a driver and a desktop take."""
DRIVER_QUERY = "index,name,compute_cap,driver_version,memory.total,memory.used,uuid"
PROCESS_QUERY = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver knows it; memory in MiB."""

    index: int
    name: str
    capability: float
    driver: str
    total: float
    used: float
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """One that uses a GPU."""

    pid: int
    name: str
    mib: float
    gpu: str = ""
    """UUID of the GPU."""


@dataclass(frozen=True, slots=True)
class Build:
    """The build of torch. Example: Build("2.11.0+cu130", "13.0", ("sm_90", "sm_100", "compute_100"), True)"""

    version: str
    cuda: str | None
    architectures: tuple[str, ...]
    works: bool
    """True if it finds a GPU that it can use."""


def check_gpu(device: Literal["auto", "cpu", "cuda"] = "auto") -> list[Check]:
    """Check torch, the GPUs and the processes on them. `device`: that of the recipe."""
    try:
        gpus, processes = gpus_here(), gpu_processes()
    except subprocess.TimeoutExpired:
        found = f"nvidia-smi gave no answer in {SMI_SECONDS:g} s: the driver hangs"
        return [Check("gpu", "fail", found, "see `dmesg | grep -i nvrm`; restart the machine")]
    checks = [judge_build(torch_build(), gpus, device)]
    if device != "cpu":
        checks += [judge_gpu(gpu) for gpu in gpus]
        checks += [judge_processes(processes, own_processes(), gpus), judge_compiler(compiler())] if gpus else []
    return checks


def judge_build(build: Build, gpus: Sequence[Gpu], device: Literal["auto", "cpu", "cuda"] = "auto") -> Check:
    """Judge whether torch can use the GPUs that the driver knows."""
    found = f"torch {build.version}, {f'built for CUDA {build.cuda}' if build.cuda else 'built without CUDA'}"
    if not gpus and not build.works:
        masked = os.environ.get("CUDA_VISIBLE_DEVICES")
        found += "; no GPU here" + (f" (CUDA_VISIBLE_DEVICES = {masked!r})" if masked is not None else "")
        fix = "take device=auto or device=cpu; or in a container, start it with --gpus all"
        fix = fix if masked is None else "unset CUDA_VISIBLE_DEVICES, or take device=auto or device=cpu"
        return Check("torch", "fail", found, fix) if device == "cuda" else Check("torch", "ok", found)
    if device == "cpu":
        return Check("torch", "ok", f"{found}; the recipe takes the CPU")
    if build.cuda is None:
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        return Check("torch", "fail" if device == "cuda" else "warn", f"{found}, though there is {gpus[0].name}", fix)
    if not gpus:
        return Check("torch", "ok", f"{found}; the driver cannot be asked (no nvidia-smi)")
    found = f"{found}, driver {gpus[0].driver}"
    least = LEAST_DRIVER.get(int(build.cuda.split(".")[0]), (0, 0))
    if driver_version(gpus[0].driver) < least:
        fix = f"update the driver to {least[0]}.{least[1]} or newer, or install a torch built for an older CUDA"
        return Check("torch", "fail", f"{found}, too old for it", fix)
    if not build.works:
        masked = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES = {masked!r})" if masked is not None else ""
        fix = "unset CUDA_VISIBLE_DEVICES" if why else "python -c 'import torch; torch.zeros(1).cuda()' says why"
        return Check("torch", "fail" if device == "cuda" else "warn", f"{found}: torch finds no GPU{why}", fix)
    lacking = [gpu for gpu in gpus if not runs_on(build.architectures, gpu.capability)]
    if lacking:
        fix = "install a torch that is built for it (pytorch.org/get-started)"
        what = f"{found}: has no code for {lacking[0].name} (capability {lacking[0].capability})"
        return Check("torch", "fail", what, fix)
    return Check("torch", "ok", found)


def judge_gpu(gpu: Gpu) -> Check:
    name = f"gpu {gpu.index}"
    free = gpu.total - gpu.used
    found = f"{gpu.name}, capability {gpu.capability}, {free / 1024:.1f} of {gpu.total / 1024:.1f} GiB free"
    if gpu.capability < BF16:
        return Check(name, "warn", f"{found}; bf16 is emulated on it", "set model.dtype=fp32, or take a newer GPU")
    if gpu.used > TAKEN_MIB:
        return Check(
            name, "warn", f"{found}: {gpu.used / 1024:.1f} GiB are taken", "see gpu processes below, or `nvidia-smi`"
        )
    return Check(name, "ok", found)


def judge_processes(processes: Sequence[Process], own: frozenset[int], gpus: Sequence[Gpu]) -> Check:
    """`own`: this process, those that it comes from and those that come from it."""
    others = [one for one in processes if one.pid not in own]
    if others:
        shown = ", ".join(f"{one.pid} {one.name} ({one.mib / 1024:.1f} GiB)" for one in others[:5])
        return Check(
            "gpu processes",
            "warn",
            f"other processes ({len(others)}): {shown}",
            "end them, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )
    if not processes and any(gpu.used > TAKEN_MIB for gpu in gpus):
        return Check(
            "gpu processes",
            "warn",
            "no process is visible, but GPU memory is in use: by processes outside this container",
            "run nvidia-smi on the host",
        )
    return Check("gpu processes", "ok", "none but ours")


def check_busy(device: Literal["auto", "cpu", "cuda"], needed: int, *, allowed: bool) -> list[Check]:
    """Check that no other process is on the first `needed` GPUs, which a run takes. `allowed`: it is no more than a warning."""
    if device == "cpu" or not (gpus := gpus_here()[:needed]):
        return []
    mine = {gpu.uuid for gpu in gpus}
    check = judge_processes([one for one in gpu_processes() if one.gpu in mine], own_processes(), gpus)
    # memory without a process may be that of a run that has just ended
    if allowed or "other processes (" not in check.found:
        return [check]
    return [replace(check, verdict="fail", fix=f"{check.fix}; or share the GPU with those processes: --allow busy_gpu")]


def judge_compiler(path: str | None) -> Check:
    if path is None:
        return Check(
            "compiler",
            "warn",
            "no C compiler: Triton's kernels cannot be built",
            "apt-get install gcc, or export CC=/path/to/it",
        )
    return Check("compiler", "ok", path)


def runs_on(architectures: Sequence[str], capability: float) -> bool:
    """Return whether code for these architectures runs on that GPU: sm_90 does on 9.0 to 9.9, compute_90 on any from 9.0 on."""
    major, minor = divmod(round(capability * 10), 10)
    for one in architectures:
        kind, _, digits = one.partition("_")
        number = "".join(character for character in digits if character.isdigit())
        if not number:
            continue
        of_major, of_minor = divmod(int(number), 10)
        if kind == "sm" and of_major == major and of_minor <= minor and digits[-1:].isdigit():
            return True
        if kind == "sm" and (of_major, of_minor) == (major, minor):  # sm_90a: of this one alone
            return True
        if kind == "compute" and (of_major, of_minor) <= (major, minor):
            return True
    return False


# --- measurements ---------------------------------------------------------------------------------------------------
def torch_build() -> Build:
    import torch

    works = torch.cuda.is_available()
    return Build(torch.__version__, torch.version.cuda, tuple(torch.cuda.get_arch_list()) if works else (), works)


def gpus_here() -> list[Gpu]:
    """Return the GPUs that this process may use, as nvidia-smi says; none without it."""
    every = parse_gpus(_smi(f"--query-gpu={DRIVER_QUERY}"))
    places = visible([(str(one.index), one.uuid) for one in every], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [every[place] for place in places]


def gpu_processes() -> list[Process]:
    return parse_processes(_smi(f"--query-compute-apps={PROCESS_QUERY}"))


def parse_gpus(text: str) -> list[Gpu]:
    """Lines of nvidia-smi; a number that it does not know ("[N/A]") counts as 0."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 6]
    return [
        Gpu(int(index), name, _number(capability), driver, _number(total), _number(used), uuid)
        for index, name, capability, driver, total, used, uuid in rows
    ]


def parse_processes(text: str) -> list[Process]:
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") >= 3]
    return [Process(int(row[1]), ", ".join(row[2:-1]), _number(row[-1]), row[0]) for row in rows if row[1].isdecimal()]


def own_processes() -> frozenset[int]:
    me = psutil.Process()
    return frozenset({me.pid, *(one.pid for one in (*me.parents(), *me.children(recursive=True)))})


def compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and (found := shutil.which(name))), None
    )


def broken_import(name: str) -> str:
    """Return why a package that is installed cannot be imported, tried in a process of its own; "" if it can."""
    return failure_of([sys.executable, "-c", f"import {name}"], IMPORT_SECONDS, "its import")


def check_flash_attention() -> list[Check]:
    """transformers imports it where it is installed, and its binary must be of this torch."""
    if importlib.util.find_spec("flash_attn") is None:
        return []
    return [judge_flash_attention(broken_import("flash_attn"))]


def judge_flash_attention(error: str) -> Check:
    if error:
        fix = "pip uninstall flash-attn (Lockstep does not need it), or install the wheel for this torch and CUDA"
        return Check("flash_attn", "fail", f"installed, but {error}", fix)
    return Check("flash_attn", "ok", "can be imported")


def check_allocator(environment: Mapping[str, str], *, vllm: bool) -> Check:
    """Check the allocator's setting under its old and its new name, and against vLLM's memory pool."""
    from lockstep.rollout.allocator import ALLOCATOR, SEGMENTS
    from lockstep.rollout.vllm.environment import prepare

    values = {name: environment[name] for name in ALLOCATOR if environment.get(name)}
    found = ", ".join(f"{name} = {value}" for name, value in values.items()) or "no setting"
    if len(set(values.values())) > 1:
        return Check("allocator", "warn", f"{found}: two names of one setting", f"unset {ALLOCATOR[0]}")
    if vllm and prepare(dict(environment), cuda_started=False):
        fix = f"unset {' '.join(values)}; a run takes it out of its own environment"
        return Check("allocator", "warn", f"{found}: {SEGMENTS} does not go with vLLM's memory pool", fix)
    return Check("allocator", "ok", found)


def _smi(query: str) -> str:
    """Return the output of nvidia-smi; "" without one or a driver. Raises TimeoutExpired if it hangs."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    command = [path, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    return done.stdout if done.returncode == 0 else ""


def driver_version(text: str) -> tuple[int, ...]:
    """580.65.06 is (580, 65, 6); () for what is none."""
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _number(text: str) -> float:
    """0 for what is none."""
    return float(text) if text.replace(".", "", 1).isdecimal() else 0.0
