"""What the update computed for each token stands with the rollouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.config.load import load
from lockstep.loops.token_log import TokenLog
from lockstep.track.rollouts import LEARNED, read_rollouts, rollout_path
from lockstep.track.rundir import RunDirectory
from lockstep.types import Batch, Scored, TrainSequence
from tests.gallery import Gallery


def test_a_run_stores_log_probability_and_entropy_of_each_trained_token(gallery: Gallery) -> None:
    """Compared with plain softmax of the base's logits: step 1 is sampled and scored by the base."""
    run = gallery.run("plain_lora")
    recipe = load([str(run.recipe_path)])
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32)
    rows = read_rollouts(run, 1)
    known = [row for row in rows if row.learner_logprobs]
    assert known
    assert all((row.advantage != 0) == bool(row.learner_logprobs) for row in rows)
    for row in known:
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt_ids, *row.ids]])).logits[0, len(row.prompt_ids) - 1 : -1]
        logp = torch.log_softmax(logits.double() / recipe.rollout.temperature, -1)
        own = [place for place, trained in enumerate(row.trained) if trained]
        wanted = [float(logp[place, row.ids[place]]) for place in own]
        entropies = [float(-(logp[place].exp() * logp[place]).sum()) for place in own]
        assert row.learner_logprobs == pytest.approx(wanted, abs=1e-4)
        assert row.entropies == pytest.approx(entropies, rel=2e-3)  # float16


def test_the_first_pass_over_a_reply_counts_and_order_does_not_matter() -> None:
    def sequence(ids: tuple[int, ...]) -> TrainSequence:
        return TrainSequence((1,), ids, (True,) * len(ids), (0.0,) * len(ids), (1.0,) * len(ids), 1.0, 0)

    def scored(order: tuple[int, ...], count: int, scale: float) -> Scored:
        values = scale * np.arange(1, count + 1, dtype=np.float32)
        return Scored(order, (-values).tobytes(), values.tobytes())

    log = TokenLog()
    batch = Batch((sequence((5, 6)), sequence((7,)), sequence((8, 9, 10))))
    log.after(batch, [scored((2, 0), 5, 1.0), Scored((), b"", b""), scored((1, 0), 3, 10.0)])
    assert {ids: (found.logprobs.tolist(), found.entropies.tolist()) for ids, found in log.take().items()} == {
        (1, 8, 9, 10): ([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]),
        (1, 5, 6): ([-4.0, -5.0], [4.0, 5.0]),
        (1, 7): ([-10.0], [10.0]),
    }
    assert log.take() == {}


def test_rollouts_of_an_older_run_are_read(gallery: Gallery, tmp_path: Path) -> None:
    run = gallery.copy("plain", tmp_path / "old")
    path = rollout_path(run, 1)
    pq.write_table(pq.read_table(path).drop(list(LEARNED)), path)
    assert {row.learner_logprobs for row in read_rollouts(RunDirectory.open(run.path), 1)} == {()}
