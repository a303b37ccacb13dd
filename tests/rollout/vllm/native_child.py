"""A native engine in a process of its own: what process.py, serve.py and bucket.py do, on a machine without vLLM.

`python -m tests.rollout.vllm.native_child FOLDER SLOTS STOP_IDS DESCRIPTOR`
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.vllm.process import EngineProcess
from lockstep.rollout.vllm.serve import serve
from lockstep.rollout.vllm.wire import Channel

ROOT = Path(__file__).parents[3]


def start(folder: Path | str, *, slots: int = 4, stop_ids: Sequence[int] = ()) -> EngineProcess:
    command = [
        sys.executable,
        "-m",
        "tests.rollout.vllm.native_child",
        str(folder),
        str(slots),
        ",".join(map(str, stop_ids)),
    ]
    return EngineProcess(command, os.environ | {"PYTHONPATH": str(ROOT)}, torch.device("cpu"))


def build(folder: str, slots: int, stop_ids: frozenset[int]) -> NativeEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return NativeEngine(model, slots=slots, stop_ids=stop_ids, decode=tokenizer.decode)


if __name__ == "__main__":
    folder, slots, stops, number = sys.argv[1:]
    stop_ids = frozenset(int(part) for part in stops.split(",") if part)
    serve(Channel.inherited(int(number)), lambda: build(folder, int(slots), stop_ids), time.time())
