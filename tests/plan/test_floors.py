"""The floor of a step against the project's table of it, and against sums that are written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lockstep.plan.floors import (
    H200,
    Machine,
    Update,
    Work,
    attended,
    generation,
    pass_seconds,
    step_floor,
    table,
    train_seconds,
)
from lockstep.plan.model_shape import shape_of_model
from lockstep.plan.shapes import ModelShape


def _qwen(**sizes: Any) -> ModelShape:
    with torch.device("meta"):
        return shape_of_model(Qwen2ForCausalLM(Qwen2Config(**{"num_hidden_layers": 28} | sizes)))


SMALL = _qwen(
    hidden_size=1536,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    vocab_size=151936,
    tie_word_embeddings=True,
)
LARGE = _qwen(
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    tie_word_embeddings=False,
)

# prompt, response: generation (products, attention, prefill), old pass, training full, LoRA, shared prompts, floor
TABLE = [
    (SMALL, 128, 512, (1.72, 1.02, 0.67, 0.03), 1.26, 3.81, 2.56, 3.23, 5.54),
    (SMALL, 256, 512, (1.98, 1.02, 0.90, 0.06), 1.49, 4.49, 3.03, 3.35, 6.48),
    (SMALL, 256, 1024, (4.79, 2.05, 2.69, 0.06), 2.57, 7.77, 5.29, 6.63, 12.57),
    (LARGE, 128, 512, (6.17, 4.69, 1.34, 0.14), 5.83, 17.5, 11.7, 14.7, 23.7),
    (LARGE, 256, 512, (6.76, 4.69, 1.79, 0.27), 6.93, 20.8, 14.0, 15.2, 27.7),
    (LARGE, 256, 1024, (15.0, 9.38, 5.37, 0.27), 11.8, 35.4, 23.8, 29.7, 50.5),
]


@pytest.mark.parametrize(
    ("shape", "prompt", "response", "generate", "old", "full", "lora", "shared", "total"),
    TABLE,
    ids=[f"{'1.5B' if row[0] is SMALL else '7B'}-{row[1]}-{row[2]}" for row in TABLE],
)
def test_the_table_of_512_samples_on_an_h200(
    shape: ModelShape,
    prompt: int,
    response: int,
    generate: tuple[float, ...],
    old: float,
    full: float,
    lora: float,
    shared: float,
    total: float,
) -> None:
    work = Work.equal(64, 8, prompt, response)
    update = Update(shape.parameters, share_prompts=False, old=True, reference=True)
    floor = step_floor(shape, work, update, H200)
    near = 0.02
    assert (floor.generate, floor.linear, floor.attention) == pytest.approx(generate[:3], rel=near)
    assert floor.prefill == pytest.approx(generate[3], abs=0.005)
    assert floor.old == floor.reference == pytest.approx(old, rel=near)
    assert floor.train == pytest.approx(full, rel=near)
    assert train_seconds(shape, work, replace(update, adapter=True), H200) == pytest.approx(lora, rel=near)
    assert train_seconds(shape, work, replace(update, share_prompts=True), H200) == pytest.approx(shared, rel=near)
    assert floor.total - floor.old - floor.reference == pytest.approx(total, rel=near)
    assert floor.optimizer == pytest.approx(0.011 if shape is SMALL else 0.053, abs=0.0005)
    assert floor.sync == pytest.approx(0.0014 if shape is SMALL else 0.007, abs=0.0001)


TOY = ModelShape(4, 3, 2, 1, 2, 8, 10, False, 0, ())
"""body = 3 · (2·4·4 + 2·4·2 + 3·4·8) = 432, head = 40, kv = 2·3·2·2 = 24 bytes a token."""
RAGGED = Work(((5, (2, 4)), (1, (1,))))


def test_decode_takes_the_real_lengths_step_by_step() -> None:
    slow_memory = Machine("slow memory", 1e30, 1.0)
    _, linear, attention = generation(TOY, RAGGED, slow_memory)
    assert linear == 4 * 2 * (432 + 40)  # four steps read all weights, however many sequences run
    keys = (5 + 6) + (5 + 6 + 7 + 8) + 1  # each step of each sample reads its prompt and what it has drawn
    assert attention == keys * 24
    slow_products = Machine("slow products", 1.0, 1e30)
    prefill, linear, attention = generation(TOY, RAGGED, slow_products)
    assert linear == 2 * (432 + 40) * (2 + 4 + 1)
    assert attention == 4 * 3 * 4 * keys  # FLOP of scores and of values, per layer and query element
    assert prefill == 2 * 432 * 6 + 2 * 40 * 3 + 2 * 3 * 4 * (25 + 1)


@pytest.mark.parametrize("shape", [TOY, replace(TOY, window=7, windowed=2), replace(TOY, windowed=1)])
def test_generation_is_the_sum_over_single_steps_and_samples(shape: ModelShape) -> None:
    groups = tuple((3 * i, tuple((7 * i * j) % 23 for j in range(4))) for i in range(9))
    memory = Machine("slow memory", 1e30, 1.0)
    linear = attention = 0.0
    for t in range(23):
        lengths = [prompt + t for prompt, responses in groups for response in responses if response > t]
        read = [min(n, shape.window) if shape.window else 0 for n in lengths]
        keys = (shape.layers - shape.windowed) * sum(lengths) + shape.windowed * sum(read)
        linear += (shape.body_bytes(len(lengths)) + 2 * shape.head) if lengths else 0
        attention += keys * shape.kv_bytes() / shape.layers
    assert generation(shape, Work(groups), memory)[1:] == (linear, attention)
    assert generation(shape, Work(()), memory)[1:] == (0, 0)


def test_a_group_shares_its_prompt() -> None:
    machine = Machine("one FLOP a second", 1.0, 1.0)
    shared = pass_seconds(TOY, RAGGED, machine, share_prompts=True)
    plain = pass_seconds(TOY, RAGGED, machine, share_prompts=False)
    assert plain - shared == 2 * 432 * 5 + 2 * 3 * 4 * 25  # one prompt of 5 tokens less
    once = Update(0)
    again = replace(once, recompute=True)
    assert train_seconds(TOY, RAGGED, again, machine) == train_seconds(TOY, RAGGED, once, machine) + shared
    half = replace(once, kept=0.5)
    assert train_seconds(TOY, RAGGED, half, machine) == train_seconds(TOY, RAGGED, once, machine) / 2


def test_a_sliding_window_limits_what_is_read() -> None:
    windowed = replace(TOY, window=3, windowed=2)
    # Causal pairs of 10 tokens: 50; in a window of 3: 3·10 - 9/2.
    assert attended(windowed, 10) == 50 + 2 * (30 - 4.5)
    assert attended(windowed, 4, before=6) == attended(windowed, 10) - attended(windowed, 6)
    memory = Machine("slow memory", 1e30, 1.0)
    _, _, attention = generation(windowed, Work(((5, (2,)),)), memory)
    assert attention == (5 + 6) * 8 + (3 + 3) * 16


def test_the_table_has_the_phases_that_take_any_time() -> None:
    floor = step_floor(SMALL, Work.equal(64, 8, 256, 512), Update(SMALL.parameters, share_prompts=False), H200)
    lines = table(floor)
    assert next(line for line in lines if line.startswith("generate")).endswith(f" {floor.generate:.3f}")
    assert next(line for line in lines if line.startswith("step")).endswith(f" {floor.total:.3f}")
    assert not any(line.startswith("reference") for line in lines)
