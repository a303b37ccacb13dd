"""Runs whose workers train or sample: equal to one process, and a sampler that dies costs no step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from lockstep.loops.start import start_run
from lockstep.track.rollouts import read_rollouts
from tests.cluster.test_runs import SMALL, attacked, no_orphans, same
from tests.loops.runs import LORA, NO_EVAL, events, recipe, trained

__all__ = ["no_orphans"]


class Meetings(threading.Thread):
    """Notes the files by which workers of a run have met, once it has made a step."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run, self._over, self.seen = run, threading.Event(), set[str]()

    def run(self) -> None:
        log = self._run / "log.txt"
        while not self._over.wait(0.05):
            if log.exists() and "  step 1/" in log.read_text():
                self.seen |= {path.name for path in self._run.glob("workers/channel_*")}

    def end(self) -> None:
        self._over.set()
        self.join()


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.sampled("full-1-1")
@pytest.mark.parametrize(
    ("adapter", "train", "rollout"),
    [((), 1, 1), ((), 1, 2), ((*LORA, "model.dtype=bf16"), 2, 1)],
    ids=["full-1-1", "full-1-2", "lora-2-1"],
)
def test_a_split_run_is_that_of_one_process(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...], train: int, rollout: int
) -> None:
    settings = (*SMALL, *adapter, "steps=3", "eval.every=3")
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    split = f"placement={{kind: split, train: {train}, rollout: {rollout}}}"
    meetings = Meetings(tmp_path / "runs" / "together")
    meetings.start()
    together = trained(tmp_path, tiny_model_dir, *settings, split, "name=together")
    meetings.end()
    assert same(alone, together, 3)
    assert len(meetings.seen) == train  # NCCL reads them when weights are first sent, not when it is made
    assert list(together.path.glob("workers/channel_*")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("adapter", [(), LORA], ids=["full", "lora"])
def test_samplers_may_have_engines_with_weights_of_their_own(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*SMALL, *adapter, "steps=3", "eval.every=3", "rollout.slots=4", "optimizer.lr=1e-3")
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    monkeypatch.setattr("lockstep.cluster.process_workers.SAMPLER", "tests.cluster.copies:CopySampler")
    split = "placement={kind: split, train: 1, rollout: 1}"
    together = trained(tmp_path, tiny_model_dir, *settings, split, "name=together")
    if not adapter:
        assert same(alone, together, 3)
    ours, theirs = (read_rollouts(run, 2) for run in (alone, together))  # merged weights are rounded otherwise
    assert [one.ids for one in ours] == [one.ids for one in theirs]


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sampler_that_is_lost_costs_no_step(
    tmp_path: Path, tiny_model_dir: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.cluster.process_workers.LEAST_SECONDS", 15.0)
    settings = (*SMALL, "steps=8", NO_EVAL)
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    wounded = recipe(
        tmp_path, tiny_model_dir, *settings, "placement={kind: split, train: 1, rollout: 1}", "name=wounded"
    )
    attacker = attacked(wounded, 2, number)
    run = start_run(wounded)
    assert attacker.sent
    assert events(run, "resume") == []
    assert len((run.path / "workers" / "pids.txt").read_text().splitlines()) == 2
    assert same(run, alone, 8)


KILLS = """
import os
import signal
from pathlib import Path

def grade(prompt, reply):
    log, dead = Path(__file__).with_name("runs") / "wounded" / "log.txt", Path(__file__).with_name("dead")
    if log.exists() and "  step 2/" in log.read_text() and not dead.exists():
        dead.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return sum(reply.encode("utf-8", "surrogatepass")) % 3 / 2
"""


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_a_sampler_that_is_lost_under_noise_is_replaced(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Its grader kills it in the rollout of step 3; the first of three stages has no noise."""
    (tmp_path / "own.py").write_text(KILLS)
    grader = f"task.verifier={{kind: python, path: {tmp_path}/own.py:grade}}"
    settings = (*SMALL, grader, "steps=3", "noise={stages: 3}", NO_EVAL)
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    wounded = trained(
        tmp_path, tiny_model_dir, *settings, "placement={kind: split, train: 1, rollout: 1}", "name=wounded"
    )
    assert (tmp_path / "dead").exists()
    assert events(wounded, "resume") == []
    assert same(wounded, alone, 3)
