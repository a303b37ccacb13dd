"""What vLLM is started with, and the environment that it is started in."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from lockstep.config.load import load_mapping
from lockstep.config.vllm import Vllm, longest_of
from lockstep.errors import ConfigError, EngineError
from lockstep.rollout.vllm.engine import VllmEngine, captured, engine_arguments
from lockstep.rollout.vllm.environment import prepare
from lockstep.rollout.vllm.settings import VllmSettings, bytes_per_token, settings_of

GIB = 2**30
QWEN = Qwen2Config(
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
)


def made(rollout: dict[str, object], **more: object) -> VllmSettings:
    recipe = load_mapping({"rollout": {"engine": "vllm", **rollout}, **more})
    return settings_of(recipe, "/m", QWEN, dtype="bfloat16", stop_ids=frozenset((9, 3)), gpu_bytes=100 * GIB)


def test_a_token_of_the_qwen_shape():
    assert bytes_per_token(QWEN, 2) == 2 * 28 * 2 * 128 * 2 == 28672


def test_head_sizes_that_are_given_count():
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32)
    assert bytes_per_token(config, 4) == 2 * 3 * 4 * 32 * 4


def test_the_defaults():
    found = made({"slots": 64, "max_tokens": 100})
    assert found == VllmSettings(
        folder="/m",
        dtype="bfloat16",
        slots=64,
        max_model_len=8292,
        kv_cache_bytes=64 * 8292 * 28672,
        stop_ids=(3, 9),
        seeded=True,
        enforce_eager=False,
        sleep=True,
        trust_remote_code=False,
    )


def test_the_cache_stays_within_its_share():
    assert made({"slots": 512}).kv_cache_bytes == 30 * GIB
    assert made({"slots": 512, "vllm": {"gpu_memory_utilization": 0.1}}).kv_cache_bytes == 10 * GIB
    assert made({"slots": 512, "vllm": {"kv_cache_gib": 2.5}}).kv_cache_bytes == int(2.5 * GIB)


def test_lengths():
    assert made({"vllm": {"max_model_len": 700}}).max_model_len == 700
    assert made({"max_tokens": 64}, eval={"max_tokens": 1000}).max_model_len == 9192
    assert longest_of(Vllm(), 30000, 32768) == 32768
    assert longest_of(Vllm(), 30000, None) == 38192


def test_slots_are_numbers_that_vllm_captures():
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]  # VllmConfig._set_cudagraph_sizes
    for slots in range(1, 1025):
        assert captured(slots) == next(size for size in grid if size >= slots)


def test_the_arguments_name_our_worker_and_the_logprobs_of_what_was_sampled_from():
    given = engine_arguments(made({"slots": 100}))
    assert given["worker_cls"] == "lockstep.rollout.vllm.worker.LockstepWorker"
    assert given["logprobs_mode"] == "processed_logprobs"
    assert given["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert (given["max_num_seqs"], given["max_cudagraph_capture_size"]) == (104, 104)
    assert given["load_format"] == "dummy"
    eager = engine_arguments(made({"vllm": {"enforce_eager": True, "sleep": False}}))
    assert (eager["enforce_eager"], eager["enable_sleep_mode"]) == (True, False)
    assert eager["max_cudagraph_capture_size"] is None


# --- recipes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"device": "cpu", "rollout": {"engine": "vllm"}}, "needs a GPU"),
        ({"rollout": {"engine": "native", "vllm": {"process": "own"}}}, "would have no effect"),
        ({"rollout": {"engine": "vllm", "vllm": {"transport": "ipc"}}}, "needs process=own"),
        ({"rollout": {"engine": "vllm", "vllm": {"process": "own", "transport": "view"}}}, "needs process=in"),
        ({"rollout": {"engine": "vllm", "vllm": {"transport": "view"}}, "adapter": {"kind": "lora"}}, "adapter"),
        ({"rollout": {"engine": "vllm"}, "adapter": {"kind": "peft", "method": "ia3"}}, "not adapter.method=ia3"),
        (
            {"rollout": {"engine": "vllm", "max_tokens": 64, "vllm": {"max_model_len": 64}}},
            "leaves no room for a prompt",
        ),
        ({"rollout": {"engine": "vllm", "temperature": 2.5}}, "temperature 2.5"),
        ({"rollout": {"engine": "vllm"}, "eval": {"modes": [{"name": "hot", "temperature": 3}]}}, "temperature 3"),
    ],
)
def test_contradictions_are_refused(recipe: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        load_mapping(recipe)


@pytest.mark.parametrize(
    ("vllm", "adapter", "transport"),
    [
        ({}, "none", "view"),
        ({}, "lora", "copy"),
        ({"process": "own"}, "none", "ipc"),
        ({"process": "own"}, "lora", "ipc"),
        ({"process": "own", "transport": "copy"}, "none", "copy"),
        ({"transport": "copy"}, "none", "copy"),
    ],
)
def test_the_transport_in_force(vllm: dict[str, object], adapter: str, transport: str):
    recipe = load_mapping({"rollout": {"engine": "vllm", "vllm": vllm}, "adapter": {"kind": adapter}})
    assert recipe.weight_transport == transport
    assert load_mapping({"adapter": {"kind": adapter}}).weight_transport == "shared"


# --- environment ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_taken_out_under_both_names(name: str):
    environment = {name: "max_split_size_mb:64, expandable_segments:True"}
    assert prepare(environment, cuda_started=False) == [f"{name}: expandable_segments:True"]
    assert environment[name] == "max_split_size_mb:64"
    environment = {name: "expandable_segments:true"}
    prepare(environment, cuda_started=False)
    assert name not in environment


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_that_are_in_force_are_refused_with_the_reason(name: str):
    with pytest.raises(EngineError, match="this process already uses it") as caught:
        prepare({name: "expandable_segments:True"}, cuda_started=True)
    assert name in caught.value.fix
    assert prepare({name: "max_split_size_mb:64"}, cuda_started=True) == []
    assert prepare({name: "expandable_segments:False"}, cuda_started=True) == [f"{name}: expandable_segments:False"]


def test_the_users_own_settings_of_vllm_stay():
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    prepare(environment, cuda_started=False)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine is stepped by hand"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_a_model_on_a_cpu_is_refused():
    from transformers import LlamaForCausalLM

    from lockstep.rollout.vllm.build import vllm_engine

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    for process in ("in", "own"):
        recipe = load_mapping({"rollout": {"engine": "vllm", "vllm": {"process": process}}})
        with pytest.raises(EngineError, match="needs a CUDA GPU"):
            vllm_engine(recipe, model, "/m", frozenset(), str)


def test_without_a_gpu_the_error_names_the_native_engine():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match="needs a CUDA GPU") as caught:
        VllmEngine(made({}), str)
    assert "rollout.engine=native" in caught.value.fix


def test_an_engine_that_finds_no_room_for_its_keys_and_values_says_what_to_lower(monkeypatch: pytest.MonkeyPatch):
    def full() -> None:
        raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163")

    monkeypatch.setattr(VllmEngine, "_on_stream", nullcontext)
    engine = object.__new__(VllmEngine)
    engine._settings, engine._asleep = made({"vllm": {"kv_cache_gib": 2.5}}), True
    engine._engine = SimpleNamespace(wake_up=full)
    with pytest.raises(EngineError, match=r"its 2\.5 GiB of keys and values again: RuntimeError: CUDA Error") as caught:
        engine.wake()
    assert "lower rollout.vllm.kv_cache_gib" in caught.value.fix
    assert engine._asleep

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine._engine = SimpleNamespace(wake_up=broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):  # no memory setting mends that
        engine.wake()


def test_numerics_reach_the_engine():
    settings = made({}, numerics={"train": "mxfp4-w4a4", "eval": "bf16", "scale": "rceil", "exclude": ["down_proj"]})
    assert (settings.numerics, settings.scale, settings.exclude) == (("mxfp4-w4a4",), "rceil", ("down_proj",))
    assert made({}).numerics == ()
    assert engine_arguments(made({}))["quantization"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"numerics": {"rollout": "mxfp4-w4a4"}, "adapter": {"kind": "lora"}}, "the quantised sum differs"),
        ({"numerics": {"train": "mxfp4-w4a4", "eval": "nvfp4-w4a4"}}, "quantise inputs in one format"),
    ],
)
def test_numerics_that_vllm_cannot_have_are_refused(more: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        made({}, **more)
