"""Kill, stop and starve the workers of runs, and their driver, and compare what is left with a run that nobody touched.

    python benchmarks/cluster_faults.py                             # everything: 60 of each kind of kill, 20 of each other fault
    python benchmarks/cluster_faults.py --fault kill --times 15 --write

kill     SIGKILL for a worker at the beginning, in the middle and at the end of each phase of a step: rollout, update, sync,
         evaluation, save. A run gets 15 of them; after each it must go on by itself, and its end must equal the other's: weights,
         optimizer, samples and metrics to the last bit.
sampler  the same for a worker that only samples: another must take its place, and the run must lose no step.
stop     SIGSTOP for a worker: the deadline of its call must end the run, exit code 75.
full     a worker that can write no more when it saves (a limit of its process stands for the disk): the run must end and say so.
grader   a grader that never returns: its limit must leave the reply unscored, and the run must stop by itself.
driver   SIGKILL for the driver: the workers must leave their stacks, and no process and no open port.

The model is tiny, with two workers on a CPU. The deadline of `stop` is shortened to 5 s from the program's 120.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from results_file import RESULTS, header, write_section  # noqa: E402

from lockstep.track.rollouts import read_rollouts  # noqa: E402
from lockstep.track.rundir import RunDirectory  # noqa: E402

RESULT = RESULTS / "cluster_faults.txt"
PHASES = ("rollout", "update", "sync", "evaluate", "save")
PLACES = {"beginning": 0.02, "middle": 0.5, "end": 0.9}
"""Share of the phase's median duration after which the signal is sent."""
FAULTS = ("kill", "sampler", "stop", "full", "grader", "driver")
WRITABLE = 4096
"""Bytes of a file that a worker can write, for `full`."""
LIMIT_S = 5.0
"""Deadline of a call, for `stop`."""
HANGING = """
import os, time
def grade(prompt, reply):
    while os.path.exists(__file__ + ".hangs"):
        time.sleep(1)
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2
"""
"""Hangs as soon as a file beside it says so: a grader that hangs from the start is refused before there is a run."""


# --- kill -----------------------------------------------------------------------------------------------------------
class Attacker:
    """Kills a worker in a phase, and notes when the driver has noticed."""

    def __init__(self, run: Path, targets: list[tuple[str, str]], draw: random.Random, *, first: int) -> None:
        """`first`: the lowest rank that may be killed."""
        self._run, self._targets, self._draw, self._first = run, targets, draw, first
        self._seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._steps = 0
        self._sent = 0.0
        self.rows: list[tuple[str, str, str, float]] = []
        """Phase, place, phase in which the signal was sent, seconds until it was noticed."""
        self.phase = ""

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Watch a phase of the run."""
        self.phase = phase
        timer = None
        if (
            self._targets
            and not self._sent
            and self._steps > 1
            and phase == self._targets[0][0]
            and self._seconds[phase]
        ):
            place = self._targets[0][1]
            timer = threading.Timer(PLACES[place] * median(self._seconds[phase][-9:]), self._kill)
            timer.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            if timer is None and phase in self._seconds and not sys.exc_info()[0]:
                self._seconds[phase].append(time.perf_counter() - start)
            self._steps += phase == "save"
            self.phase = "between"

    def _kill(self) -> None:
        lines = (self._run / "workers" / "pids.txt").read_text().split()
        victim = int(self._draw.choice(lines[2::3][self._first :]))
        self._sent = time.time()
        self.reached = self.phase
        os.kill(victim, signal.SIGKILL)

    def noticed(self) -> None:
        """Note that the driver has an error to raise."""
        if self._sent:
            phase, place = self._targets.pop(0)
            self.rows.append((phase, place, self.reached, time.time() - self._sent))
            print(*self.rows[-1], flush=True)
        self._sent, self._steps = 0.0, 0


def kills(times: int, folder: Path, *, sampler: bool = False) -> list[str]:
    """Return a table of kills and of the ends of their runs. `sampler`: of workers that only sample."""
    from lockstep.config.load import load
    from lockstep.loops.start import start_run
    from tests.loops.runs import events

    draw = random.Random(16)
    every = [(phase, place) for phase in PHASES for place in PLACES]
    steps = 3 * len(every) + 3
    alone = start_run(load(recipe(folder, f"alone_{sampler}", steps, "placement={kind: local}")))
    rows: list[tuple[str, str, str, float]] = []
    ends = []
    for number in range(-(-times // len(every))):
        targets = draw.sample(every, len(every))[: times - number * len(every)]
        name = f"killed_{sampler}_{number}"
        kind = "kind: split, train: 1, rollout: 1" if sampler else "kind: colocated, gpus: 2"
        words = recipe(folder, name, steps, f"placement={{{kind}, restarts: {len(targets) + 3}}}")
        attacker = Attacker(folder / "runs" / name, list(targets), draw, first=int(sampler))
        with watched(attacker, "replace" if sampler else "_end"):
            run = start_run(load(words))
        whole = same(alone, run, steps) and not (sampler and events(run, "resume"))
        rows += attacker.rows
        ends.append((name, len(attacker.rows), len(targets), whole))
        print(*ends[-1], flush=True)
    found = ["| phase | place | kills | noticed after, s: median | longest |", "| --- | --- | --- | --- | --- |"]
    for phase_name, place in every:
        seconds = [row[3] for row in rows if row[:2] == (phase_name, place)]
        if seconds:
            found.append(f"| {phase_name} | {place} | {len(seconds)} | {median(seconds):.1f} | {max(seconds):.1f} |")
    missed = sum(row[0] != row[2] for row in rows)
    equal = sum(end[3] for end in ends)
    how = "that lost no step" if sampler else "that went on by themselves"
    return [
        *found,
        "",
        f"{len(rows)} kills of {times}; noticed within 5 s: {sum(row[3] <= 5 for row in rows)}; {missed} reached the time after "
        f"their phase; runs {how} and ended bit-equal: {equal} of {len(ends)}",
    ]


@contextmanager
def watched(attacker: Attacker, notices: str) -> Iterator[None]:
    """Tell the attacker of each phase, and of each call of the method by which the driver answers a death."""
    from lockstep.cluster.process_workers import ProcessWorkers
    from lockstep.run.session import Session

    whole_phase, whole_answer = Session._phase, getattr(ProcessWorkers, notices)

    @contextmanager
    def phase(self: Any, name: str) -> Iterator[None]:
        with whole_phase(self, name), attacker.around(name):
            yield

    def answer(self: Any, about: Any) -> Any:
        attacker.noticed()
        return whole_answer(self, about)

    Session._phase = phase  # type: ignore[method-assign]
    setattr(ProcessWorkers, notices, answer)
    try:
        yield
    finally:
        Session._phase = whole_phase  # type: ignore[method-assign]
        setattr(ProcessWorkers, notices, whole_answer)


def same(one: RunDirectory, other: RunDirectory, steps: int) -> bool:
    """Return whether weights, optimizer, metrics and samples are equal."""
    from tests.loops.runs import fingerprints, numbers, weights

    return (
        weights(one, steps) == weights(other, steps)
        and numbers(one) == numbers(other)
        and fingerprints(one) == fingerprints(other)
        and all(read_rollouts(one, step) == read_rollouts(other, step) for step in range(1, steps + 1))
    )


# --- other faults ---------------------------------------------------------------------------------------------------
def fault(kind: str, number: int, folder: Path) -> tuple[bool, str, float]:
    """Make one run with a fault in a process of its own. Returns whether all was as it should be, and what was found."""
    name = f"{kind}_{number}"
    run = folder / "runs" / name
    more = ["placement={kind: colocated, gpus: 2, restarts: 0}"]
    if kind == "grader":
        (folder / "hanging.py").write_text(HANGING)
        (folder / "hanging.py.hangs").unlink(missing_ok=True)
        more.append(f"task.verifier={{kind: python, path: '{folder}/hanging.py:grade', workers: 1, seconds: 3}}")
    words = recipe(folder, name, 200, *more)
    program = (
        "import sys; from lockstep.cluster import process_workers as r; r.LEAST_SECONDS = float(sys.argv[1]); "
        "from lockstep.cli import main; sys.exit(main(['train', *sys.argv[2:]]))"
    )
    with (folder / f"{name}.txt").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-c", program, str(LIMIT_S), *words], stdout=out, stderr=out, cwd=ROOT
        )
    started = wait_for(lambda: re.search("step +2/", text_of(run / "log.txt")) or driver.poll() is not None, 240)
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    ports = listening(family)
    pids = [int(word) for word in text_of(run / "workers" / "pids.txt").split()[2::3]]
    if len(pids) < 2:
        driver.kill()
        return False, f"did not start: {text_of(folder / f'{name}.txt')[-300:]}", 0.0
    sent = time.time()
    match kind:
        case "stop":
            os.kill(pids[number % 2], signal.SIGSTOP)
        case "full":
            resource.prlimit(pids[number % 2], resource.RLIMIT_FSIZE, (WRITABLE, resource.RLIM_INFINITY))
        case "driver":
            driver.kill()
        case "grader":
            (folder / "hanging.py.hangs").touch()
    ended = wait_for(lambda: driver.poll() is not None, 120)
    gone = wait_for(lambda: not alive(family), 20)
    took = time.time() - sent
    closed = wait_for(lambda: not ports & all_listening(), 5)
    code, log = driver.poll(), text_of(folder / f"{name}.txt")
    stacks = any("most recent call first" in text_of(path) for path in (run / "workers").glob("stacks_*.txt"))
    stacks = stacks or f"no answer in 3 s ({folder}/hanging.py:" in text_of(run / "log.txt")
    right = {
        "stop": code == 75 and "has not answered" in log and stacks,
        "full": code not in (0, None) and "rank" in log and "cannot be written" in log and stacks,
        "grader": code not in (0, None) and "the grader met its time limit" in log and stacks,
        "driver": code == -signal.SIGKILL and stacks,
    }[kind]
    if driver.poll() is None:
        driver.kill()
    for one in alive(family):
        with suppress(psutil.Error):
            one.kill()
    good = bool(started and ended and gone and closed and right)
    return good, f"exit code {code}, stacks {stacks}, processes gone {gone}, {len(ports)} ports closed {closed}", took


def outcomes(found: list[tuple[bool, str, float]]) -> list[str]:
    """Return a line for each kind of outcome, and one for all."""
    seconds: dict[str, list[float]] = {}
    for good, text, took in found:
        seconds.setdefault(f"{'as it should be' if good else 'WRONG'}: {text}", []).append(took)
    lines = [f"{text}: {len(took)} times, after {min(took):.1f} to {max(took):.1f} s" for text, took in seconds.items()]
    return [*lines, f"{sum(good for good, *_ in found)} of {len(found)}"]


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for one in family:
        with suppress(psutil.Error):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def listening(family: list[psutil.Process]) -> set[int]:
    """Return the ports on which these processes listen."""
    found: set[int] = set()
    for one in family:
        with suppress(psutil.Error):
            found |= {c.laddr.port for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def all_listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def wait_for(ready: Any, seconds: float) -> bool:
    """Wait until something holds, at most so long; returns whether it does."""
    end = time.monotonic() + seconds
    while not (found := bool(ready())) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def recipe(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    """Write the model and the recipe; returns the words of the command line."""
    from tests.loops.runs import words
    from tests.tiny import write_tiny_model

    if not (folder / "model").exists():
        write_tiny_model(folder / "model")
    evaluation = ("eval.items=4", "eval.every=1", "eval.at_start=false", "health.divergence=off", "optimizer.lr=1e-4")
    settings = ("threads=1", "update.tokens_per_microbatch=48", "prompts_per_step=3", f"steps={steps}", f"name={name}")
    return words(folder, folder / "model", *settings, *evaluation, "device=cpu", *more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--times", type=int, help="of each fault; none means 60 of each kind of kill and 20 of the others"
    )
    parser.add_argument("--write", nargs="?", type=Path, const=RESULT, help="write the tables to a file")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.fault:
            times = args.times or (60 if kind in ("kill", "sampler") else 20)
            if kind in ("kill", "sampler"):
                lines = kills(times, Path(folder), sampler=kind == "sampler")
            else:
                found = []
                for number in range(times):
                    found.append(fault(kind, number, Path(folder)))
                    print(kind, *found[-1], flush=True)
                bad += sum(not good for good, *_ in found)
                lines = outcomes(found)
            print("\n".join([f"{kind}:", *lines, ""]), flush=True)
            if args.write:
                write_section(args.write, kind, [*header(__file__, "CPU", ("torch",)), "", *lines])
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
