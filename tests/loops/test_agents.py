"""Whole runs in which a program of the user's is the environment: what it samples is what is trained."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.config.sft import Rollouts
from lockstep.learner.learner import TorchLearner
from lockstep.loops.sft_data import read_replies
from lockstep.loops.start import start_run
from lockstep.rollout.native import NativeEngine
from lockstep.track.rollouts import read_rollouts
from lockstep.track.writer import read_metrics
from lockstep.types import Batch, Completion, Loss, Metrics
from tests.cluster.moe import write_tiny_moe
from tests.envs.sandboxed import require_sandbox
from tests.loops.runs import NO_EVAL, words

PROGRAM = Path(__file__).with_name("agent_program.py")


def recipe(folder: Path, model: Path, program: Path, *overrides: str, **task: Any) -> Recipe:
    (path, *_) = words(folder, model)
    content = yaml.safe_load(Path(path).read_text())
    command = f"{sys.executable} {program}"
    content |= {"task": {"kind": "agent", "questions": content["task"], "command": command, "running": 4, **task}}
    content |= {"rollout": {"max_tokens": 160, "slots": 8}, "samples_per_prompt": 2}
    Path(path).write_text(yaml.safe_dump(content))
    return load([path, NO_EVAL, "save.every=100", "update.drop_zero_advantage=false", *overrides])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Completion], list[Batch], list[int]]:
    """What the engine drew, what the learner was given, and the tokens that the engine processed and found."""
    drawn: list[Completion] = []
    trained: list[Batch] = []
    counts = [0, 0]
    completed, update = NativeEngine.completed, TorchLearner.update

    def watched(self: NativeEngine, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        for completion in completed(self, between):
            if completion.request.keep:  # not those that prove the sync
                drawn.append(completion)
            yield completion
        counts[:] = [self.processed, self.reused]

    def updated(self: TorchLearner, batch: Batch, loss: Loss) -> Metrics:
        trained.append(batch)
        return update(self, batch, loss)

    monkeypatch.setattr(NativeEngine, "completed", watched)
    monkeypatch.setattr(TorchLearner, "update", updated)
    return drawn, trained, counts


@pytest.mark.parametrize("isolation", ["none", "strict"])
def test_a_program_that_rewrites_its_history_is_trained_token_for_token(
    tmp_path: Path, tiny_model_dir: Path, seen: tuple[list[Completion], list[Batch], list[int]], isolation: str
) -> None:
    """Ten turns and two summaries: three histories, two requests that sum up. Every sampled id is trained once, in its place."""
    drawn, trained, (_, _) = seen
    run = start_run(recipe(tmp_path, tiny_model_dir, PROGRAM, "steps=1", isolation=require_sandbox(isolation)))
    rows = read_rollouts(run, 1)
    assert len(rows) == 4
    assert [row.error for row in rows] == [None] * 4
    assert len(drawn) == 4 * 12
    (batch,) = trained
    assert len(batch.sequences) == sum(1 + len(row.branches) for row in rows) >= 12
    found: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for sequence in batch.sequences:
        whole = (*sequence.prompt_ids, *sequence.ids)
        for place, own in enumerate(sequence.trained):
            if own:
                at = len(sequence.prompt_ids) + place
                found[whole[:at], whole[at], sequence.rollout_logprobs[place]] += 1
    wanted = Counter(
        ((*one.request.prompt_ids, *one.ids[:t]), one.ids[t], one.logprobs[t])
        for one in drawn
        for t in range(len(one.ids))
    )
    assert found == wanted
    given, _ = read_replies(Rollouts(run=str(run.path), keep="all"))
    parts = [part for row in rows for part in row.rows]
    assert {one.sampled.ids for one in given if one.sampled} == {part.ids for part in parts}
    assert not any(one.sampled.whole for one in given if one.sampled), "another chat format cannot render its requests"
    (step,) = [step.metrics for step in read_metrics(run) if "env/turns" in step.metrics]
    assert step["env/turns"] == 12
    assert step["env/branches"] == 3
    assert step["batch/tokens_trained"] == step["env/tokens_sampled"] == sum(len(one.ids) for one in drawn)
    assert step["mismatch/mean_abs_dlogp"] < 1e-5
    processed, _ = seen[2]
    without = sum(len(one.request.prompt_ids) + len(one.ids) for one in drawn)
    assert processed * 2 <= without, f"{processed} of {without}: keys and values are kept between turns"


def test_routes_are_replayed_in_every_row_of_an_episode(tmp_path: Path) -> None:
    model = tmp_path / "moe"
    model.mkdir()
    write_tiny_moe(model)
    asked = ("steps=1", "update.replay_routing=true", "update.samples_per_update=4")
    run = start_run(recipe(tmp_path, model, PROGRAM, *asked, isolation="none"))
    (step,) = [step.metrics for step in read_metrics(run) if "env/turns" in step.metrics]
    assert step["env/branches"] == 3
    assert step["routes/differ"] == 0, "what the same weights chose"
