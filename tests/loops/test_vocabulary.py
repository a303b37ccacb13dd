"""A tokenizer may know more tokens than its model, but no prompt may be made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lockstep.build.build import build_policy
from lockstep.errors import ModelError
from tests.learner.models import SMALL
from tests.loops.runs import recipe
from tests.tiny import TEMPLATE, write_tiny_tokenizer


def folder_of(folder: Path, missing: int, template: str) -> Path:
    """Write a model with `missing` rows fewer than the tokenizer has tokens, one of which, <turn>, was added last."""
    folder.mkdir()
    write_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = SMALL | {"vocab_size": len(tokenizer) - missing}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("missing", "marker"), [(1, "<turn>"), (2, "<|im_start|>")])
def test_ids_without_a_row_are_refused_before_a_prompt_has_them(tmp_path: Path, missing: int, marker: str) -> None:
    model = folder_of(tmp_path / "model", missing, TEMPLATE.replace("<|im_start|>", marker))
    with pytest.raises(ModelError, match="but the model's embedding has only"):
        build_policy(recipe(tmp_path, model))


def test_an_added_token_that_no_prompt_has_may_lie_beyond_the_rows(tmp_path: Path) -> None:
    policy = build_policy(recipe(tmp_path, folder_of(tmp_path / "model", 1, TEMPLATE)))
    model: Any = policy.model
    assert len(policy.tokenizer) == model.get_input_embeddings().weight.shape[0] + 1
