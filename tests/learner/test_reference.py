"""The reference of the KL penalty: which model it is, and that none is in memory unless it is needed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.config.schema import Recipe
from lockstep.learner.learner import TorchLearner
from lockstep.models.weights import named_weights
from tests.learner.batches import make_batch
from tests.learner.models import logprobs_of
from tests.learner.test_learner import gradient_step

LORA = {"kind": "lora", "rank": 4}
FULL = {"kind": "none"}
IN_LOSS = {"kind": "grpo", "kl": {"coef": 0.1}}
IN_REWARD = {"kind": "reinforce_pp", "kl": {"coef": 0.1, "placement": "reward"}}
ADAPTIVE = {"kind": "grpo", "kl": {"coef": 0.1, "target": 0.05}}


def build(model_dir: Path, adapter: dict[str, Any], algorithm: dict[str, Any], **weights: Any) -> Parts:
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "fp32"},
            "adapter": adapter,
            "algorithm": algorithm,
            "optimizer": {"kind": "adamw", "lr": 0.01},
            "eval": {"items": 5},
        }
    )
    return build_parts(recipe, build_task_of(recipe), **weights)


def whole_models() -> set[int]:
    gc.collect()
    kinds = {id(thing): type(thing) for thing in gc.get_objects()}
    return {
        key for key, kind in kinds.items() if issubclass(kind, PreTrainedModel) and kind.__name__.endswith("CausalLM")
    }


@pytest.mark.parametrize(
    ("adapter", "algorithm", "models"),
    [
        (FULL, {"kind": "grpo"}, 1),
        (FULL, {"kind": "grpo", "kl": {"coef": 0.0}}, 1),
        (FULL, IN_LOSS, 2),
        (FULL, IN_REWARD, 2),
        (FULL, ADAPTIVE, 2),
        (LORA, {"kind": "grpo"}, 1),
        (LORA, IN_LOSS, 1),
        (LORA, IN_REWARD, 1),
        (LORA, ADAPTIVE, 1),
    ],
)
def test_a_second_model_is_loaded_only_for_a_penalty_in_full_training(
    tiny_model_dir: Path, adapter: dict[str, Any], algorithm: dict[str, Any], models: int
):
    before = whole_models()
    parts = build(tiny_model_dir, adapter, algorithm)
    assert len(whole_models() - before) == models
    assert parts.objective.needs_reference == ("kl" in algorithm and algorithm["kl"]["coef"] > 0)


@pytest.mark.parametrize("adapter", [FULL, LORA])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_reference_is_what_the_run_started_from(tiny_model_dir: Path, adapter: dict[str, Any], resumed: bool):
    """After updates, and in a run that goes on from weights that have moved: with adapters it is the base with them off."""
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="eager")
    parts = build(tiny_model_dir, adapter, IN_LOSS)
    train(parts.learner)
    if resumed:
        moved = {name: tensor.clone() for name, tensor in named_weights(parts.policy.model)}
        parts = build(tiny_model_dir, adapter, IN_LOSS, weights=moved)
    sequences = make_batch(masked=False, old=False, ref=False).sequences
    reference = parts.learner.response_logprobs(sequences, 0.8, reference=True)
    policy = parts.learner.response_logprobs(sequences, 0.8)
    for sequence, found, now in zip(sequences, reference, policy, strict=True):
        whole = logprobs_of(start, (*sequence.prompt_ids, *sequence.ids), 0.8)
        assert found == pytest.approx(whole[len(sequence.prompt_ids) - 1 :].tolist(), abs=1e-5)
        assert max(abs(a - b) for a, b in zip(found, now, strict=True)) > 1e-3


def train(learner: TorchLearner) -> None:
    for number in range(3):
        gradient_step(learner, number)
