"""What a last bit becomes under quantised numerics: a model against itself with a little noise on every attention output.

    .venv/bin/python benchmarks/rounding.py --seeds 8

Prints mean |Δ log-probability| of SmolLM2-135M in fp32 on three short texts: by relative noise of 1e-7 and of 2^-9 (what two
right kernels in fp32 and bf16 may differ by), the mean over the seeds with the least and the largest, and what the numerics
change by themselves. Half a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from lockstep.config.schema import Model
from lockstep.learner.learner import plain_logprobs
from lockstep.learner.rounding import shaken
from lockstep.models import load_model, resolve
from lockstep.models.attention import NAME
from lockstep.numerics.apply import numerics_of

NUMERICS = ("", "mxfp4-w4a16", "mxfp4-w4a4", "nvfp4-w4a16", "nvfp4-w4a4")
NOISES = (1e-7, 2.0**-9)
TEXTS = (
    "The capital of France is Paris, and the Seine runs through it.",
    "def add(a, b):\n    return a + b\n",
    "Three plus four is seven; seven minus two is five.",
)
Rows = Sequence[Sequence[float]]


def gap(one: Rows, other: Rows) -> float:
    gaps = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(gaps) / len(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    resolved = resolve(Model(path=args.model))
    model: Any = load_model(resolved, dtype=torch.float32, device="cpu", attention=NAME)
    tokenizer: Any = AutoTokenizer.from_pretrained(resolved.path)
    sequences = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    numerics, budget = numerics_of(model), 4096
    plain = plain_logprobs(model, sequences, budget)
    print("| numerics | noise 1e-7 | noise 2^-9 | from fp32 |\n| --- | --- | --- | --- |")
    for numeric in NUMERICS:
        numerics.prepare(numeric)
        with numerics.computing(numeric):
            still, cells = plain_logprobs(model, sequences, budget), []
            for size in NOISES:
                gaps = []
                for seed in range(args.seeds):
                    with shaken(model, size, seed, attention=True):
                        gaps.append(gap(still, plain_logprobs(model, sequences, budget)))
                cells.append(f"{sum(gaps) / len(gaps):.2g} ({min(gaps):.2g} to {max(gaps):.2g})")
        print(f"| {numeric or 'fp32'} | {cells[0]} | {cells[1]} | {gap(still, plain):.2g} |", flush=True)


if __name__ == "__main__":
    main()
