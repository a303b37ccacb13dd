"""Who decides about memory: the recipe, then the plan, then the device."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.schema import Update
from lockstep.learner.execution import Execution, execution_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAN = Execution(30_000, "full")


@pytest.mark.parametrize(
    ("update", "device", "plan", "expected"),
    [
        (Update(), CPU, None, Execution(8192, "none")),
        (Update(), CUDA, None, Execution(16384, "selective")),
        (Update(), CUDA, PLAN, PLAN),
        (Update(tokens_per_microbatch=5), CUDA, PLAN, Execution(5, "full")),
        (Update(recompute="none"), CUDA, PLAN, Execution(30_000, "none")),
        (Update(recompute="selective", tokens_per_microbatch=9), CPU, None, Execution(9, "selective")),
    ],
)
def test_the_recipe_then_the_plan_then_the_device(
    update: Update, device: torch.device, plan: Execution | None, expected: Execution
):
    assert execution_of(update, device, plan) == expected
