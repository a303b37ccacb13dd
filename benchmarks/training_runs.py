"""Several training runs, one process each, some side by side; what a finished run has shown. Shared by the benchmarks beside it.

A run that has finished is not made again, one that was broken off is resumed: start the same command again at any time.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lockstep.config.load import dump, load  # noqa: E402
from lockstep.evaluation.compare import Comparison, compare  # noqa: E402
from lockstep.evaluation.records import read_score, score_path  # noqa: E402
from lockstep.track.rundir import RunDirectory  # noqa: E402
from lockstep.track.writer import StepRecord, read_events, read_metrics  # noqa: E402

MODE = "greedy"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: what it is called in tables, its seed, and the recipe as `lockstep train` takes it."""

    label: str
    seed: int
    args: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """What the run is started with."""
        return (self.args[0], *TO_THE_END, *self.args[1:])

    @property
    def folder(self) -> Path:
        recipe = load(self.args)
        return Path(recipe.runs_dir) / recipe.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run has shown."""

    job: Job
    comparison: Comparison
    records: tuple[StepRecord, ...]
    training_seconds: float
    """Sum over the steps."""
    wall_seconds: float
    """From the start to the report, loading and both evaluations included; of all attempts together."""

    def last(self, name: str, count: int = 5) -> float:
        """Mean of a metric over the last steps that have it; NaN if none has."""
        values = [record.metrics[name] for record in self.records if name in record.metrics][-count:]
        return sum(values) / len(values) if values else float("nan")

    def largest(self, name: str) -> float:
        return max((record.metrics[name] for record in self.records if name in record.metrics), default=float("nan"))


def add_arguments(parser: argparse.ArgumentParser, runs: str) -> None:
    """What the benchmarks have in common."""
    parser.add_argument("--steps", type=int, help="instead of the recipes' own; 2 is a smoke test")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="a.b=c", help="overrides for every run"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each run")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / runs, help="where the runs are kept")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What every run changes in its recipe."""
    return [*args.set, *([f"steps={args.steps}"] if args.steps else [])]


def chosen(names: Iterable[str], only: Sequence[str] | None) -> list[str]:
    """The names that were asked for. Exits with a message for one that does not exist."""
    known = list(names)
    if unknown := set(only or ()) - set(known):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return [name for name in known if only is None or name in only]


def run_all(jobs: Sequence[Job], side_by_side: int, threads: int) -> list[Outcome]:
    """Make every run that is not there yet, and read them all. Exits with the log of the first that fails."""
    for job in jobs:
        _check_same(job)
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(lambda job: _run(job, threads), jobs))
    return [read_outcome(job) for job in jobs]


def read_outcome(job: Job) -> Outcome:
    """Of a run that has finished."""
    run, recipe = RunDirectory.open(job.folder), load(job.args)
    base, trained = (read_score(score_path(run.path, step, MODE)) for step in (0, recipe.steps))
    records = tuple(read_metrics(run))
    return Outcome(
        job,
        compare(base, trained),
        records,
        sum(record.metrics.get("time/step", 0.0) for record in records),
        _wall(run),
    )


def machine(threads: int, jobs: int) -> str:
    """Where this was measured, for the line above a table."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return f"{names[0] if names else platform.processor()}, {threads} threads a run, {jobs} at a time; {packages}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


TO_THE_END = tuple(f"health.{rule}=warn" for rule in ("clipping", "mismatch", "reward_flat"))
"""An arm that collapses is trained to its last step, too: it is compared with the others there."""


def _run(job: Job, threads: int) -> None:
    folder = job.folder
    if _finished(folder):
        print(f"{folder.name}: finished before", file=sys.stderr, flush=True)
        return
    args = ["--resume", str(folder)] if folder.exists() else job.words
    started = time.perf_counter()
    print(f"{folder.name}: {'resuming' if folder.exists() else 'starting'}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(f"{folder.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def _finished(folder: Path) -> bool:
    return folder.exists() and any(event.kind == "finished" for event in read_events(RunDirectory.open(folder)))


def _check_same(job: Job) -> None:
    """A run that is there must be of this very recipe, or the table would mix two."""
    recipe = job.folder / "recipe.yaml"
    if recipe.exists() and load([str(recipe)]) != load(job.words):
        raise SystemExit(
            f"{job.folder} is of another recipe; delete it, or choose another --runs-dir\n{dump(load(job.words))}"
        )


def _wall(run: RunDirectory) -> float:
    """Seconds between the first and the last event of each attempt, summed."""
    times: dict[int, list[datetime]] = {}
    for event in read_events(run):
        times.setdefault(event.attempt, []).append(datetime.fromisoformat(event.time))
    return sum((max(found) - min(found)).total_seconds() for found in times.values())
