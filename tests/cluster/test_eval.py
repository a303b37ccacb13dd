"""`lockstep eval` on several workers: the scores of one process, proven engines, and an error if a worker dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.commands.eval import choose_modes, choose_sets
from lockstep.errors import SyncError, WorkerLost
from lockstep.evaluation.records import read_score
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.scoring.score import ScoreOptions, placed, saved_of, score_targets
from lockstep.scoring.targets import find_target
from lockstep.scoring.workers import GroupSession, Session, open_session
from lockstep.types import Rollout, Sampling
from tests.cluster.test_runs import no_orphans, processes
from tests.gallery import Gallery
from tests.saying import Said

__all__ = ["no_orphans"]

ONE = "threads=1"


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(("name", "workers"), [("plain", 4), ("plain_lora", 2)])
def test_a_score_does_not_depend_on_the_number_of_workers(
    gallery: Gallery, tmp_path: Path, said: Said, name: str, workers: int
) -> None:
    """S0-10: item by item, of a checkpoint and its base, greedy and sampled; a score of one process stands for it."""
    run = gallery.copy(name, tmp_path / "mine").path
    assert said("eval", str(run), ONE)[0] == 0
    code, out, _ = said("eval", str(run), ONE, "sync.transport=copy", "--gpus", str(workers))
    assert code == 0
    assert out.count("all 8 replies are those of the stored score") == 2
    assert out.count("measured before under the same conditions") == 2
    assert f", in fp32, on {workers} workers\n" in out
    stored = sorted((run / "scores").iterdir())
    assert len(stored) == 4
    for path in stored:
        path.rename(tmp_path / path.name)
    assert said("eval", str(run), ONE, "--gpus", str(workers))[0] == 0
    for path in stored:
        alone, together = read_score(tmp_path / path.name), read_score(path)
        assert together.results == alone.results
        assert together.conditions == alone.conditions
        assert (together.workers, alone.workers) == (workers, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_every_engine_is_proven_and_samples_what_one_process_samples(gallery: Gallery) -> None:
    with ExitStack() as stack:
        session = opened(gallery, stack, "placement={kind: split, train: 1, rollout: 1}")
        assert isinstance(session, GroupSession)
        assert session.workers.size == 2  # those that train score, too
        together = drawn(session)
        session.workers.call_one(1, "falsify")
        with pytest.raises(SyncError, match="other values on rank 1"):
            session.prove()
        alone = drawn(opened(gallery, stack))
    assert len({tokens for row in together for tokens in row.ids}) > 1
    assert [(row.prompt.id, row.sample, row.ids, row.logprobs) for row in together] == [
        (row.prompt.id, row.sample, row.ids, row.logprobs) for row in alone
    ]


def opened(gallery: Gallery, stack: ExitStack, *overrides: str) -> Session:
    target = find_target(str(gallery.run("plain").path), overrides=[ONE, *overrides])
    session = open_session(target.recipe, stack)
    placed(target, session, saved_of(target, session))
    return session


def drawn(session: Session) -> list[Rollout]:
    """Two samples of some questions."""
    prompts, sampling = session.task.heldout("id_probe", 5), Sampling(temperature=1.0, max_tokens=6)
    chat, version = session.policy.chat, session.engine.version
    grader = AsyncGrader(session.task)
    groups = make_rollouts(session.engine, chat, session.task, prompts, 2, sampling, ("eval", 0), version, grader)
    return [row for group in groups for row in group.rollouts]


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_killed_ends_the_evaluation(gallery: Gallery) -> None:
    """Between two replies: the error names rank and work, and the logs are kept."""
    target = find_target(str(gallery.run("plain").path), overrides=[ONE, "placement={kind: colocated, gpus: 2}"])
    killed: list[int] = []

    def watch(name: str, step: int) -> Callable[[int, int], None]:
        def progress(done: int, of: int) -> None:
            if not killed:
                killed.append(process_of(1))
                os.kill(killed[0], signal.SIGKILL)

        return progress

    options = ScoreOptions(
        modes=lambda recipe, chosen: choose_modes(recipe, "all", chosen),
        sets=lambda recipe: choose_sets(recipe, None, None),
        base=False,
        watch=watch,
    )
    with pytest.raises(WorkerLost, match="the worker died") as caught:
        list(score_targets([target], options))
    assert caught.value.where.startswith("rank 1 in ")
    assert caught.value.fix.endswith("; evaluate again")
    logs = Path(caught.value.fix.split(" are in ")[1].split(";")[0])
    assert "most recent call first" in (logs / "stacks_0.txt").read_text()
    shutil.rmtree(logs)


def process_of(rank: int) -> int:
    """Return the id of the process that writes this rank's log."""
    logs = [(one.pid, file.path) for one in processes() for file in one.open_files()]
    (pid,) = {pid for pid, path in logs if path.endswith(f"/rank_{rank}.log")}
    return pid


def test_more_gpus_than_there_are_are_refused_before_anything_is_loaded(
    gallery: Gallery, said: Said, tmp_path: Path
) -> None:
    run = gallery.run("plain").path
    code, out, err = said("eval", str(run), "device=cuda", "--gpus", "64", "--out", str(tmp_path / "out"))
    assert code == 2
    assert "64 workers need a GPU each, and this machine has" in err
    assert "rank 63 trains and samples missing" in " ".join(err.split())
    assert out == ""
    assert not (tmp_path / "out").exists()
    assert processes() == []
