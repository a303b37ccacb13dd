"""Whole runs on several workers: the same weights, samples and metrics as in one process, whatever happens to a worker."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from lockstep.cluster.group_engine import GroupEngine
from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError, SyncError, WorkerLost
from lockstep.loops.start import resume_run, start_run
from lockstep.track.jsonl import read_jsonl
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from lockstep.types import Request
from tests.loops.runs import LORA, NO_EVAL, events, numbers, recipe, same, trained

SMALL = (
    "threads=1",
    "update.tokens_per_microbatch=48",
    "prompts_per_step=3",
    "health.spikes.norm=0.001",
    "update.epochs=2",
)
"""Several micro-batches an update, and not a multiple of the workers; every update is a spike."""
GRADERS = "lockstep.workers.worker"


def on(workers: int, **settings: object) -> str:
    more = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"placement={{kind: colocated, gpus: {workers}{more}}}"


def alike(one: RunDirectory, other: RunDirectory, steps: int) -> bool:
    """The runs are the same, and so are their spikes."""
    return spikes(one) == spikes(other) and same(one, other, steps)


def spikes(run: RunDirectory) -> dict[object, object]:
    """Spikes by step and update, without the attempt: a resume repeats those of the steps that it repeats."""
    return {(row["step"], row["update"]): row | {"attempt": 0} for row in read_jsonl(run.spikes_path)}


def processes(module: str = "lockstep.cluster.host") -> list[psutil.Process]:
    """Live workers that this process has started, or processes of another module."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE and _runs(one, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False


@pytest.fixture
def no_orphans() -> Iterator[None]:
    collections = gc.get_threshold()
    yield
    assert gc.get_threshold() == collections
    end = time.monotonic() + 15
    while processes() and time.monotonic() < end:
        time.sleep(0.2)
    assert processes() == []


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.sampled("full-fp32-2")
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "adapter",
    [(), (*LORA, "model.dtype=bf16"), (*LORA, "model.dtype=bf16", "adapter.merged=true")],
    ids=["full-fp32", "lora-bf16", "merged-bf16"],
)
def test_a_run_ends_in_the_same_weights_on_any_number_of_workers(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...], workers: int
) -> None:
    settings = (*SMALL, *adapter, "steps=2", "eval.every=2", "algorithm.kl.coef=0.01", "rollout.slots=4")
    settings += (f"rollout.deal={'queue' if workers == 2 else 'static'}",)
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    together = trained(tmp_path, tiny_model_dir, *settings, on(workers), "name=together")
    assert max(float(row["batch/microbatches"]) for row in numbers(alone).values() if len(row) > 40) > 2
    assert alike(alone, together, 2)
    assert "ratio/log_abs_p99" in numbers(together)[2]
    assert together.spikes_path.read_text().count("\n") == 4
    assert alone.manifest()["template_hash"] == together.manifest()["template_hash"]
    assert events(alone, "base") == events(together, "base")
    (log,) = [path.read_text() for path in [together.path / "log.txt"]]
    assert f"{workers} worker" in log


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (*SMALL, "steps=3", NO_EVAL, "optimizer.schedule=cosine", "save.keep_last=9")
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    run = start_run(recipe(tmp_path, tiny_model_dir, *settings, on(4), "name=moved"))
    for step, placement in ((1, "placement.gpus=2"), (2, "placement={kind: local}")):
        for later in range(step + 1, 4):
            shutil.rmtree(run.checkpoints_path / f"step_{later:06d}")
        run = resume_run(run.path, [placement], allow_fallback=True)
        assert events(run, "resume")[-1] == f"at step {step}"
    assert alike(run, alone, 3)


# --- faults ---------------------------------------------------------------------------------------------------------
class Attacker(threading.Thread):
    """Sends a signal to one worker once a run has made so many steps."""

    def __init__(self, run: Path, steps: int, number: signal.Signals) -> None:
        super().__init__(daemon=True)
        self._run, self._steps, self._number = run, steps, number
        self.sent = 0.0

    def run(self) -> None:
        while not self._due():
            time.sleep(0.01)
        victims = (self._run / "workers" / "pids.txt").read_text()
        os.kill(int(victims.rpartition("rank 1: ")[2]), self._number)
        self.sent = time.time()

    def _due(self) -> bool:
        log = self._run / "log.txt"
        return log.exists() and re.search(rf"  step +{self._steps}/", log.read_text()) is not None


def attacked(settings: Recipe, steps: int, number: signal.Signals) -> Attacker:
    attacker = Attacker(Path(settings.runs_dir) / settings.name, steps, number)
    attacker.start()
    return attacker


@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (*SMALL, "update.epochs=1", "steps=8", NO_EVAL)  # one update a step: rollouts are begun ahead
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    wounded = recipe(tmp_path, tiny_model_dir, *settings, on(2), "name=wounded")
    graders = processes(GRADERS)
    attacker = attacked(wounded, 2, signal.SIGKILL)
    run = start_run(wounded)
    assert [one for one in processes(GRADERS) if one not in graders] == []
    assert attacker.sent
    (stopped,) = events(run, "stopped")
    assert stopped.startswith("rank 1 in ")
    assert "the worker died" in stopped
    assert len(events(run, "resume")) == 1
    assert "most recent call first" in (run.path / "workers" / "stacks_0.txt").read_text()
    assert alike(run, alone, 8)


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_falls_silent_ends_the_run_in_time(tmp_path: Path, tiny_model_dir: Path) -> None:
    silent = recipe(
        tmp_path, tiny_model_dir, *SMALL, "steps=200", NO_EVAL, on(2, restarts=0, timeout_s=60), "name=silent"
    )
    attacker = attacked(silent, 1, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match=r"rank 1 in \w+: rank 1 has not answered for") as caught:
        start_run(silent)
    assert time.time() - attacker.sent < 120
    assert caught.value.exit_code == 75
    assert read_metrics(RunDirectory.open(tmp_path / "runs" / "silent"))[-1].step >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_the_error_of_a_worker_is_raised_as_it_is(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A learning rate that ruins the weights: every rank refuses, and the run says what one process would say."""
    settings = (*SMALL, "steps=9", NO_EVAL, "optimizer.lr=1e38", "allow=[extreme]", "update.max_skipped=1", on(2))
    with pytest.raises((LearnerError, SyncError), match=r"gradient norm|no number") as caught:
        trained(tmp_path, tiny_model_dir, *settings)
    assert "rank " in caught.value.where


GRADES = """
import os
from pathlib import Path

def grade(prompt, reply):
    Path(__file__).with_name(f"by_{os.getppid()}").touch()
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2
"""


@pytest.mark.usefixtures("no_orphans")
def test_each_worker_grades_what_it_sampled(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "own.py").write_text(GRADES)
    grader = f"task.verifier={{kind: python, path: {tmp_path}/own.py:grade}}"
    settings = (*SMALL, grader, "steps=1", NO_EVAL, "prompts_per_step=4")
    together = trained(tmp_path, tiny_model_dir, *settings, on(2), "name=together")
    pids = {int(path.name.removeprefix("by_")) for path in tmp_path.glob("by_*")}
    assert len(pids - {os.getpid()}) == 2
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    assert alike(alone, together, 1)
    assert {int(path.name.removeprefix("by_")) for path in tmp_path.glob("by_*")} == pids | {os.getpid()}


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("stopped", [False, True])
def test_workers_begin_the_next_rollouts_while_the_driver_ends_a_step(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    begun: list[int] = []
    dropped: list[int] = []
    begin, close = GroupEngine.begin, GroupEngine.close

    def noted(engine: GroupEngine, requests: Sequence[Request]) -> None:
        begun.append(requests[0].version)
        begin(engine, requests)

    def noted_close(engine: GroupEngine) -> None:
        dropped.append(engine.version)
        close(engine)

    monkeypatch.setattr(GroupEngine, "begin", noted)
    monkeypatch.setattr(GroupEngine, "close", noted_close)
    (tmp_path / "stop.py").write_text(
        "def at(history, step):\n    return 'far enough' if len(history) == step else None\n"
    )
    settings: tuple[str, ...] = (*SMALL, "update.epochs=1", "steps=6", "eval.every=3", "save.every=4")
    if stopped:
        settings += (f"health.callbacks=[{{path: '{tmp_path}/stop.py:at', settings: {{step: 2}}}}]",)
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    together = trained(tmp_path, tiny_model_dir, *settings, on(2), "name=together")
    assert alike(alone, together, 2 if stopped else 6)
    assert begun == ([1, 2] if stopped else [1, 2, 5])  # no evaluation and no checkpoint comes before these
    assert dropped == ([2] if stopped else [])
    assert events(together, "verified") == events(alone, "verified")
