"""Real runs of a tiny model, for tests of the loop and of the commands around it: a second or so each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.loops.start import start_run
from lockstep.tasks.build import build_task
from lockstep.track.rollouts import read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics

GRADER = '''
import os
import signal
from pathlib import Path

TRIGGER = Path(__file__).parent / "sigterm"


def log_of(run):
    """What the run has logged; a grader is tried before a run has a folder."""
    path = Path(run) / "log.txt"
    return path.read_text() if path.exists() else ""


def grade(prompt, reply):
    """Pays for the bytes of the reply, arbitrarily but always the same; so every step has a gradient."""
    if TRIGGER.exists():  # holds a run and a step: in that step the run's process gets SIGTERM
        run, step = TRIGGER.read_text().split("\\n")
        log = log_of(run)
        if "negative control" in log and (step == "1" or f"  step {int(step) - 1}/" in log):
            TRIGGER.unlink(missing_ok=True)
            os.kill(os.getppid(), signal.SIGTERM)
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2


def evaluates(prompt, run, step):
    """Whether this is a reply of the evaluation after a step; the test has written down the ids of the held-out questions."""
    log = log_of(run)
    return f"  step {int(step) - 1}/" in log and prompt.id in (TRIGGER.parent / "held").read_text().split("\\n")


def in_evaluation(prompt, reply):
    if TRIGGER.exists() and evaluates(prompt, *TRIGGER.read_text().split("\\n")):
        TRIGGER.unlink(missing_ok=True)
        os.kill(os.getppid(), signal.SIGTERM)
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2


def down_in_evaluation(prompt, reply):
    if (TRIGGER.parent / "down").exists() and evaluates(prompt, (TRIGGER.parent / "down").read_text(), 2):
        raise RuntimeError("the judge is not at home")
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2


def down(prompt, reply):
    """The judge leaves when the file `down`, which names a run, is there and that run has made two steps."""
    file = TRIGGER.parent / "down"
    if file.exists() and "  step 2/" in log_of(file.read_text()):
        raise RuntimeError("the judge is not at home")
    return grade(prompt, reply)


def rarely(prompt, reply):
    """Right by chance once in eight, so that about every second group of four has nothing right in it."""
    grade(prompt, reply)
    return float(sum(reply.encode("utf-8", "surrogatepass")) % 8 == 0)


def always_right(prompt, reply):
    return 1.0


def wordy(prompt, reply):
    from lockstep.types import Grade

    return Grade(grade(prompt, reply), {"bytes": len(reply), "why": "a text", "parts": {"a": [1]}})


def broken(prompt, reply):
    raise RuntimeError("the judge is not at home")


def absurd(prompt, reply):
    return 1e300 if len(reply) % 2 else -1e300
'''
RECIPE = """
name: run
seed: 5
steps: 3
prompts_per_step: 2
samples_per_prompt: 4
runs_dir: {folder}/runs
model: {{path: {model}, dtype: fp32}}
task:
  kind: file
  data: {folder}/sums.jsonl
  heldout_rows: 8
  verifier: {{kind: python, path: "{folder}/grader.py:grade", workers: 1}}
rollout: {{max_tokens: 6, slots: 8}}
optimizer: {{lr: 3.0e-3}}
eval: {{items: 8}}
save: {{every: 1}}
"""
TIMES = ("time/", "throughput/", "memory/", "cpu/", "gpu/", "sync/seconds", "sync/probe_")


def words(folder: Path, model: Path, *overrides: str) -> list[str]:
    """Write task, grader and recipe into `folder`; returns what `lockstep train` and `load` take."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"State the final answer: {a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(5)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grader.py").write_text(GRADER)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, model=model))
    return [str(folder / "recipe.yaml"), *overrides]


def recipe(folder: Path, model: Path, *overrides: str) -> Recipe:
    return load(words(folder, model, *overrides))


def trained(folder: Path, model: Path, *overrides: str) -> RunDirectory:
    """A finished run."""
    return start_run(recipe(folder, model, *overrides))


LORA = ("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01")
NO_EVAL = "eval.enabled=false"


def terminate_in(folder: Path, run: Path, step: int) -> None:
    """Have the process that trains `run` get SIGTERM while it grades replies of `step`."""
    (folder / "sigterm").write_text(f"{run}\n{step}")


def write_held(folder: Path, recipe: Recipe) -> None:
    """Tell the grader which questions are held out."""
    held = build_task(recipe.task, recipe.seed).heldout("id_probe", 8)
    (folder / "held").write_text("\n".join(prompt.id for prompt in held))


def weights(run: RunDirectory, step: int) -> dict[str, str]:
    """SHA-256 of the tensor files of a checkpoint: weights and optimizer."""
    folder = run.checkpoints_path / f"step_{step:06d}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def fingerprints(run: RunDirectory) -> dict[int, str]:
    """Of the weights after each step."""
    return {row.step: row.proof["fingerprint"] for row in read_metrics(run) if row.proof}


def numbers(run: RunDirectory) -> dict[int, dict[str, str]]:
    """All metrics that two runs of one recipe share, by step, to the last bit."""
    return {
        row.step: {name: repr(value) for name, value in row.metrics.items() if not name.startswith(TIMES)}
        for row in read_metrics(run)
    }


def column(run: RunDirectory, name: str) -> list[float]:
    """A metric of every step that has it."""
    return [row.metrics[name] for row in read_metrics(run) if name in row.metrics]


def same(one: RunDirectory, other: RunDirectory, steps: int) -> bool:
    """Final weights, optimizer, all metrics but times, and all samples are equal, and the runs are whole."""
    assert [row.step for row in read_metrics(one)][-steps:] == list(range(1, steps + 1))
    return (
        weights(one, steps) == weights(other, steps)
        and numbers(one) == numbers(other)
        and fingerprints(one) == fingerprints(other)
        and all(read_rollouts(one, step) == read_rollouts(other, step) for step in range(1, steps + 1))
    )


def events(run: RunDirectory, kind: str) -> list[str]:
    return [event.message for event in read_events(run) if event.kind == kind]
