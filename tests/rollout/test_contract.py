"""The contract of contract.py against every engine: native here, vLLM where it and a GPU are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.types import RolloutEngine
from tests.rollout import contract
from tests.rollout.vllm import native_child, on_gpu
from tests.tiny import VOCABULARY

STOPS = tuple(range(5, VOCABULARY, 9))


def engine_of(kind: str, folder: Path) -> RolloutEngine:
    if kind == "native process":
        return native_child.start(folder, slots=32, stop_ids=STOPS)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32).eval()
    decode = AutoTokenizer.from_pretrained(folder).decode
    kinds = {"native": NativeEngine, "paged": PagedEngine}
    return kinds[kind](model, slots=32, stop_ids=frozenset(STOPS), decode=decode)


@pytest.fixture(scope="module", params=["native", "paged", "native process"])
def subject(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Iterator[contract.Subject]:
    def reference(seed: int) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa", dtype=torch.float32)
        if seed:
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        return model.eval()  # type: ignore[no-any-return]

    engine = engine_of(request.param, tiny_model_dir)
    made = contract.Subject(
        engine=engine,
        reference=reference(0),
        other=reference(1),
        stop_ids=frozenset(STOPS),
        decode=AutoTokenizer.from_pretrained(tiny_model_dir).decode,
        vocab=VOCABULARY,
        context=4096,
        tolerance=1e-4,
    )
    engine.load(contract.weights_of(made.reference), 0)
    yield made
    engine.close()


@pytest.mark.parametrize("name", contract.CHECKS)
def test_the_contract(subject: contract.Subject, name: str):
    contract.CHECKS[name](subject)


@pytest.fixture(scope="module", params=["in", "own"])
def vllm_subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[contract.Subject]:
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        pytest.skip("needs a CUDA device and vLLM")
    made = on_gpu.subject(tmp_path_factory.mktemp("vllm"), process=request.param)
    yield made
    made.engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", contract.CHECKS)
def test_the_contract_on_vllm(vllm_subject: contract.Subject, name: str):
    contract.CHECKS[name](vllm_subject)
