"""Predicted bytes per token against what autograd keeps in the learner's own forward passes."""

from __future__ import annotations

import pytest
import torch

from lockstep.models.fused_layers import fuse_layers
from lockstep.plan.activations import Layers, Recompute, per_token
from lockstep.plan.model_shape import shape_of_model
from tests.interpreter import interpreted
from tests.plan import learners

TOKENS = 608
"""Enough for a CPU's fused attention, which keeps what a GPU's keeps."""


def counted(family: str, dtype: torch.dtype, recompute: Recompute, adapter: str) -> tuple[float, float]:
    """Bytes per token between the passes, counted and predicted. The difference of two batches: what does not grow drops out."""
    recipe = learners.recipe(
        f"update={{recompute: {recompute}, tokens_per_microbatch: 100000}}", *filter(None, [adapter])
    )
    few, many = (
        learners.alive_between_passes(learners.tiny(family, dtype), recipe, [TOKENS] * count) for count in (1, 2)
    )
    rank = recipe.adapter.rank if recipe.adapter.kind == "lora" else 0
    shape = shape_of_model(learners.tiny(family, dtype))
    predicted = per_token(shape, Layers(dtype.itemsize, fused=False, rank=rank), recompute).kept
    if recompute != "full":  # a CPU's attention joins its pieces into one more copy of the output
        predicted += shape.layers * dtype.itemsize * shape.query_size
    return (many - few) / TOKENS, predicted


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "adapter"),
    [("Llama", ""), ("Llama", learners.LORA), ("Qwen2", ""), ("Qwen3", ""), ("Qwen3", learners.LORA)],
)
def test_what_a_token_keeps(family: str, adapter: str, dtype: torch.dtype, recompute: Recompute) -> None:
    measured, predicted = counted(family, dtype, recompute, adapter)
    assert predicted == pytest.approx(measured, rel=0.05)


def counted_fused(recompute: Recompute) -> None:
    recipe = learners.recipe(f"update={{recompute: {recompute}, tokens_per_microbatch: 4096}}")
    tokens, found = 272, []
    for count in (1, 2):
        model = learners.tiny("Qwen3", torch.bfloat16, num_hidden_layers=1)
        assert fuse_layers(model).norms == 5
        found.append(learners.alive_between_passes(model, recipe, [tokens] * count))
    shape = shape_of_model(model)
    predicted = per_token(shape, Layers(2, fused=True), recompute).kept
    predicted += 2 * shape.query_size  # a CPU's attention joins its pieces into one more copy of the output
    predicted += 2 * shape.hidden  # the interpreter holds what the last norm was given
    assert predicted == pytest.approx((found[1] - found[0]) / tokens, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_a_token_keeps_in_fused_layers(recompute: Recompute) -> None:
    """By Triton's interpreter, which runs a GPU's kernels on a CPU, slowly."""
    pytest.importorskip("triton")
    interpreted(counted_fused, recompute, seconds=890)
