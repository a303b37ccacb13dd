"""A worker in the test's own process: what its methods do to its engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lockstep.cluster.wire import Place
from lockstep.cluster.worker import Worker
from lockstep.types import NativeRollouts, Sampling
from tests.loops.runs import NO_EVAL, recipe
from tests.plan.learners import batch
from tests.rollout.engines import request


def test_an_update_gives_up_what_is_kept_for_later_turns(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = recipe(tmp_path, tiny_model_dir, NO_EVAL, "placement={kind: colocated, gpus: 1}")
    worker = Worker(Place(0, 1, str(tmp_path), str(tmp_path / "meet"), 1))
    try:
        worker.build(json.dumps(settings.model_dump(mode="json")), False)
        worker.push()
        asked = replace(request("a", (5, 6, 7), Sampling(4, ignore_eos=True), group="a#0", version=0), keep=True)
        (reply,) = worker.sample([asked], 60.0).replies
        history = (*asked.prompt_ids, *reply.ids)
        worker.learner.begin_update()
        worker.train(batch([8]), [0], 0, 1)
        assert isinstance(worker.engine, NativeRollouts)
        before = worker.engine.reused
        worker.sample([replace(asked, id="b", prompt_ids=(*history, 8))], 60.0)
        assert worker.engine.reused == before
    finally:
        dist.destroy_process_group()
