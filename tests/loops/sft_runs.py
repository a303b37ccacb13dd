"""SFT runs of a tiny model, a second or so each."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.loops.start import start_run
from lockstep.track.rundir import RunDirectory
from tests.loops import runs

SFT = """
name: sft
loop: sft
seed: 3
steps: 4
runs_dir: {folder}/runs
model: {{path: {model}, dtype: fp32}}
task:
  kind: file
  data: {folder}/sums.jsonl
  heldout_rows: 4
rollout: {{max_tokens: 8, slots: 8}}
optimizer: {{lr: 3.0e-3}}
eval: {{items: 4, every: 2, modes: [{{name: greedy}}]}}
save: {{every: 2}}
sft:
  data: {{source: {folder}/rows.jsonl}}
  validation_rows: 4
  sequences_per_step: 4
"""


def words(folder: Path, model: Path, *overrides: str) -> list[str]:
    """Write rows and recipe into `folder`; returns what `load` takes."""
    runs.words(folder, model)
    rows = [
        {"prompt": f"What is {a} plus {b}?", "answer": f"the answer is \\boxed{{{a + b}}}" + " so" * (a % 3)}
        for a in range(7)
        for b in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(SFT.format(folder=folder, model=model))
    return [str(folder / "sft.yaml"), *overrides]


def recipe(folder: Path, model: Path, *overrides: str) -> Recipe:
    return load(words(folder, model, *overrides))


def trained(folder: Path, model: Path, *overrides: str) -> RunDirectory:
    """A finished run."""
    return start_run(recipe(folder, model, *overrides))
