"""Which sizes a run is given, when it is refused and with which advice, and how the prediction is checked."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.build.memory import CHECKED_STEP, check_memory
from lockstep.config.load import load
from lockstep.device import GpuPeak
from lockstep.errors import ConfigError, DoesNotFitError
from lockstep.learner.offload import CHUNK
from lockstep.learner.packing import microbatches, pack
from lockstep.plan.choice import MemoryPlan, compared, even_share, memory_lines, plan_memory
from lockstep.plan.devices import require_devices
from lockstep.plan.floors import H200 as FLOOR_GPU
from lockstep.plan.memory import host_bytes, offloaded_host_bytes, vllm_bytes
from lockstep.plan.memory_inputs import GIB, OFFLOAD_CHUNK, memory_inputs_of
from lockstep.plan.preview import recipe_floor
from lockstep.plan.shapes import ModelShape
from lockstep.types import TrainSequence
from tests.plan.test_floors import LARGE, SMALL
from tests.plan.test_memory import GPU, H200


def plan(shape: ModelShape, *overrides: str, gib: float = H200 / GIB, device: str = "cuda") -> MemoryPlan:
    recipe = load([*GPU, *overrides])
    return plan_memory(recipe, shape, device, gib * GIB, prompt_tokens=256, passes=False)  # type: ignore[arg-type]


# --- choosing -------------------------------------------------------------------------------------------------------
def test_the_most_tokens_that_fit_without_recomputing() -> None:
    chosen = plan(SMALL)
    assert (chosen.sizes.recompute, chosen.sizes.tokens) == ("none", 46848)
    assert chosen.needs <= H200 < plan(SMALL, "update={recompute: none, tokens_per_microbatch: 65536}", gib=1e4).needs


def test_recomputing_comes_before_fewer_than_16384_tokens() -> None:
    assert plan(SMALL, gib=75).sizes.recompute == "none"
    assert plan(SMALL, gib=59).sizes.recompute == "selective"
    full = plan(SMALL, gib=38)
    assert (full.sizes.recompute, full.sizes.tokens) == ("full", 23552)
    small = plan(LARGE, "adapter.kind=lora", "rollout.slots=8", gib=22)
    assert small.sizes.recompute in ("selective", "full")
    assert small.sizes.tokens >= 8192


@given(st.integers(1, 20), st.integers(2, 8), st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_an_update_of_the_longest_replies_uses_up_its_even_share(
    prompts: int, samples: int, prompt: int, response: int, share: bool
) -> None:
    words = f"prompts_per_step={prompts}", f"samples_per_prompt={samples}", f"rollout.max_tokens={response}"
    recipe = load(
        ["task={kind: reasoning_gym}", "algorithm=rloo", *words, f"update.share_prompts={str(share).lower()}"]
    )
    inputs = memory_inputs_of(recipe, SMALL, "cuda", 1e12, prompt_tokens=prompt, passes=False)
    ids, zeros = (5,) * (response + 1), (0.0,) * (response + 1)  # the last token is not read
    groups = [group for group in range(prompts) for _ in range(samples)]
    rows = [TrainSequence((group,) * prompt, ids, (True,) * len(ids), zeros, zeros, 0.0, group) for group in groups]
    tokens = even_share(inputs, 1024)
    chunks = microbatches(rows, tokens, share_prompts=share)
    largest = max(pack(rows, chunk, share_prompts=share, device=torch.device("cpu")).tokens for chunk in chunks)
    assert largest == tokens <= 1024


def test_what_the_recipe_says_is_kept() -> None:
    chosen = plan(SMALL, "update={recompute: full, tokens_per_microbatch: 5000}")
    assert (chosen.sizes.recompute, chosen.sizes.tokens) == ("full", 5000)
    assert plan(SMALL, "update.recompute=selective").sizes.recompute == "selective"
    assert plan(SMALL, "update.tokens_per_microbatch=4000").sizes.tokens == 4000


def test_fewer_rows_when_only_their_cache_is_too_large() -> None:
    chosen = plan(LARGE, "adapter.kind=lora", "rollout={max_tokens: 8192, slots: 512}")
    assert chosen.fits
    assert chosen.sizes.slots < 512
    assert any("512 rows" in line and "rollout.slots" in line for line in memory_lines(chosen))


def auto(*overrides: str, gib: float = H200 / GIB, shape: ModelShape = SMALL, device: str = "cuda") -> MemoryPlan:
    recipe = load(["samples_per_prompt=8", "rollout.max_tokens=512", "task={kind: reasoning_gym}", *overrides])
    return plan_memory(recipe, shape, device, gib * GIB, prompt_tokens=256, passes=False)  # type: ignore[arg-type]


def test_auto_rows_are_all_samples_of_a_step() -> None:
    chosen = auto("prompts_per_step=64")
    assert chosen.sizes.slots == chosen.asked_slots == 512
    assert memory_lines(chosen)[0].endswith(", 512 rows in the engine")
    assert auto("prompts_per_step=2").sizes.slots == 64  # evaluations draw more than a small step
    assert auto("prompts_per_step=1000").sizes.slots == 1024
    assert auto("prompts_per_step=64", "rollout.slots=100").sizes.slots == 100


def test_auto_rows_are_fewer_where_their_cache_is_too_large() -> None:
    lora = ("adapter.kind=lora", "prompts_per_step=64", "rollout.max_tokens=8192")
    chosen = auto(*lora, gib=60, shape=LARGE)
    assert chosen.fits
    assert 1 < chosen.sizes.slots < 512 == chosen.asked_slots
    assert any("of 512 rows have no room" in line for line in memory_lines(chosen))


def test_auto_rows_elsewhere() -> None:
    """On a CPU they are 64; vLLM has all samples of a step, in the memory of keys and values that 64 long ones need."""
    assert auto("prompts_per_step=64", device="cpu").sizes.slots == 64
    vllm = auto("prompts_per_step=64", "rollout.engine=vllm", "samples_per_prompt=8", "rollout.max_tokens=512")
    assert vllm.sizes.slots == 512
    assert vllm.inputs.vllm_cache == min(64 * (512 + 8192) * 28672, 0.3 * vllm.available)
    fixed = auto("prompts_per_step=64", "rollout.engine=vllm", "rollout.max_tokens=512", "rollout.slots=128")
    assert fixed.inputs.vllm_cache == min(128 * (512 + 8192) * 28672, 0.3 * fixed.available)


def test_more_rows_of_vllm_need_more_memory_beside_keys_and_values() -> None:
    few, many = (auto("prompts_per_step=64", "rollout.engine=vllm", f"rollout.slots={n}").inputs for n in (64, 1024))
    assert vllm_bytes(few, 64) == 2.5 * GIB
    assert vllm_bytes(many, 1024) == 1.2 * GIB + 18 * 1024 * many.shape.vocab


def test_a_cpu_is_never_refused() -> None:
    chosen = plan(LARGE, gib=8, device="cpu")
    assert not chosen.fits
    assert (chosen.sizes.recompute, chosen.sizes.tokens) == ("none", 8192)
    assert "may fail" in memory_lines(chosen)[-1]
    assert "no reason to refuse" in memory_lines(plan(SMALL, gib=1e4, device="cpu"))[-1]


# --- refusing -------------------------------------------------------------------------------------------------------
def test_7b_with_fp32_masters_does_not_fit_one_h200() -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(LARGE)
    assert isinstance(raised.value, ConfigError)
    text = str(raised.value)
    needs, has, over = (float(x) for x in re.findall(r"([\d.]+) GiB", text)[:3])
    assert has == 139.8
    assert over == pytest.approx(needs - has, abs=0.11)
    # 18 bytes for each of 7.62e9 parameters are 127.7 GiB; the rest is activations, the head, margin and context.
    assert 127.7 * 1.05 < needs < 145
    assert "moments (56.7 GiB)" in text
    assert "optimizer.states=8bit (needs " in raised.value.fix
    assert "optimizer.offload=cpu (needs " in raised.value.fix
    assert "adapter.kind=lora (needs " in raised.value.fix


# --- offload --------------------------------------------------------------------------------------------------------
OFFLOAD = "optimizer.offload=cpu"


@pytest.mark.parametrize("gib", [80.0, 139.8])
def test_7b_in_full_fits_with_masters_and_moments_in_main_memory(gib: float) -> None:
    chosen = plan(LARGE, OFFLOAD, gib=gib)
    assert chosen.fits
    with pytest.raises(DoesNotFitError):
        plan(LARGE, gib=gib)


@pytest.mark.parametrize(
    ("words", "state", "buffered"),
    [
        ((), 12, 12 * CHUNK),
        (("optimizer.states=8bit",), 4 + 2 + 8 / 256, (6 + 8 / 256) * CHUNK),
        (("optimizer.kind=muon",), None, 8 * 18944 * 3584),  # its largest matrix is not cut
    ],
)
def test_the_gpu_has_two_buffers_for_what_main_memory_holds(
    words: tuple[str, ...], state: float | None, buffered: float
) -> None:
    assert CHUNK == OFFLOAD_CHUNK
    same = "update={recompute: full, tokens_per_microbatch: 8192}"
    here, there = plan(LARGE, same, *words, gib=1e4), plan(LARGE, same, *words, OFFLOAD, gib=1e4)
    for phase, other in zip(here.phases, there.phases, strict=True):
        less = sum(term.bytes for term in phase.terms if term.name in ("fp32 masters", "moments"))
        more = 2 * buffered if phase.name == "optimizer" else 0.0
        work = sum(t.bytes for t in phase.terms if t.name == "moments at work")
        work -= sum(t.bytes for t in other.terms if t.name == "moments at work")
        assert other.bytes == pytest.approx(phase.bytes - less + more - work)
    state = state or 4 + here.inputs.state_bytes
    assert offloaded_host_bytes(there.inputs) == pytest.approx(state * LARGE.parameters)
    assert host_bytes(there.inputs) == pytest.approx((state + 2) * LARGE.parameters)  # beside it a checkpoint's weights
    assert offloaded_host_bytes(here.inputs) == 0


def test_main_memory_without_room_is_a_refusal_with_both_figures() -> None:
    recipe = load([*GPU, OFFLOAD])

    def planned(host: float | None) -> MemoryPlan:
        return plan_memory(recipe, LARGE, "cuda", H200, prompt_tokens=256, passes=False, host=host)

    needed = host_bytes(planned(None).inputs)
    assert planned(needed).fits
    assert "99.3 GiB while it writes a checkpoint, 85.1 of them always" in " ".join(memory_lines(planned(needed)))
    with pytest.raises(DoesNotFitError, match=r"need 99\.3 GiB of main memory, but only 90\.0 GiB are free") as raised:
        planned(90 * GIB)
    assert "optimizer.states=8bit (needs " in raised.value.fix
    assert "optimizer.offload=none and adapter.kind=lora" not in raised.value.fix  # one change is enough
    with pytest.raises(DoesNotFitError, match="main memory") as raised:
        planned(8 * GIB)
    assert "optimizer.offload=none and adapter.kind=lora (needs " in raised.value.fix


def test_a_step_takes_at_least_the_transfer() -> None:
    """12 bytes a parameter each way, at once, over 55 GB/s."""
    for words, size in (((), 12), (("optimizer.states=8bit",), 6 + 8 / 256)):
        recipe = load([*GPU, *words, OFFLOAD])
        floor = recipe_floor(recipe, LARGE, FLOOR_GPU, old=False, reference=False)
        assert floor.optimizer == pytest.approx(size * LARGE.parameters / 55e9)
    without = recipe_floor(load(GPU), LARGE, FLOOR_GPU, old=False, reference=False)
    assert without.optimizer == pytest.approx(30 * LARGE.parameters / 4.3e12)


def test_a_machine_without_a_gpu_is_told_before_anything_is_loaded() -> None:
    if torch.cuda.is_available():
        require_devices(load([*GPU, OFFLOAD]))
        return
    with pytest.raises(ConfigError, match="torch finds no GPU on this machine"):
        require_devices(load([*GPU, OFFLOAD]))


def test_the_advice_fits() -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(LARGE)
    for setting, then in re.findall(r"(\S+) \(needs ([\d.]+) GiB\)", raised.value.fix):
        changed = plan(LARGE, setting)
        assert changed.fits
        assert changed.needs / GIB == pytest.approx(float(then), abs=0.06)


def test_several_changes_together_when_one_is_not_enough() -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(LARGE, "sync.transport=copy", gib=24)
    assert raised.value.fix.startswith("set sync.transport=shared and adapter.kind=lora (needs ")


def test_a_micro_batch_that_is_too_large_is_named() -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(SMALL, "update={recompute: none, tokens_per_microbatch: 100000}")
    assert "update.tokens_per_microbatch=8192 (needs " in raised.value.fix
    assert "update.recompute=auto (needs " in raised.value.fix


def test_nothing_helps_a_model_that_is_much_too_large() -> None:
    with pytest.raises(DoesNotFitError, match="a smaller model"):
        plan(LARGE, gib=8)


# --- printing and checking ------------------------------------------------------------------------------------------
def test_the_table_names_the_largest_part_of_each_phase() -> None:
    chosen = plan(SMALL)
    lines = memory_lines(chosen)
    assert lines[0] == "micro-batches of up to 46848 tokens, recompute none, 512 rows in the engine"
    train = next(line for line in lines if line.startswith("train "))
    assert re.search(rf"{chosen.peak.bytes / GIB:.2f}\s+activations of 46848 tokens", train)
    assert lines[-2].endswith(f"= {chosen.needs / GIB:.1f} of 139.8 GiB")
    # fp32 masters and moments of 1.54e9 parameters, twelve bytes each, go through the host as one file
    assert lines[-1] == "the host needs 17.3 GiB while it writes a checkpoint"


def test_a_prediction_that_is_off_is_a_warning() -> None:
    chosen = plan(SMALL)
    predicted = chosen.peak.bytes
    right, warning = compared(chosen, predicted * 1.09)
    assert right["memory/predicted_gib"] == predicted / GIB
    assert right["memory/plan_error"] == pytest.approx(0.09)
    assert warning == ""
    assert "+12%" in compared(chosen, predicted * 1.12)[1]
    assert "-30%" in compared(chosen, predicted * 0.70)[1]


def test_torch_counts_the_keys_and_values_of_a_sleeping_vllm() -> None:
    """Read on an H200 with a model of this size: 89.1 GiB by torch's count, 14.9 of them keys and values that were freed."""
    vllm = "rollout={engine: vllm, max_tokens: 512, slots: 64}"
    chosen = plan(SMALL, vllm)
    train = next(phase.bytes for phase in chosen.phases if phase.name == "train")
    metrics, warning = compared(chosen, train + chosen.inputs.vllm_cache)
    assert chosen.inputs.vllm_cache == 64 * (512 + 8192) * 28672
    assert metrics["memory/plan_error"] == pytest.approx(0.0, abs=0.01)
    assert warning == ""
    counted = GpuPeak(int(train + chosen.inputs.vllm_cache), int(H200), int(H200))
    assert check_memory(chosen, counted, 1)[0]["memory/gpu_share"] == pytest.approx(train / H200)
    awake = plan(SMALL, vllm, "rollout.vllm.sleep=false")
    assert compared(awake, awake.peak.bytes)[0]["memory/plan_error"] == 0.0


def test_a_vllm_of_its_own_process_is_not_compared() -> None:
    own = plan(SMALL, "rollout={engine: vllm, max_tokens: 512, vllm: {process: own}}")
    assert "memory/plan_error" not in check_memory(own, GpuPeak(2**30, 2**30, 2**33), CHECKED_STEP)[0]


def test_the_peak_of_a_gpu_is_compared_with_the_plan_after_some_steps() -> None:
    chosen = plan(SMALL)
    peak = GpuPeak(int(chosen.peak.bytes * 1.2), int(chosen.peak.bytes * 1.3), int(H200))
    assert check_memory(chosen, None, CHECKED_STEP) == ({}, "")  # a CPU
    early, nothing = check_memory(chosen, peak, CHECKED_STEP - 1)
    assert (early["memory/gpu_gib"], early["memory/gpu_reserved_gib"]) == (peak.used / GIB, peak.kept / GIB)
    assert "memory/plan_error" not in early
    assert nothing == ""
    metrics, warning = check_memory(chosen, peak, CHECKED_STEP)
    assert metrics["memory/plan_error"] == pytest.approx(0.2)
    assert "+20%" in warning
    assert check_memory(chosen, peak, CHECKED_STEP + 1) == (metrics, "")  # said once
    assert check_memory(None, peak, CHECKED_STEP) == (early, "")  # a model without a plan
