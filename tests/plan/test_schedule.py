from __future__ import annotations

from lockstep.config.load import load
from lockstep.evaluation.plan import plan_lines
from lockstep.plan.batch import checkpoint_lines, rate_lines


def test_the_rate_comes_with_its_reason() -> None:
    assert rate_lines(load(["optimizer.lr=3e-6", "steps=7"])) == [
        "learning rate 3e-06: set by optimizer.lr; constant over 7 optimizer steps, no warm-up"
    ]
    assert "2e-05: the default of adapters in RL (full training: 1e-06)" in rate_lines(load(["adapter.kind=lora"]))[0]
    assert "1e-06: the default of full training in RL (adapters: 2e-05)" in rate_lines(load([]))[0]
    assert "10,000 times the default (1e-06)" in rate_lines(load(["optimizer.lr=1e-2"]))[1]
    assert len(rate_lines(load(["optimizer.lr=1e-3", "adapter.kind=lora"]))) == 1
    critic = rate_lines(load(["algorithm.kind=ppo", "algorithm.critic.lr=1e-4"]))[-1]
    assert critic.startswith("critic: learning rate 0.0001 ")


def test_rates_on_the_way_are_those_of_the_schedule() -> None:
    args = ["optimizer={lr: 1e-4, schedule: linear, warmup_steps: 4, min_lr_ratio: 0.1}", "steps=12", "update.epochs=2"]
    head, way = rate_lines(load(args))
    assert head.endswith("linear over 24 optimizer steps, 4 warm-up steps")
    # after the warm-up the rate falls by 0.9e-4 over 20 steps; step 9 is the 5th of them, counted from 1
    assert way == ("on the way: 2.5e-05 at 1, 0.0001 at 4, 8.2e-05 at 9, 5.95e-05 at 14, 3.7e-05 at 19, 1.45e-05 at 24")


def test_evaluations_and_checkpoints_are_those_of_the_run() -> None:
    recipe = load(["steps=100", "eval.every=50", "save={every: 10, keep_best: eval/greedy/accuracy}"])
    assert plan_lines(recipe)[0].startswith("will evaluate at steps 0, 50, 100 (last): greedy (T=0)")
    assert checkpoint_lines(recipe) == [
        "will save at steps 10, 20, 30, …, 90, 100 (last); the newest 2 are kept, and the best eval/greedy/accuracy"
    ]
    assert checkpoint_lines(load(["steps=5"])) == ["will save at steps 5 (last); the newest 2 are kept"]
