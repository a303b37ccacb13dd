"""Every arm of the step's benchmark does the same work: the same lengths, counted and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpu_rollout import lengths_of
from gpu_step import table
from step_work import FULL, WORKS, Size, floors_of
from trl_arms import ARMS, limit_generate, limit_requests, trainer_settings

from lockstep.rollout.native import NativeEngine
from lockstep.types import Request, Sampling
from tests.learner.models import plain, twin
from tests.rollout.engines import spelled

ROOT = Path(__file__).parents[2]


def test_log_normal_lengths_are_those_of_the_rollouts_benchmark() -> None:
    size = Size.of("lognormal")
    rows = lengths_of("lognormal")
    assert size.lengths == tuple(tokens for row in rows for tokens in row)
    assert (size.prompts, size.samples, size.longest, size.replies) == (64, 8, 1024, 512)
    assert max(size.lengths) == 1024
    assert 460 < sum(size.lengths) / 512 < 500
    assert Size.of("full").lengths == (512,) * 512
    assert Size.of("long").lengths == (1024,) * 512
    small = Size.of("lognormal", 100)
    assert max(small.lengths) == 100
    assert min(small.lengths) >= 1


def test_the_floor_counts_each_replys_own_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "num_hidden_layers": 28,
                "hidden_size": 1536,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "intermediate_size": 8960,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            }
        )
    )
    floors = {work: floors_of(work, str(tmp_path), Size.of(work))["step"] for work in WORKS}
    assert floors["full"] == pytest.approx(6.48, abs=0.01)
    assert floors["long"] == pytest.approx(12.57, abs=0.02)
    assert floors["lora"] == pytest.approx(5.01, abs=0.01)
    assert 6.0 < floors["lognormal"] < 9.0  # as many tokens as 477 each; the longest take more steps


def test_the_native_engine_is_given_a_length_for_each_request() -> None:
    class Limited(NativeEngine):
        """So that the engine's own class stays as it is."""

    limit_requests(Limited, [3, 1, 7, 5])
    engine = Limited(twin(plain("llama")), slots=4, stop_ids=frozenset(), decode=spelled)
    engine.load(iter(()), 0)
    for _ in range(2):  # every rollout
        asked = [Request(str(i), (5, 6), str(i // 2), i, Sampling(7, ignore_eos=True), 0) for i in range(4)]
        engine.submit(asked)
        assert {done.request.id: len(done.ids) for done in engine.completed()} == {"0": 3, "1": 1, "2": 7, "3": 5}


@dataclass
class Params:
    """As vLLM's SamplingParams."""

    max_tokens: int
    temperature: float = 0.5

    def clone(self) -> Params:
        return copy(self)


class Engine:
    """As vLLM's LLM, whose generate takes one SamplingParams or a list of them."""

    def generate(self, prompts: list[str], sampling_params: Any, use_tqdm: bool = True) -> list[tuple[str, int, float]]:
        assert not use_tqdm
        return [(p, s.max_tokens, s.temperature) for p, s in zip(prompts, sampling_params, strict=True)]


def test_vllm_is_given_sampling_parameters_for_each_prompt() -> None:
    engine, params = Engine(), Params(1024)
    limit_generate(engine, [3, 9])
    assert engine.generate(["a", "b"], sampling_params=params, use_tqdm=False) == [("a", 3, 0.5), ("b", 9, 0.5)]
    assert params.max_tokens == 1024
    with pytest.raises(ValueError, match="zip"):  # a call of another size is other work
        engine.generate(["a"], sampling_params=params, use_tqdm=False)


def test_tuned_arms_compute_in_bf16() -> None:
    tuned = trainer_settings("TRL tuned", cpu=False)
    assert tuned["bf16"] is True
    assert tuned["use_liger_kernel"] is True
    assert tuned["gradient_checkpointing"] is False
    assert tuned["model_init_kwargs"]["dtype"] == "float32"
    assert trainer_settings("TRL stock", cpu=False).keys().isdisjoint({"use_liger_kernel", "model_init_kwargs"})
    assert ARMS["TRL tuned"]["dtype"] == "float32"  # what is made of it changes nothing
    assert WORKS["lora"].left_out == "TRL tuned bf16"
    assert {WORKS[work].left_out for work in ("full", "long", "lognormal")} == {FULL}


def test_a_ratio_stands_only_between_equal_counts() -> None:
    def arm(seconds: float, trained: float) -> dict[str, Any]:
        row = {"step": seconds, "generated": 100.0, "trained": trained}
        return {"rows": [row], "peak": 1.0, "start": {"first step": 2.0}}

    results = {
        "Lockstep": arm(2, 100),
        "TRL stock": arm(5, 100),
        "TRL tuned": arm(4, 99),
        "TRL tuned bf16": {"failed": 1},
    }
    lines = table("full", results, {"step": 1.0, "generate": 0.4, "train": 0.6}, Size.of("full"))
    by_arm = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert by_arm["TRL stock"].endswith("| 20% | 2.50x as fast |")
    assert by_arm["TRL tuned"].endswith("| other work |")
    assert by_arm["TRL tuned bf16"] == "| TRL tuned bf16 | failed |"
    assert "Lockstep: first step 2.0; N = 1; tokens a step: 100 generated, 100 trained" in lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_sides_run_on_a_cpu_with_the_same_counts(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    arguments = ["--cpu", "--work", "lognormal", "--steps", "1", "--arms", "Lockstep", "TRL tuned", "--limit", "400"]
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu_step.py"), *arguments]
    command += ["--out", str(tmp_path / "step.json"), "--write", str(tmp_path / "step.txt")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, capture_output=True)
    found = json.loads((tmp_path / "step.json").read_text())["lognormal"]
    wanted = float(sum(Size.of("lognormal", cpu=True).lengths))
    for arm in ("Lockstep", "TRL tuned"):
        assert [(row["generated"], row["trained"]) for row in found[arm]["rows"]] == [(wanted, wanted)]
        assert found[arm]["rows"][0]["train"] > 0
        assert found[arm]["peak"] > 0
    assert "## lognormal" in (tmp_path / "step.txt").read_text()
