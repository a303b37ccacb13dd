"""Kill a training run at random moments, resume it, and compare it with a run that nobody killed: bit for bit.

    python benchmarks/resume_kill9.py [--kills 20] [--model tiny|40m|smollm2-135m-instruct] [--steps 12] [--start fresh|warm]

One run is left alone. Then, for each kill, the same recipe is started anew, gets SIGKILL once at a random moment of the time
that the first run took (start-up included), and is resumed to the end. Compared are the files of the final weights and of
the optimizer, the fingerprint of the weights after every step, all metrics but times, and every sampled token with its
log-probability. Prints a table; exits with 1 on any difference.

The moments are drawn with --seed, one from each of as many equal parts of the run as there are kills. `--start fresh` starts
each process as the command line does; `warm` forks it from a process that has imported everything, so that most kills hit
the training rather than the imports. With --begun all do: moments count from the end of the first step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import SHAPES, write_model  # noqa: E402

from lockstep.track.rollouts import RolloutRow, read_rollouts, rollout_steps  # noqa: E402
from lockstep.track.rundir import RunDirectory  # noqa: E402
from lockstep.track.text import plain_table  # noqa: E402
from lockstep.track.writer import StepRecord, read_events, read_metrics  # noqa: E402

WARM = [
    "torch",
    "peft",
    "pyarrow.parquet",
    "reasoning_gym",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "lockstep.loops.start",
]
"""What a warm process has imported."""
TIMES = ("time/", "throughput/", "memory/", "cpu/", "gpu/", "sync/seconds")
"""Metrics that two runs never share."""
SINCE = ("sync/probe_shift",)
"""Metrics since the last probe: a resumed process probes again, so its mean may be over fewer updates."""
PROBES = "sync/probe_"
"""A resumed process probes its first pushes again, so it has these at more steps; where both have them they must be equal."""

GRADER = '''
def grade(prompt, reply):
    """Arbitrary, so that the samples of a prompt differ and every step has a gradient, whatever the model can do."""
    return sum(reply.encode("utf-8", "surrogatepass")) % 7 / 6
'''
RECIPE = """
seed: 7
threads: {threads}
steps: {steps}
prompts_per_step: 2
samples_per_prompt: 4
runs_dir: {work}/runs
model: {{path: {model}, dtype: {dtype}}}
adapter: {{kind: lora, rank: 8}}
task:
  kind: reasoning_gym
  dataset: chain_sum
  settings: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  size: 100
  verifier: {{kind: python, path: "{work}/grader.py:grade"}}
rollout: {{max_tokens: 8, slots: 8}}
optimizer: {{lr: 1.0e-3}}
sync: {{probe_first: 2, probe_sequences: 2}}
eval: {{enabled: false}}
save: {{every: 1}}
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where everything is, and how processes are started."""

    work: Path
    recipe: Path
    overrides: tuple[str, ...]
    warm: bool
    """Processes are forked from one that has imported everything."""
    begun: bool
    """Time counts from the end of a run's first step."""

    def run(self, name: str) -> Path:
        return self.work / "runs" / name


@dataclass(frozen=True, slots=True)
class Ended:
    """All of a finished run that must not depend on whether it was killed."""

    files: dict[str, str]
    """SHA-256 of the tensors of the last checkpoint, by file name."""
    rows: dict[int, StepRecord]
    rollouts: dict[int, list[RolloutRow]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill and what came of it."""

    moment: float
    """Seconds after the start, or after the first step."""
    reached: str
    resumed: str
    differences: tuple[str, ...]


def main() -> int:
    args = arguments()
    setup = prepare(args)
    moments = random.Random(args.seed)
    print(f"{args.model}, {args.steps} steps, {args.kills} kills, {args.start} starts, in {setup.work}", flush=True)
    seconds = complete(setup, [str(setup.recipe), "name=unbroken", *setup.overrides], setup.run("unbroken"))
    unbroken = read(setup.run("unbroken"), args.steps)
    refuse_idle(unbroken)
    since = " after its first step" if setup.begun else ""
    print(
        f"the unbroken run took {seconds:.1f} s{since}; final weights {fingerprint(unbroken.rows[args.steps])}",
        flush=True,
    )
    gap = max(row.metrics.get("mismatch/max_abs_dlogp", 0.0) for row in unbroken.rows.values())
    print(f"sampled and trained log-probabilities differ by at most {gap:.3g}", flush=True)
    trials = []
    for number in range(args.kills):
        moment = seconds * (number + moments.random()) / args.kills
        trials.append(kill_and_resume(setup, number, moment, unbroken, args.steps))
        print(
            f"kill {number + 1} at {trials[-1].moment:.2f} s, {trials[-1].reached}: {verdict(trials[-1])}", flush=True
        )
    print(table(trials))
    bad = [trial for trial in trials if trial.differences]
    for trial in bad:
        print(f"killed at {trial.moment:.2f} s: " + "; ".join(trial.differences[:10]))
    print(f"{len(trials) - len(bad)} of {len(trials)} killed runs ended bit-equal to the unbroken one")
    if args.keep or bad:
        print(f"the runs are in {setup.work}/runs")
    else:
        shutil.rmtree(setup.work)
    return 1 if bad else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--model", default="tiny", help="tiny or a shape of random_model.py (made here), or as in a recipe"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--start", choices=("fresh", "warm"), default="fresh")
    parser.add_argument("--begun", action="store_true", help="kill no run before its first step is done")
    parser.add_argument("--threads", type=int, default=1, help="of each run (default 1: bears other work beside it)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change the recipe")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the runs")
    args = parser.parse_args()
    if min(args.kills, args.steps, args.threads) < 1:
        parser.error("--kills, --steps and --threads are at least 1")
    return args


def prepare(args: argparse.Namespace) -> Setup:
    """Write recipe, grader and, if asked for, the tiny model."""
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kill9-", dir=args.work)).resolve()
    setup = Setup(work, work / "recipe.yaml", tuple(args.set), args.start == "warm", args.begun)
    if setup.warm:
        multiprocessing.set_forkserver_preload(WARM)
    model, dtype = args.model, "fp32" if args.model == "tiny" else "bf16"
    if model in SHAPES:
        model = str(work / model)
    make = process_of(setup, make_model, work / args.model)
    make.join()  # in a process of its own, so that a warm server has its imports before any run is timed
    if make.exitcode:
        sys.exit("the model could not be made")
    (work / "grader.py").write_text(GRADER)
    setup.recipe.write_text(RECIPE.format(threads=args.threads, steps=args.steps, work=work, model=model, dtype=dtype))
    return setup


def make_model(folder: Path) -> None:
    """Write a model of random weights, if the folder's name asks for one; warms the process that later ones are forked from."""
    if folder.name == "tiny":
        from tests.tiny import write_tiny_model

        folder.mkdir()
        write_tiny_model(folder)
    elif folder.name in SHAPES:
        write_model(folder, folder.name, "cpu")


def process_of(setup: Setup, work: Callable[..., None], *args: object) -> BaseProcess:
    """A process that has begun: from scratch, or forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver") if setup.warm else multiprocessing.get_context("spawn")
    process = context.Process(target=work, args=args)
    process.start()
    return process


def train(words: list[str], log: Path) -> None:
    """`lockstep train` with its output in a file. Runs in a process of its own."""
    from lockstep.cli import main as lockstep

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(lockstep(["train", *words]))


def begin(setup: Setup, words: list[str]) -> BaseProcess:
    return process_of(setup, train, words, setup.work / "log.txt")


def wait_until_counted(setup: Setup, process: BaseProcess, run: Path) -> None:
    """Wait until a run's time begins to count, or its process has ended."""
    metrics = run / "metrics.jsonl"
    while setup.begun and process.exitcode is None and not (metrics.exists() and metrics.stat().st_size):
        process.join(0.01)


def complete(setup: Setup, words: list[str], run: Path) -> float:
    """Run to the end; returns the seconds that count."""
    before = time.perf_counter()
    process = begin(setup, words)
    wait_until_counted(setup, process, run)
    start = time.perf_counter() if setup.begun else before
    process.join()
    if process.exitcode != 0:
        tail = "\n".join((setup.work / "log.txt").read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"lockstep train {' '.join(words)} ended with {process.exitcode}:\n{tail}")
    return time.perf_counter() - start


def kill_and_resume(setup: Setup, number: int, moment: float, unbroken: Ended, steps: int) -> Trial:
    """Start, kill, resume to the end, compare. A run that was done before its moment came is replaced by one killed earlier."""
    attempt = 0
    while True:
        run = setup.run(f"kill_{number:02d}" + (f"_{attempt}" if attempt else ""))
        words = [str(setup.recipe), f"name={run.name}", *setup.overrides]
        process = begin(setup, words)
        wait_until_counted(setup, process, run)
        process.join(moment)
        if process.exitcode is None:
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            break
        attempt, moment = attempt + 1, moment * 0.9
    begun = (run / "manifest.json").exists()
    reached = reached_by(run) if begun else "before the run directory was complete"
    complete(setup, ["--resume", str(run)] if begun else words, run)
    resumed = next(
        (e.message for e in reversed(read_events(RunDirectory.open(run))) if e.kind == "resume"), "a new start"
    )
    return Trial(moment, reached, resumed, tuple(differences(unbroken, read(run, steps))))


def reached_by(run: Path) -> str:
    rows = read_metrics(RunDirectory.open(run))
    unfinished = [path.name for path in (run / "checkpoints").glob(".*")]
    return (f"after step {rows[-1].step}" if rows else "before the first step") + (", in a save" if unfinished else "")


def read(path: Path, steps: int) -> Ended:
    run = RunDirectory.open(path)
    last = run.checkpoints_path / f"step_{steps:06d}"
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in last.glob("*.safetensors")}
    meta = json.loads((last / "state.json").read_text())["meta"]
    files["counters"] = json.dumps(meta["counters"], sort_keys=True)
    rows = {row.step: row for row in read_metrics(run)}
    return Ended(files, rows, {step: read_rollouts(run, step) for step in rollout_steps(run)})


def refuse_idle(run: Ended) -> None:
    """A run whose weights stand still would be equal whatever a resume loses."""
    idle = [step for step, row in run.rows.items() if step and not row.metrics["weights/changed_tensors"]]
    if idle:
        sys.exit(f"no weight changed in steps {idle}: such a run shows nothing about resuming; raise optimizer.lr")


def differences(unbroken: Ended, found: Ended) -> list[str]:
    """What differs, in words; empty if nothing does."""
    names = unbroken.files.keys() | found.files.keys()
    lines = [f"{name} differs" for name in sorted(names) if unbroken.files.get(name) != found.files.get(name)]
    if unbroken.rows.keys() != found.rows.keys():
        lines.append(f"rows of steps {sorted(found.rows)} instead of {sorted(unbroken.rows)}")
    for step in sorted(unbroken.rows.keys() & found.rows.keys()):
        a, b = unbroken.rows[step], found.rows[step]
        lines += [f"step {step}: {text}" for text in different_metrics(a.metrics, b.metrics)]
        if fingerprint(a) != fingerprint(b):
            lines.append(f"step {step}: weights have another fingerprint")
    if unbroken.rollouts.keys() != found.rollouts.keys():
        lines.append(f"rollouts of steps {sorted(found.rollouts)} instead of {sorted(unbroken.rollouts)}")
    for step in sorted(unbroken.rollouts.keys() & found.rollouts.keys()):
        pairs = zip(unbroken.rollouts[step], found.rollouts[step], strict=True)
        count = sum(repr(a) != repr(b) for a, b in pairs)  # repr: nan equals nan, -0.0 is not 0.0
        lines += [f"step {step}: {count} samples differ"] if count else []
    return lines


def fingerprint(row: StepRecord) -> str:
    return str(row.proof["fingerprint"]) if row.proof else "none"


def different_metrics(a: dict[str, float], b: dict[str, float]) -> list[str]:
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name.startswith(TIMES) or name in SINCE or (name.startswith(PROBES) and not (name in a and name in b)):
            continue
        if repr(a.get(name)) != repr(b.get(name)):
            lines.append(f"{name} is {b.get(name)!r} instead of {a.get(name)!r}")
    return lines


def verdict(trial: Trial) -> str:
    return f"{len(trial.differences)} differences" if trial.differences else "equal"


def table(trials: list[Trial]) -> str:
    rows = [(str(n), f"{t.moment:.2f}", t.reached, t.resumed, verdict(t)) for n, t in enumerate(trials, start=1)]
    return plain_table("", ("kill", "seconds", "killed", "resumed", "against the unbroken run"), rows)


if __name__ == "__main__":
    sys.exit(main())
