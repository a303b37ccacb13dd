"""Quantised weights in the memory plan."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.schema import Recipe
from lockstep.plan.memory_inputs import quantised_copies


@pytest.mark.parametrize(
    ("settings", "reference", "expected"),
    [
        ({}, True, []),
        ({"numerics": {"train": "bf16"}}, False, []),
        ({"numerics": {"train": "mxfp4-w4a4"}}, False, ["weights in mxfp4"]),
        ({"numerics": {"train": "mxfp4-w4a4", "eval": "mxfp4-w4a16"}}, False, ["weights in mxfp4"]),
        (
            {"numerics": {"train": "mxfp4-w4a4", "rollout": "nvfp4-w4a4"}},
            True,
            ["weights in mxfp4", "weights in nvfp4", "reference model in mxfp4"],
        ),
        (
            {"numerics": {"train": "mxfp4-w4a4"}, "sync": {"transport": "copy"}},
            False,
            ["weights in mxfp4", "engine's weights in mxfp4"],
        ),
    ],
)
def test_sets_of_quantised_weights(settings: dict[str, Any], reference: bool, expected: list[str]):
    assert quantised_copies(Recipe.model_validate(settings), reference=reference) == expected
