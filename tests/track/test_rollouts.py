from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lockstep.commands.rollouts import show
from lockstep.errors import RunDirectoryError
from lockstep.track.rollouts import Learned, StoredBranch, read_rollouts, rollout_steps, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Branch, FinishReason, Grade, Group
from tests.track.runs import FACTS, HOSTILE, RECIPE, group, groups

ADVANTAGES = [[0.5, -0.5], [-0.5, 0.0]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "a", RECIPE, FACTS)


def test_every_field_of_a_rollout_comes_back(run: RunDirectory) -> None:
    path = write_rollouts(run, 12, groups(12), ADVANTAGES)
    assert path.name == "step_000012.parquet"
    right, wrong, hostile, unscored = read_rollouts(RunDirectory.open(run.path), 12)
    assert (right.prompt_id, right.task, right.answer, right.sample) == ("sums/12", "sums", "7", 0)
    assert right.messages == ({"role": "user", "content": "State the final answer: 4 + 3 = (step 12)"},)
    assert (right.prompt_ids, right.ids, right.logprobs) == ((1, 3, 4), (5, 6, 2), (-0.5, -0.25, -1.0))
    assert (right.trained, right.finish, right.version) == ((True, True, True), "stop", 3)
    assert (right.text, right.extracted, right.method, right.metrics) == ("\\boxed{7}", "7", "boxed", {"correct": 1.0})
    assert [(r.reward, r.error, r.advantage, r.right) for r in (right, wrong, hostile, unscored)] == [
        (1.0, None, 0.5, True),
        (0.0, None, -0.5, False),
        (0.0, None, -0.5, False),
        (None, "the verifier's worker was killed after 2 s", 0.0, None),
    ]
    assert hostile.text == HOSTILE.replace("\ud800", "\\ud800")


def test_the_rows_of_an_episode_come_back_and_are_printed(run: RunDirectory) -> None:
    first, *rest = groups(1)
    branch = Branch((1, 9), (5, 7, 2), (-0.5, 0.0, -0.25), (True, False, True), HOSTILE)
    episode = replace(first.rollouts[0], branches=(branch,))
    assert episode.sampled == 5
    learned = {(*branch.prompt_ids, *branch.ids): Learned(*np.array([[-0.5, -0.125], [1.5, 0.25]], np.float32))}
    write_rollouts(run, 1, [replace(first, rollouts=(episode, *first.rollouts[1:])), *rest], ADVANTAGES, learned)
    (row, other, *_) = read_rollouts(run, 1)
    assert row.branches == (
        StoredBranch(
            *(getattr(branch, name) for name in ("prompt_ids", "ids", "logprobs", "trained")),
            HOSTILE.replace("\ud800", "\\ud800"), (-0.5, -0.125), (1.5, 0.25),
        ),
    )  # fmt: skip
    assert other.branches == ()
    shown = show(row, lambda ids: " ".join(f"<{i}>" for i in ids))
    assert "row 2 of the episode" in shown
    assert (
        shown.index("<1> <9>")
        < shown.index("==> reply 1")
        < shown.index("<== from the environment")
        < shown.index("reply 2")
    )


def test_files_from_before_episodes_had_rows_are_read(run: RunDirectory) -> None:
    path = write_rollouts(run, 1, groups(1), ADVANTAGES)
    pq.write_table(pq.read_table(path).drop_columns("branches"), path, write_page_checksum=True)
    assert [row.branches for row in read_rollouts(run, 1)] == [()] * 4


def test_the_file_is_ordinary_parquet_without_leftovers(run: RunDirectory) -> None:
    path = write_rollouts(run, 1, groups(1), ADVANTAGES)
    table = pq.read_table(path, columns=["reward", "extracted"])
    assert table["reward"].to_pylist() == [1.0, 0.0, 0.0, None]
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000001.parquet"]


def test_advantages_must_fit_the_groups(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(run, 1, groups(1), [[0.5, -0.5]])
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(run, 1, groups(1), [[0.5], [0.5, 0.5]])
    assert rollout_steps(run) == []


def test_a_later_attempt_replaces_the_step(run: RunDirectory) -> None:
    write_rollouts(run, 3, groups(3), ADVANTAGES)
    write_rollouts(run, 3, [group("sums/x", "1 + 1 =", [("2", False)])], [[0.0]])
    assert [row.prompt_id for row in read_rollouts(run, 3)] == ["sums/x"]


def test_a_step_that_is_not_stored_names_those_that_are(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="wait for the run"):
        read_rollouts(run, 1)
    for step in (5, 10, 15):
        write_rollouts(run, step, groups(step), ADVANTAGES)
    (run.rollouts_path / "step_notes.parquet").write_bytes(b"")
    assert rollout_steps(run) == [5, 10, 15]
    with pytest.raises(RunDirectoryError, match="3 stored steps, 5 to 15"):
        read_rollouts(run, 6)


def test_a_damaged_file_is_named(run: RunDirectory) -> None:
    path = write_rollouts(run, 5, groups(5), ADVANTAGES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunDirectoryError, match="step_000005"):
        read_rollouts(run, 5)


def test_no_groups_and_a_grade_without_correct(run: RunDirectory) -> None:
    write_rollouts(run, 1, [], [])
    assert read_rollouts(run, 1) == []
    (one, *_), prompt = groups(1)[0].rollouts, groups(1)[0].prompt
    truncated = replace(one, finish=FinishReason.LENGTH, grade=Grade(reward=0.25, metrics={"style": float("nan")}))
    write_rollouts(run, 2, [Group(prompt, (truncated,))], [[float("nan")]])
    (row,) = read_rollouts(run, 2)
    assert row.right is False  # no `correct` among the metrics: the reward decides, and only 1 is right
    assert row.finish == "length"
    assert row.extracted is None
    assert row.metrics["style"] != row.metrics["style"]
    assert row.advantage != row.advantage
