"""Predicted phases against the peak of the learner's own updates and passes, counted on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.models.merged_weights import merged_of
from lockstep.plan.activations import Recompute
from lockstep.plan.memory import Sizes, phases, stream_tokens
from lockstep.plan.memory_inputs import memory_inputs_of
from lockstep.plan.model_shape import shape_of_model
from lockstep.types import Batch
from tests.plan import learners
from tests.plan.counting import LiveBytes
from tests.plan.test_memory import terms


def update_peak(model: Any, recipe: Any, batch: Batch) -> float:
    """Bytes at the worst moment of the second update, when moments exist."""
    _, learner = learners.learner(model, recipe)  # built outside: what it holds is added below
    weights = [*learner.model.parameters(), *(one.tensor for one in merged_of(learner.model))]
    held = sum(t.nbytes for t in (*learner.optimizer.tensors().values(), *weights))
    with LiveBytes() as live:
        learner.update(batch, learners.loss)
        live.peak = live.now
        learner.update(batch, learners.loss)
    return held + live.peak


@pytest.mark.sampled(4)
@pytest.mark.parametrize("micro", [1300, 5000], ids=["several", "one"])
@pytest.mark.parametrize(
    ("dtype", "recompute", "adapter", "tied"),
    [
        (torch.bfloat16, "none", "", True),
        (torch.bfloat16, "selective", "", False),
        (torch.bfloat16, "full", "", False),
        (torch.bfloat16, "full", learners.LORA, True),
        (torch.float32, "none", learners.LORA, False),
        (torch.bfloat16, "none", learners.LORA.replace("}", ", merged: true}"), False),
        (torch.float32, "full", "", True),
    ],
)
def test_the_peak_of_an_update(dtype: torch.dtype, recompute: Recompute, adapter: str, tied: bool, micro: int) -> None:
    """Llama with a head of some weight, in several micro-batches and in one."""
    count, length = 4, 1216
    model = learners.tiny("Llama", dtype, vocab_size=4096, tie_word_embeddings=tied, num_hidden_layers=4)
    recipe = learners.recipe(
        f"model.dtype={'bf16' if dtype == torch.bfloat16 else 'fp32'}",
        f"update={{recompute: {recompute}, tokens_per_microbatch: {micro}, share_prompts: false}}",
        f"prompts_per_step={count // 2}",
        "samples_per_prompt=2",
        "rollout={max_tokens: 1, slots: 1}",
        *filter(None, [adapter]),
    )
    shape = shape_of_model(model)
    planned = memory_inputs_of(recipe, shape, "cpu", 1e9, prompt_tokens=length, passes=False)
    train = next(found for found in phases(planned, Sizes(micro, recompute, 1)) if found.name == "train")
    predicted = train.bytes
    if recompute != "full":  # a CPU's attention joins its pieces into one more copy of the output
        predicted += stream_tokens(planned, micro) * shape.layers * dtype.itemsize * shape.query_size
    assert predicted == pytest.approx(update_peak(model, recipe, learners.batch([length] * count)), rel=0.1)


WINDOW: dict[str, object] = {"sliding_window": 64}
SCORED: dict[str, tuple[str, dict[str, object]]] = {
    "caps": ("Gemma2", WINDOW | {"query_pre_attn_scalar": 32}),
    "sinks": ("GptOss", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "windows": ("Mistral", WINDOW),
    "short": ("Llama", {}),  # a CPU multiplies short sequences outright
}


UNCOUNTED = pytest.mark.xfail(
    reason="up to a third is missing: in bf16 with windows, of layers computed again, of caps over shared prompts"
)


@pytest.mark.parametrize(
    ("kind", "length", "dtype", "recompute", "shared"),
    [
        ("caps", 512, torch.bfloat16, "none", False),
        ("caps", 1024, torch.float32, "none", False),
        pytest.param("caps", 1024, torch.bfloat16, "full", False, marks=UNCOUNTED),
        pytest.param("caps", 512, torch.float32, "none", True, marks=UNCOUNTED),
        ("sinks", 512, torch.bfloat16, "none", False),
        ("sinks", 1024, torch.float32, "none", False),
        ("sinks", 512, torch.float32, "none", True),
        pytest.param("windows", 1024, torch.bfloat16, "none", False, marks=UNCOUNTED),
        pytest.param("windows", 1024, torch.bfloat16, "full", False, marks=UNCOUNTED),
        ("windows", 1024, torch.float32, "none", True),
        ("caps", 2048, torch.float32, "none", False),
        ("sinks", 2048, torch.float32, "none", False),
        ("short", 200, torch.float32, "none", False),
    ],
)
def test_scores_that_are_tensors_are_counted(
    kind: str, length: int, dtype: torch.dtype, recompute: Recompute, shared: bool
) -> None:
    """Of four sequences of so many tokens, or of two prompts with two replies each, which are half of that."""
    family, more = SCORED[kind]
    model = learners.tiny(family, dtype, **more)
    reply = length // 2 if shared else 1
    recipe = learners.recipe(
        f"model.dtype={'bf16' if dtype == torch.bfloat16 else 'fp32'}",
        f"update={{recompute: {recompute}, tokens_per_microbatch: 100000, share_prompts: {str(shared).lower()}}}",
        "prompts_per_step=2",
        "samples_per_prompt=2",
        f"rollout={{max_tokens: {reply}, slots: 1}}",
    )
    planned = memory_inputs_of(recipe, shape_of_model(model), "cpu", 1e9, prompt_tokens=length - reply, passes=False)
    train = terms(planned, "train", Sizes(100000, recompute, 1))
    batch = learners.batch([length - reply] * 4, reply)
    if shared:
        first, _, third, _ = batch.sequences
        batch = replace(batch, sequences=(first, replace(first), third, replace(third)))
    measured = update_peak(model, recipe, batch)
    assert sum(train.values()) == pytest.approx(
        measured, rel=0.2 if shared or recompute == "full" or kind in ("sinks", "caps") else 0.1
    )
    scores = sum(size for name, size in train.items() if "scores" in name)
    if kind == "short":
        assert scores > 0.2 * measured, "without them the plan would be far off"
    else:
        assert scores == 0, "they are made in blocks"


@pytest.mark.parametrize(
    ("dtype", "adapter", "inner", "scored"),
    [
        (torch.bfloat16, "", 512, 1),  # the MLP's moment is the worst
        (torch.float32, learners.LORA, 512, 1),
        (torch.bfloat16, learners.LORA, 64, 1),  # attention's
        (torch.float32, "", 64, 1),
        (torch.bfloat16, "", 64, 600),  # the head's: of the layers only the states of 600 tokens are left
        (torch.float32, "", 512, 600),
    ],
)
def test_the_peak_of_a_pass_without_gradient(dtype: torch.dtype, adapter: str, inner: int, scored: int) -> None:
    count, length = (1, 616) if scored > 1 else (4, 1216)
    model = learners.tiny("Llama", dtype, vocab_size=4096, intermediate_size=inner)
    recipe = learners.recipe(
        f"model.dtype={'bf16' if dtype == torch.bfloat16 else 'fp32'}",
        "update={tokens_per_microbatch: 100000, share_prompts: false}",
        "prompts_per_step=2",
        f"samples_per_prompt={max(2, count // 2)}",
        f"rollout={{max_tokens: {scored}, slots: 1}}",
        *filter(None, [adapter]),
    )
    planned = memory_inputs_of(recipe, shape_of_model(model), "cpu", 1e9, prompt_tokens=length - scored, passes=True)
    planned = replace(planned, samples_per_step=count)
    found = terms(planned, "log-probabilities", Sizes(100000, "none", 1))
    static = terms(planned, "save", Sizes(100000, "none", 1))
    predicted = sum(found.values()) - sum(static.values())
    assert ("logits" in found) == (scored > 1)
    trained, learner = learners.learner(model, recipe)
    sequences = learners.batch([length - scored] * count, scored).sequences
    with LiveBytes(trained.parameters()) as live:
        learner.response_logprobs(sequences, 0.9)
    assert predicted == pytest.approx(live.peak, rel=0.05)
