"""Predicted phases against peaks that were measured on a GPU, and against sums that are written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen2Config

from lockstep.config.load import load
from lockstep.errors import DoesNotFitError
from lockstep.plan import memory, memory_inputs
from lockstep.plan.activations import STREAM, Layers, Recompute, per_token
from lockstep.plan.choice import plan_memory
from lockstep.plan.memory import Sizes, Term, cache_bytes, pass_tokens, peak, phases, stream_tokens
from lockstep.plan.memory_inputs import GIB, MemoryInputs, memory_inputs_of
from lockstep.plan.shapes import ModelShape
from tests.plan.test_floors import LARGE, SMALL, _qwen

H200 = 139.8 * GIB
GPU = (
    "prompts_per_step=64",
    "samples_per_prompt=8",
    "rollout={max_tokens: 512, slots: 512}",
    "task={kind: reasoning_gym}",
)


def inputs(shape: ModelShape, *overrides: str, prompt: int = 256, passes: bool = False) -> MemoryInputs:
    return memory_inputs_of(load([*GPU, *overrides]), shape, "cuda", H200, prompt_tokens=prompt, passes=passes)


def terms(inputs: MemoryInputs, phase: str, sizes: Sizes = Sizes(16384, "none", 512)) -> dict[str, float]:  # noqa: B008
    return {term.name: term.bytes for found in phases(inputs, sizes) if found.name == phase for term in found.terms}


# --- against a GPU --------------------------------------------------------------------------------------------------
HALF = _qwen(
    num_hidden_layers=24,
    hidden_size=896,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    tie_word_embeddings=True,
)
MEASURED: list[tuple[ModelShape, str, Recompute, int, float, float]] = [
    (HALF, "none", "none", 8192, 18.18, 8.53),
    (HALF, "lora", "none", 8192, 10.74, 3.23),
    (HALF, "none", "full", 8192, 11.23, 8.53),
    (HALF, "lora", "full", 8192, 3.64, 3.23),
    (SMALL, "none", "none", 8192, 44.19, 22.24),
    (SMALL, "lora", "none", 8192, 21.27, 5.50),
    (SMALL, "none", "selective", 8192, 39.15, 22.25),
    (SMALL, "lora", "selective", 8192, 16.15, 5.49),
    (SMALL, "none", "full", 8192, 29.52, 22.22),
    (SMALL, "lora", "full", 8192, 6.34, 5.49),
    (SMALL, "none", "none", 16384, 59.93, 22.26),
    (SMALL, "none", "none", 32768, 91.74, 22.31),
    (SMALL, "lora", "none", 16384, 37.06, 5.51),
    (SMALL, "lora", "none", 32768, 68.83, 5.57),
]
"""Of benchmarks/gpu_memory.py on an H200: shape, adapter, recompute, budget; GiB of an update and of a pass without gradient."""


@pytest.mark.parametrize(("shape", "adapter", "recompute", "budget", "update", "scoring"), MEASURED)
def test_peaks_that_were_measured_on_an_h200(
    shape: ModelShape, adapter: str, recompute: Recompute, budget: int, update: float, scoring: float
) -> None:
    lora = ("adapter={kind: lora, rank: 32}",) if adapter == "lora" else ()
    groups = max(4, -(-5 * budget // (2 * (256 + 8 * 512))))
    planned = inputs(shape, f"prompts_per_step={groups}", "model.dtype=bf16", *lora, passes=True)
    found = {phase.name: phase.bytes / GIB for phase in phases(planned, Sizes(budget, recompute, 1))}
    assert max(found["train"], found["optimizer"]) == pytest.approx(update, rel=0.015)
    assert found["log-probabilities"] == pytest.approx(scoring, rel=0.015)


# --- by hand --------------------------------------------------------------------------------------------------------
def test_the_scores_of_a_gpu_by_hand() -> None:
    """Of caps three tensors a layer, two in fp32 and one in bf16, [64 heads, tokens, 768 keys]; and a model that they alone keep
    off a GPU is refused. Of sinks none, but in fp32.
    """
    shape = replace(SMALL, heads=64, layers=24, softcap=True)
    alone, kept = "update.share_prompts=false", "attention scores of 16384 tokens"
    assert terms(inputs(shape, alone), "train")[kept] == 24 * 64 * 16384 * 768 * (4 + 4 + 2)
    assert kept not in terms(inputs(SMALL), "train")
    gpt_oss = replace(shape, softcap=False, sinks=True, window=128, windowed=12, head_dim=64)
    assert kept not in terms(inputs(gpt_oss, alone), "train")
    assert terms(inputs(gpt_oss, alone, "model.dtype=fp32"), "train")[kept] == 24 * 64 * 16384 * 768 * 4
    assert inputs(replace(gpt_oss, head_dim=320)).scores.layers == 24, "the kernels have no heads of that size"
    assert inputs(replace(gpt_oss, cached=5000)).scores.layers == 24, "nor values of another size than keys"
    wide = replace(shape, softcap=False, window=1024, windowed=12)
    assert inputs(wide, "model.dtype=fp32").scores.layers == 0, (
        "windows wider than the sequences are none to the kernels"
    )
    assert inputs(replace(wide, window=512), "model.dtype=fp32").scores.layers == 12
    many = load([*GPU, "rollout.max_tokens=8192", "update={recompute: none, share_prompts: false}"])
    plain = plan_memory(many, replace(shape, softcap=False, sinks=True), "cuda", H200, prompt_tokens=256, passes=False)
    assert plain.fits
    with pytest.raises(DoesNotFitError, match="attention scores of"):
        plan_memory(many, shape, "cuda", H200, prompt_tokens=256, passes=False)


def test_the_copied_keys_of_windowed_layers_by_hand() -> None:
    """A prompt of 256 with 8 replies of 512: in a window of 128 each reply has 127 of the prompt's keys. Gradients of keys and
    values are made for each of 12 query heads first.
    """
    plain = replace(SMALL, vocab=256)  # the head needs less than a layer
    shape = replace(plain, window=128, windowed=14)
    keys = 16384 + 16384 / (256 + 8 * 512) * 8 * 127
    assert inputs(shape).own_keys(16384) == pytest.approx(keys)
    assert inputs(replace(shape, window=600)).own_keys(16384) == pytest.approx(
        16384 + 16384 / (256 + 8 * 512) * 8 * 256
    )
    for phase, term, a_key in (
        ("train", "head and layer at work", 2 * (4 * 256 + 2 * 1536)),
        ("log-probabilities", "forward pass of 16384 tokens", 2 * 2 * 256),
    ):
        ours, without = (terms(inputs(one, passes=True), phase)[term] for one in (shape, plain))
        assert ours - without == pytest.approx(keys * a_key)
    multi_head = terms(inputs(replace(shape, kv_heads=12)), "train")["head and layer at work"]
    without = terms(inputs(replace(plain, kv_heads=12)), "train")["head and layer at work"]
    assert multi_head - without == pytest.approx(keys * 2 * 4 * 1536)
    assert inputs(shape, "update.share_prompts=false").own_keys(16384) == 0
    assert inputs(replace(shape, window=768)).own_keys(16384) == 0, "no sequence is longer"
    assert inputs(plain).own_keys(16384) == inputs(shape, "model.dtype=fp32").own_keys(16384) == 0


def test_what_full_training_holds() -> None:
    parameters = 1_543_714_304
    found = terms(inputs(SMALL), "optimizer")
    assert found["weights"] == 2 * parameters
    assert found["fp32 masters"] == 4 * parameters
    assert found["moments"] == 8 * parameters
    assert found["gradient sums"] == 4 * parameters
    assert found["engine's buffers"] == 2 * 512 * 151936
    eight = terms(inputs(SMALL, "optimizer.states=8bit"), "optimizer")
    assert eight["moments"] == pytest.approx(2.03125 * parameters)
    assert "moments" not in terms(inputs(SMALL), "load")


def test_fp32_weights_are_their_own_masters() -> None:
    found = terms(inputs(SMALL, "model.dtype=fp32"), "load")
    assert found["weights"] == 4 * SMALL.parameters
    assert "fp32 masters" not in found


def test_what_adapters_hold() -> None:
    added = 28 * 32 * (4 * 1536 + 2 * (1536 + 256) + 3 * (1536 + 8960))
    found = terms(inputs(SMALL, "adapter={kind: lora, rank: 32}"), "optimizer")
    assert found["weights"] == 2 * (SMALL.parameters + added)
    assert (found["fp32 masters"], found["moments"], found["gradient sums"]) == (4 * added, 8 * added, 4 * added)


def test_copies_of_the_weights() -> None:
    kl = "algorithm.kl={coef: 0.1}"
    assert terms(inputs(SMALL, kl), "generate")["reference model"] == 2 * SMALL.parameters
    assert "reference model" not in terms(inputs(SMALL, kl, "adapter.kind=lora"), "generate")
    assert terms(inputs(SMALL, "sync.transport=copy"), "generate")["engine's weights"] == 2 * SMALL.parameters


def test_a_critic_of_its_own() -> None:
    ppo = ("algorithm={kind: ppo}",)
    decoder = LARGE.parameters - LARGE.head  # untied: the head is the policy's alone
    found = terms(inputs(LARGE, *ppo), "generate")
    assert found["critic"] == (2 + 4) * decoder
    assert found["critic's moments"] == 8 * decoder
    assert terms(inputs(LARGE, *ppo), "critic")["gradient sums"] == 4 * decoder
    shared = terms(inputs(LARGE, "algorithm={kind: ppo, critic: {backbone: shared}}"), "generate")
    assert "critic" not in shared


def test_keys_and_values_of_the_native_engine() -> None:
    # 512 samples of 8 pages each and one for the prompt's rest, 64 prompts of 4 pages; a page is 64 tokens.
    assert cache_bytes(inputs(SMALL), 512) == (512 * 9 + 64 * 4) * 64 * 28672
    assert cache_bytes(inputs(SMALL), 8) == (8 * 9 + 4) * 64 * 28672
    assert cache_bytes(replace(inputs(SMALL), device="cpu"), 8) == 8 * (256 + 512) * 28672


def test_keys_and_values_of_vllm() -> None:
    vllm = "rollout={engine: vllm, max_tokens: 512, slots: 16}"
    assert cache_bytes(inputs(SMALL, vllm), 16) == 16 * (512 + 8192) * 28672
    assert cache_bytes(inputs(SMALL, vllm, "rollout.slots=512"), 512) == int(0.3 * H200)  # gpu_memory_utilization
    fixed = inputs(SMALL, vllm, "rollout.vllm={kv_cache_gib: 20, sleep: false}")
    assert terms(fixed, "train")["keys and values"] == 20 * GIB
    assert "keys and values" not in terms(inputs(SMALL, vllm), "train")


def test_activations_and_head_of_the_backward_pass() -> None:
    found = terms(inputs(SMALL), "train")
    kept = per_token(SMALL, Layers(2, fused=True), "none").kept
    assert found["activations of 16384 tokens"] == 16384 * kept
    # gate, up and product; queries, output, keys and values; two norms' inputs and outputs; factors of heads and norms
    layer = 2 * (3 * 8960 + 2 * 1536 + 2 * 256 + 4 * 1536) + 4 * 12 + 2 * 4
    assert kept == 28 * layer + 2 * 1536 + 4 + 2 * 2 * 128
    # one tile of logits, the head's gradient in fp32, hidden states and their gradient of the tokens with loss
    rows = 16384 * (512 * 512) / (512 * 512 + 64 * 256)
    assert found["head and layer at work"] == 2**31 + 4 * SMALL.head + 2 * 2 * rows * 1536
    assert found["gradient sums"] == 4 * SMALL.parameters


def test_one_micro_batch_frees_activations_before_sums_are_there() -> None:
    few = inputs(SMALL, "prompts_per_step=1", "samples_per_prompt=8")
    assert stream_tokens(few, 16384) == few.update_tokens == 8 * 512 + 256
    found = terms(few, "train")
    assert found["gradient sums"] == 0  # 12 GiB of activations go first, 6 GiB of sums come
    assert found["activations of 4352 tokens"] > 4 * SMALL.parameters


def test_passes_before_the_update_have_their_own_phase() -> None:
    names = [phase.name for phase in phases(inputs(SMALL, passes=True), Sizes(16384, "none", 512))]
    assert names == ["load", "generate", "log-probabilities", "train", "optimizer", "sync and proof", "save"]
    assert "log-probabilities" not in [phase.name for phase in phases(inputs(SMALL), Sizes(16384, "none", 512))]


def test_a_pass_is_at_its_worst_in_the_head_or_in_a_layer() -> None:
    found = terms(inputs(SMALL, passes=True), "log-probabilities")
    rows = 16384 * 512 * 8 / (512 * 8 + 256)
    assert found["logits"] == 2**31
    assert found["states with loss"] == pytest.approx(rows * (2 * 1536 + 3 * 4) + 16384 * STREAM)
    assert "forward pass of 16384 tokens" not in found
    long = terms(inputs(SMALL, passes=True), "log-probabilities", Sizes(65536, "none", 512))
    # embeddings, what the layer adds to, its input and the norm's output; gate, up, product; sines and cosines; the stream
    assert long["forward pass of 65536 tokens"] == 65536 * (2 * (4 * 1536 + 3 * 8960) + 2 * 2 * 128 + STREAM)
    assert "logits" not in long


def test_passes_see_all_samples_of_a_step_at_once() -> None:
    """Updates of one prompt's 8 samples, 64 prompts a step: the passes before them fill the whole budget."""
    several = inputs(SMALL, "update.samples_per_update=8", passes=True)
    assert stream_tokens(several, 65536) == 8 * 512 + 256
    assert pass_tokens(several, 65536) == 65536
    assert "forward pass of 65536 tokens" in terms(several, "log-probabilities", Sizes(65536, "full", 512))


def test_prompts_and_first_tokens_of_the_native_engine() -> None:
    def beside(planned: MemoryInputs, slots: int) -> float:
        return terms(planned, "generate", Sizes(16384, "none", slots))["prompts and sampling"]

    forward, logits = per_token(SMALL, Layers(2, fused=True), "none").forward, 2 * 151936
    # 64 prompts of 256 tokens are one stream; the logits behind each are kept
    assert beside(inputs(SMALL), 512) == 16384 * forward + 64 * logits
    assert beside(inputs(SMALL), 16) == 2 * 256 * forward + 2 * logits  # two prompts at a time
    # of short prompts the first tokens' logits are more: a row for each sample
    short = inputs(SMALL, prompt=2)
    assert beside(short, 512) == 64 * logits + 512 * logits > 64 * logits + 128 * forward


def test_the_largest_phase_and_part_are_named() -> None:
    worst = peak(phases(inputs(SMALL), Sizes(32768, "none", 512)))
    assert worst.name == "train"
    assert worst.largest == max(worst.terms, key=lambda term: term.bytes)
    assert worst.largest.name == "activations of 32768 tokens"
    assert worst.bytes == sum(term.bytes for term in worst.terms)
    assert isinstance(worst.largest, Term)


@pytest.mark.parametrize("context", [32768, 4096])
@pytest.mark.parametrize("more", [(), ("rollout.slots=128",), ("rollout.vllm={gpu_memory_utilization: 0.05}",)])
def test_vllm_takes_the_keys_and_values_that_are_planned(more: tuple[str, ...], context: int) -> None:
    from lockstep.rollout.vllm.settings import settings_of
    from tests.rollout.vllm.test_settings import QWEN

    given = ["rollout={engine: vllm, max_tokens: 512}", "samples_per_prompt=8", "prompts_per_step=64", *more]
    config = Qwen2Config(**QWEN.to_dict() | {"max_position_embeddings": context})
    made = settings_of(load([*GPU, *given]), "/m", config, dtype="bfloat16", stop_ids=frozenset(), gpu_bytes=int(H200))
    assert cache_bytes(inputs(replace(SMALL, context=context), *given), 512) == made.kv_cache_bytes


def test_the_code_has_the_sizes_that_the_plan_assumes() -> None:
    from lockstep.learner import adamw8bit
    from lockstep.models import heads
    from lockstep.rollout.paged import prefill, state

    assert heads.TILES["cpu"][0] * heads.TILES["cpu"][1] == memory.CPU_TILE
    assert memory.PAGE == state.PAGE
    assert memory.PREFILL_TOKENS == prefill.PREFILL_TOKENS
    assert memory_inputs.STATE_CHUNK == adamw8bit.CHUNK
    assert memory_inputs.STATE_BYTES["8bit"] == 2 + 2 * 4 / adamw8bit.BLOCK
    head_kernels = pytest.importorskip("lockstep.models.head_kernels")
    assert memory.LOGITS_BYTES == head_kernels.TILE_BYTES
