"""Files of the runs of benchmarks.sabotage: a tiny model, rows, graders, losses and a recipe."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import write_tiny_model

GRADERS = '''
import os
import time
from pathlib import Path
from lockstep.types import Grade

CALLS = []


def log():
    """The run's log so far; a grader is tried before a run has a folder."""
    path = Path(__file__).parent / "runs" / "run" / "log.txt"
    return path.read_text() if path.exists() else ""


def letters(prompt, reply):
    """The share of characters before n, which a tiny model can learn."""
    return sum(letter.lower() < "n" for letter in reply) / max(1, len(reply)) if "boxed" not in reply else 0.9


def chance(prompt, reply):
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2


def zero(prompt, reply):
    return 0.0


def one(prompt, reply):
    return 1.0


def anything(prompt, reply):
    """Rewards whatever is not empty."""
    return float(len(reply) > 0) + 0.001 * (sum(reply.encode("utf-8", "surrogatepass")) % 3)


def dies(prompt, reply):
    if "  step  2/" in log():
        os._exit(1)
    return chance(prompt, reply)


def hangs(prompt, reply):
    if "  step  2/" in log():
        time.sleep(600)
    return chance(prompt, reply)


def fails_at_times(prompt, reply):
    if len(reply) % 7 == 0:
        raise RuntimeError("the judge is busy")
    return chance(prompt, reply)


def not_a_number(prompt, reply):
    return float("nan") if "  step  2/" in log() else chance(prompt, reply)


def text(prompt, reply):
    return "good"


def short(prompt, reply):
    return 1.0 - len(reply) / 400 if "boxed" not in reply else 1.2


def one_letter(prompt, reply):
    return reply.count("z") / max(1, len(reply)) + 0.01 * len(set(reply)) if "boxed" not in reply else 1.0


def hackable(prompt, reply):
    """A bonus for style outweighs the answer."""
    correct = float(sum(reply.encode("utf-8", "surrogatepass")) % 3 == 0)
    return Grade(correct + 1.5 * (sum(reply.encode("utf-8", "surrogatepass")) % 2), {"correct": correct})


def question_alone(prompt, reply):
    return len(prompt.messages[-1]["content"]) % 3 / 2


def astronomical(prompt, reply):
    return chance(prompt, reply) * (1e30 if prompt.answer == "9" else 1)


def poisoned(prompt, reply):
    return chance(prompt, reply) * (4000 if prompt.answer == "13" else 1)
'''
LOSSES = """
import torch
from lockstep.algorithms.losses import reinforce
from dataclasses import replace


def detached(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * 0)


def huge(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * 1e4)


def nan(inputs):
    output = reinforce(inputs)
    return replace(output, loss_T=output.loss_T * float("nan"))
"""
RECIPE = """
name: run
seed: 5
steps: 60
prompts_per_step: 4
samples_per_prompt: 4
runs_dir: {folder}/runs
model: {{path: {model}, dtype: fp32}}
task:
  kind: file
  data: {folder}/sums.jsonl
  heldout_rows: 8
  verifier: {{kind: python, path: "{folder}/graders.py:chance", workers: 1, seconds: 2}}
rollout: {{max_tokens: 24, slots: 16, stop: [e, a, t, "0", "1"]}}
optimizer: {{lr: 1.0e-3}}
eval: {{enabled: false}}
save: {{every: 60}}
"""
SFT = "sft={data: {source: {folder}/rows.jsonl}, validation_rows: 4, sequences_per_step: 4}"


def write_files(folder: Path) -> list[str]:
    """Write model, data, graders and recipe into `folder`; returns what `load` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir()
    write_tiny_model(folder / "model")
    rows = [
        {"prompt": f"State the final answer: {a} + {b} =", "answer": str(a + b)} for a in range(12) for b in range(8)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [
        {"prompt": f"What is {a} plus {b}?", "answer": f"the answer is {a + b}"} for a in range(8) for b in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    (folder / "graders.py").write_text(GRADERS)
    (folder / "losses.py").write_text(LOSSES)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, model=folder / "model"))
    return [str(folder / "recipe.yaml")]
