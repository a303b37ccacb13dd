"""What else runs on workers: a critic, supervised fine-tuning, and experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.track.rollouts import read_rollouts
from tests.loops import sft_runs
from tests.loops.runs import LORA, NO_EVAL, numbers, trained, weights

TWO = "placement={kind: colocated, gpus: 2}"
SMALL = ("threads=1", "update.tokens_per_microbatch=48", "prompts_per_step=3")
PPO = ("algorithm={kind: ppo}", "steps=3", NO_EVAL, "algorithm.critic.warmup_steps=1", *SMALL)


@pytest.mark.sampled("own")
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_on_workers_is_that_of_one_process(tmp_path: Path, tiny_model_dir: Path, backbone: str) -> None:
    settings = (*PPO, f"algorithm.critic.backbone={backbone}")
    alone = trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    together = trained(tmp_path, tiny_model_dir, *settings, TWO, "name=together")
    assert "critic/explained_variance" in numbers(together)[3]
    assert any(name.startswith("optimizer") for name in weights(together, 3))
    assert weights(alone, 3) == weights(together, 3)
    assert numbers(alone) == numbers(together)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [(), LORA], ids=["full", "lora"])
def test_supervised_fine_tuning_on_workers_is_that_of_one_process(
    tmp_path: Path, tiny_model_dir: Path, adapter: tuple[str, ...]
) -> None:
    settings = ("threads=1", "update.tokens_per_microbatch=48", *adapter)
    alone = sft_runs.trained(tmp_path, tiny_model_dir, *settings, "name=alone")
    together = sft_runs.trained(tmp_path, tiny_model_dir, *settings, TWO, "name=together")
    assert weights(alone, 4) == weights(together, 4)
    assert numbers(alone) == numbers(together)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["false", "true"])
def test_experts_on_workers_sample_the_same_ids(tmp_path: Path, replay: str) -> None:
    from tests.cluster.moe import write_tiny_moe

    write_tiny_moe(tmp_path / "moe")
    settings = (*SMALL, "steps=3", NO_EVAL, f"update.replay_routing={replay}")
    alone = trained(tmp_path, tmp_path / "moe", *settings, "name=alone")
    together = trained(tmp_path, tmp_path / "moe", *settings, TWO, "name=together")
    for step in range(1, 4):
        ids = [[row.ids for row in read_rollouts(run, step)] for run in (alone, together)]
        assert ids[0] == ids[1]
    assert "2 workers" in (together.path / "log.txt").read_text()
