from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lockstep.learner.learner import plain_logprobs
from lockstep.learner.rounding import rounding_gap, shaken
from lockstep.models.attention import NAME

SEQUENCES = [tuple(range(3, 40)), tuple(range(50, 70))]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)


def test_the_gap_is_of_the_size_of_what_bf16_does_to_the_model(tiny_model_dir):
    """The same weights in fp32 and in bf16: the noise moves the one by about as much as the other is away from it."""
    wide, narrow = load(tiny_model_dir), load(tiny_model_dir, torch.bfloat16)
    gap = rounding_gap(narrow, SEQUENCES, 128)
    pairs = zip(plain_logprobs(wide, SEQUENCES, 128), plain_logprobs(narrow, SEQUENCES, 128), strict=True)
    differences = [abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)]
    true = sum(differences) / len(differences)
    assert 0.2 * true < gap < 5 * true


def test_the_noise_is_always_the_same_and_leaves_the_model_as_it_was(tiny_model_dir):
    model = load(tiny_model_dir)
    before = plain_logprobs(model, SEQUENCES, 128)
    assert rounding_gap(model, SEQUENCES, 128) == rounding_gap(model, SEQUENCES, 128) > 0
    assert plain_logprobs(model, SEQUENCES, 128) == before
    with shaken(model):
        assert plain_logprobs(model, SEQUENCES, 128) != before
