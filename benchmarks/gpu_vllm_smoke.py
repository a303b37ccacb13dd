"""All of the vLLM engine that only a GPU can show, in one call: each section runs by itself, and one that fails stops no other.

    PYTHONPATH=vllm_site python benchmarks/gpu_vllm_smoke.py [--sections contract-in,big-own] [--seconds 540]

Sections: numerics-in, numerics-own, numerics-fp32 (fake quantisation and noise on a tiny model, in process, in its own, and in
fp32: what they change, that they agree with the learner's, that a push quantises again, that noise leaves no trace); contract-in,
contract-own, contract-host (the contract of tests/rollout/contract.py on a tiny model, in process, in its own by CUDA IPC,
and through host memory); contract-in-qwen3_moe, contract-own-qwen3_moe, contract-in-gpt_oss, contract-own-gpt_oss (the same of
mixtures of experts); room-in, room-own (the check of the contract that fills the GPU, and so runs alone); big-in, big-own,
big-lora (the Qwen2.5-1.5B shape, random weights: start, share or push, proof, negative control, planted faults, sleep and wake,
log-probabilities against transformers, tokens/s). Results are lines `RESULT {json}`, a table at the end, and
$OUT/vllm_smoke.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_smoke_big import big_in, big_lora, big_own
from vllm_smoke_steps import Steps

ROOT = Path(__file__).parents[1]
SECTIONS = (
    "numerics-in",
    "numerics-own",
    "contract-in",
    "contract-own",
    "contract-host",
    "contract-in-qwen3_moe",
    "contract-own-qwen3_moe",
    "contract-in-gpt_oss",
    "contract-own-gpt_oss",
    "room-in",
    "room-own",
    "big-in",
    "big-own",
    "big-lora",
)
TINY = ("contract", "numerics")
"""Beginnings of sections that run side by side."""
ALONE = "a_sleeping_engine_finds_room_among_what_torch_has_cached"
"""Check of the contract that leaves other processes no memory."""


# --- the contract on a tiny model -----------------------------------------------------------------------------------
def contract_section(section: str) -> None:
    from tests.rollout import contract
    from tests.rollout.vllm import on_gpu

    step = Steps(section)
    with tempfile.TemporaryDirectory() as folder:
        made = None
        with step("start"):
            _, where, *family = section.split("-")
            process, host = "in" if where == "in" else "own", where == "host"
            made = on_gpu.subject(Path(folder), process=process, through_host=host, family=(*family, "llama")[0])
        if made is None:
            return
        names = [name for name in contract.CHECKS if name != ALONE]
        if section == "contract-host":
            names = ["weights_are_what_was_loaded", "loaded_weights_sample_and_nothing_is_remembered_of_the_old"]
        if section.startswith("room"):
            names = [ALONE]
        for name in names:
            with step(name):
                contract.CHECKS[name](made)
            tidy(made.engine)
        with step("close"):
            made.engine.close()


def tidy(engine: Any) -> None:
    """After a check that failed amid a rollout: read what is left, so that the next one starts from an idle engine."""
    try:
        for _ in engine.completed():
            pass
    except Exception:
        traceback.print_exc(file=sys.stdout)


# --- numerics and noise on a tiny model -----------------------------------------------------------------------------
def numerics_section(section: str) -> None:
    from tests.rollout.vllm import numerics_on_gpu

    step = Steps(section)
    with tempfile.TemporaryDirectory() as folder:
        rig = None
        with step("start"):
            dtype = "float32" if section == "numerics-fp32" else "bfloat16"
            rig = numerics_on_gpu.Rig(Path(folder), own_process=section == "numerics-own", dtype=dtype)
        if rig is None:
            return
        for name, check in numerics_on_gpu.CHECKS.items():
            with step(name) as values:
                check(rig, values)
        with step("close"):
            rig.engine.close()


# --- running --------------------------------------------------------------------------------------------------------
def run_section(section: str) -> None:
    """In this process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if section.startswith(("contract", "room")):
        contract_section(section)
        return
    if section.startswith("numerics"):
        numerics_section(section)
        return
    with tempfile.TemporaryDirectory() as folder:
        step = Steps(section)
        with step("whole section"):
            {"big-in": big_in, "big-own": big_own, "big-lora": big_lora}[section](Path(folder), step)


def run_all(sections: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Each section in a process of its own: the tiny ones side by side, the timed ones alone."""
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds

    def run(section: str) -> None:
        command = [sys.executable, __file__, "--section", section]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        watch = threading.Timer(max(1.0, deadline - time.monotonic()), process.kill)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                results.append(json.loads(line[7:]))
            print(f"[{section}] {line}", end="", flush=True)
        watch.cancel()
        if code := process.wait():
            results.append({"section": section, "step": "exit", "ok": False, "error": f"code {code}"})

    tiny = [threading.Thread(target=run, args=(s,)) for s in sections if s.startswith(TINY)]
    for thread in tiny:
        thread.start()
    for thread in tiny:
        thread.join()
    for section in sections:
        if not section.startswith(TINY):
            run(section)
    return results


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| section | step | ok | seconds | what |", "| --- | --- | --- | --- | --- |"]
    for entry in results:
        rest = {k: v for k, v in entry.items() if k not in ("section", "step", "ok", "seconds")}
        text = ", ".join(f"{k} {v}" for k, v in rest.items())[:300].replace("|", "/").replace("\n", " ")
        ok = "yes" if entry["ok"] else "**NO**"
        lines.append(f"| {entry['section']} | {entry['step']} | {ok} | {entry.get('seconds', '')} | {text} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=560.0, help="time for everything; what runs longer is ended")
    parser.add_argument("--section", help="run this one here (for the script itself)")
    given = parser.parse_args()
    if given.section:
        run_section(given.section)
        return 0
    results = run_all([s for s in given.sections.split(",") if s], given.seconds)
    print("\n" + table(results))
    if folder := os.environ.get("OUT"):
        (Path(folder) / "vllm_smoke.json").write_text(json.dumps(results, indent=1))
    failed = [entry for entry in results if not entry["ok"]]
    print(f"\n{len(results) - len(failed)} of {len(results)} steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
