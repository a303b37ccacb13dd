"""What the GPU benchmarks against TRL share: its arms, processes that import before their turn, and clocks for its trainers."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from devices import synchronise

ARMS: dict[str, dict[str, Any]] = {
    "Lockstep": {},
    "TRL stock": {"gradient_checkpointing": True, "per_device_train_batch_size": 8, "bf16": True},
    "TRL tuned": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "use_liger_kernel": True,
        "bf16": True,
        "dtype": "float32",
    },
    "TRL tuned bf16": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "use_liger_kernel": True,
        "bf16": False,
        "dtype": "bfloat16",
    },
}
"""TRL's as it comes, with what its manual advises for speed (fp32 weights under bf16 autocast), and with weights and optimizer
state rounded to bf16 on top."""
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "vllm", "liger-kernel")


def trainer_settings(arm: str, *, cpu: bool) -> dict[str, Any]:
    """Of TRL's configuration: the arm's own, and those that print and save nothing."""
    settings = dict(ARMS[arm])
    if dtype := settings.pop("dtype", None):
        settings["model_init_kwargs"] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if cpu:  # the same calls at a tiny size; liger's kernels need a GPU
        settings |= {"use_cpu": True, "per_device_train_batch_size": 2, "use_liger_kernel": False}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return settings | quiet


# --- measuring ------------------------------------------------------------------------------------------------------
def timed(
    owner: Any,
    method: str,
    spent: dict[str, float],
    phase: str,
    *,
    when: Callable[[], bool] = lambda: True,
    take: Callable[[Any], None] = lambda result: None,
) -> None:
    """Add the seconds of a class's method to spent[phase], when `when`; `take` is given what it returned."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def run(*args: Any, **keywords: Any) -> Any:
        if not when():
            return original(*args, **keywords)
        synchronise()
        begin = time.perf_counter()
        result = original(*args, **keywords)
        synchronise()
        spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - begin
        take(result)
        return result

    setattr(owner, method, run)


def step_timer(each: Callable[[float], None]) -> Any:
    """A callback for TRL's trainers that gives the seconds from step to step, what lies between them included."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        start = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            synchronise()
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            synchronise()
            each(time.perf_counter() - self.start)
            self.start = time.perf_counter()

    return Timer()


def save_nothing() -> None:
    """A run of ours always saves its last step: 21 GB with masters and moments, which no figure needs."""
    from lockstep.run.checkpointer import Checkpointer

    Checkpointer.save = lambda *_: None  # type: ignore[method-assign]


# --- lengths --------------------------------------------------------------------------------------------------------
def limit_requests(engine: Any, lengths: Sequence[int]) -> None:
    """The i-th request of each rollout of this class of Lockstep's engines may have lengths[i] tokens."""

    def limited(original: Any) -> Any:
        def take(self: Any, requests: Sequence[Any]) -> None:
            if len(requests) == len(lengths):  # others are of the checks before a run
                each = zip(requests, lengths, strict=True)
                requests = [replace(r, sampling=replace(r.sampling, max_tokens=tokens)) for r, tokens in each]
            original(self, requests)

        return take

    for name in ("submit", *(["begin"] if hasattr(engine, "begin") else [])):  # workers begin what is submitted later
        setattr(engine, name, limited(getattr(engine, name)))


def limit_generate(llm: Any, lengths: Sequence[int]) -> None:
    """The i-th prompt that vLLM's LLM is given may have lengths[i] tokens: each gets sampling parameters of its own."""
    original = llm.generate

    def generate(prompts: Sequence[Any], sampling_params: Any, **keywords: Any) -> Any:
        each = []
        for _, tokens in zip(prompts, lengths, strict=True):
            own = sampling_params.clone()
            own.max_tokens = tokens
            each.append(own)
        return original(prompts, sampling_params=each, **keywords)

    llm.generate = generate


# --- processes ------------------------------------------------------------------------------------------------------
def wait_turn(args: argparse.Namespace) -> None:
    """Everything is imported and the GPU not yet touched: go on when the driver says so."""
    if args.gate:
        Path(args.gate).touch()
        sys.stdin.readline()


@dataclass(frozen=True)
class Process:
    """An arm that imports, then waits for its turn."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    out: Path
    gate: Path

    @staticmethod
    def start(name: str, script: str, arguments: Sequence[str], log: Path, folder: Path) -> Process:
        """The script is given --arm-out FILE and --gate FILE besides; what it prints goes to `log`."""
        out, gate = folder / f"{log.stem}.result", folder / f"{log.stem}.ready"
        command = [sys.executable, script, "--arm-out", str(out), "--gate", str(gate), *arguments]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=stream, stderr=stream, text=True, env=ENVIRONMENT | os.environ
            )
        return Process(name, process, log, out, gate)

    def ready(self) -> None:
        while self.process.poll() is None and not self.gate.exists():
            time.sleep(0.1)

    def run(self, limit: float) -> dict[str, Any]:
        """Let it have the device for at most so many seconds; what it wrote, or {"failed": its exit code}."""
        start = time.perf_counter()
        try:
            self.process.communicate("go\n", timeout=limit)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        if self.process.returncode or not self.out.is_file():
            code, said = self.process.returncode, self.log.read_text()[-1500:]
            print(f"{self.name}: failed with {code}; the end of {self.log}:\n{said}", file=sys.stderr)
            return {"failed": code}
        result: dict[str, Any] = json.loads(self.out.read_text())
        steps, seconds = [round(row["step"], 3) for row in result["rows"]], time.perf_counter() - start
        print(f"{self.name}: {seconds:.0f} s in all; steps {steps}", file=sys.stderr)
        return result


def write_model(folder: Path, shape: str, *, cpu: bool) -> None:
    """In a process of its own, so that the driver holds no memory of the GPU."""
    script = Path(__file__).with_name("random_model.py")
    arguments = [str(folder), "--shape", shape, "--device", "cpu" if cpu else "cuda"]
    subprocess.run([sys.executable, str(script), *arguments], check=True)
