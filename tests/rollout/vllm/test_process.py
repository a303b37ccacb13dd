"""An engine in its own process, with a native engine behind the channel: sampling itself is tested by the contract."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.config.schema import Sync
from lockstep.errors import EngineError, StaleWeightsError, SyncError
from lockstep.models.attention import NAME
from lockstep.models.weights import named_weights
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.vllm import bucket
from lockstep.rollout.vllm.process import EngineProcess
from lockstep.sync.fingerprint import fingerprint
from lockstep.sync.proof import Remote
from lockstep.sync.transports import CopySync, build_sync
from lockstep.types import Forward, NormNoise, Sampling
from tests.learner.models import ByHand
from tests.rollout.engines import finish, request
from tests.rollout.vllm import native_child
from tests.tiny import VOCABULARY

PROMPT = (40, 50, 60, 70)


def model_of(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def shared_engine(tiny_model_dir: Path) -> Iterator[EngineProcess]:
    engine = native_child.start(tiny_model_dir)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: EngineProcess, tiny_model_dir: Path) -> EngineProcess:
    """With the folder's weights as version 0."""
    shared_engine.load(named_weights(model_of(tiny_model_dir)), 0)
    return shared_engine


def copying(**settings: int) -> CopySync:
    sync = build_sync(Sync.model_validate({"transport": "copy", **settings}), vocab=VOCABULARY, numerics="fp32")
    assert isinstance(sync, CopySync)
    return sync


# --- weights and proof ----------------------------------------------------------------------------------------------
def test_fingerprints_are_computed_over_there(engine: EngineProcess, tiny_model_dir: Path):
    assert isinstance(engine, Remote)
    assert engine.fingerprints() == fingerprint(named_weights(model_of(tiny_model_dir)))


def test_a_push_is_proven_and_a_falsified_one_is_noticed(engine: EngineProcess, tiny_model_dir: Path):
    learner = ByHand(model_of(tiny_model_dir))
    sync = copying()
    first = sync.push(learner, engine)
    assert (first.passed, first.changed, first.version) == (True, -1, 0)
    assert first.probe is not None
    assert first.probe.mean < 1e-5
    name = sync.negative_control(learner, engine)
    assert name in first_names(learner)
    with torch.no_grad():
        dict(learner.model.named_parameters())[name].mul_(1.5)
    learner.version = 1
    second = sync.push(learner, engine)
    assert (second.passed, second.changed, engine.version) == (True, 1, 1)
    assert second.fingerprint == fingerprint(learner.weights()).combined


def test_shared_memory_that_cannot_be_mapped_is_not_left_behind(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket, "SHARED_MEMORY", tmp_path)
    engine = native_child.start(tiny_model_dir)
    resource.prlimit(engine._process.pid, resource.RLIMIT_NOFILE, (3, 1000))  # it can open nothing
    with pytest.raises(EngineError, match="cannot map the memory"):
        engine.load(named_weights(model_of(tiny_model_dir)), 0)
    assert list(tmp_path.iterdir()) == []
    resource.prlimit(engine._process.pid, resource.RLIMIT_NOFILE, (1000, 1000))
    engine.load(named_weights(model_of(tiny_model_dir)), 0)
    engine.close()


def first_names(learner: ByHand) -> list[str]:
    return [name for name, _ in learner.weights()]


def test_a_tensor_that_differs_over_there_is_looked_at(engine: EngineProcess, tiny_model_dir: Path):
    """The engine gets two rows of one tensor exchanged, behind the proof's back."""
    learner = ByHand(model_of(tiny_model_dir))
    sync = copying()
    sync.push(learner, engine)
    name = "model.layers.1.mlp.down_proj.weight"
    swapped = dict(learner.weights())[name].clone()
    swapped[[3, 8]] = swapped[[8, 3]]
    engine.load(iter([(name, swapped)]), 0)
    with pytest.raises(SyncError, match=rf"{name}: differs, rows 3 and 8 are swapped"):
        sync.verify(learner, engine)
    assert sync.push(learner, engine).passed, "a push heals it"


def test_weights_larger_than_a_bucket(engine: EngineProcess, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket, "SIZE", 20_000)  # the embedding alone has 160 kB
    model = model_of(tiny_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    engine.load(named_weights(model), 3)
    assert engine.fingerprints() == fingerprint(named_weights(model))
    assert engine.version == 3


def test_tensors_come_back_one_by_one(engine: EngineProcess, tiny_model_dir: Path):
    wanted = dict(named_weights(model_of(tiny_model_dir)))
    found = dict(engine.weights())
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    only = dict(engine.weights(["model.norm.weight"]))
    assert list(only) == ["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.ghost: the engine has no tensor of this name"):
        list(engine.weights(["model.ghost"]))
    assert engine.fingerprints().tensors.keys() == wanted.keys(), "the channel is in order"


def test_reading_may_be_broken_off(engine: EngineProcess):
    stream = engine.weights()
    next(stream)
    assert len(engine.score([PROMPT])[0]) == 3
    next(stream)
    assert len(finish(engine, [request("a", PROMPT, Sampling(3))])["a"].ids) == 3


def test_a_load_that_fails_leaves_no_version(engine: EngineProcess):
    with pytest.raises(SyncError, match=r"model\.ghost\.weight: the engine has no tensor of this name"):
        engine.load(iter([("model.ghost.weight", torch.zeros(2))]), 5)
    assert engine.version == -1
    with pytest.raises(StaleWeightsError):
        engine.submit([request("a", PROMPT, Sampling(3), version=5)])
    engine.load(iter(()), 6)
    assert finish(engine, [request("a", PROMPT, Sampling(3), version=6)])["a"].version == 6


# --- requests -------------------------------------------------------------------------------------------------------
def test_errors_cross_with_their_class_and_text(engine: EngineProcess):
    with pytest.raises(EngineError, match=r"exceed the model's context of 4096") as caught:
        engine.submit([request("long", PROMPT, Sampling(5000))])
    assert caught.value.fix == "shorten the prompt or lower rollout.max_tokens"
    assert list(engine.completed()) == []


def test_ids_may_be_used_again_and_again(engine: EngineProcess):
    first = finish(engine, [request("a", PROMPT, Sampling(4), seed=1)])
    assert finish(engine, [request("a", PROMPT, Sampling(4), seed=1)]) == first
    assert finish(engine, [request("a", PROMPT, Sampling(4), seed=2)]) != first


def test_scores_between_completions(engine: EngineProcess):
    wanted = [request(str(i), PROMPT, Sampling(5 + 9 * i), seed=i) for i in range(4)]
    undisturbed = finish(engine, wanted)
    engine.submit(wanted)
    found = {}
    for done in engine.completed():
        assert len(engine.score([PROMPT, (1, 2)])) == 2
        found[done.request.id] = done
    assert found == undisturbed


# --- life and death -------------------------------------------------------------------------------------------------
def test_a_process_that_does_not_start_tells_why(tiny_model_dir: Path):
    with pytest.raises(EngineError, match=r"ValueError: invalid literal(.|\n)*native_child\.py"):
        native_child.start(tiny_model_dir, slots="many")  # type: ignore[arg-type]


def test_a_process_that_dies_at_once_shows_its_last_words():
    command = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    with pytest.raises(EngineError, match=r"ended with code 3(.|\n)*out of luck"):
        EngineProcess(command, os.environ, torch.device("cpu"))


def test_a_process_that_is_killed_is_noticed(tiny_model_dir: Path):
    engine = native_child.start(tiny_model_dir)
    engine.load(iter(()), 0)
    engine.submit([request("a", PROMPT, Sampling(2000, ignore_eos=True))])
    engine._process.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with code -9"):
        list(engine.completed())
    engine.close()


def test_close_ends_the_process(tiny_model_dir: Path):
    engine = native_child.start(tiny_model_dir)
    engine.submit([])
    process = psutil.Process(engine._process.pid)
    engine.close()
    engine.close()
    assert not process.is_running()


def test_the_process_ends_with_its_owner(tiny_model_dir: Path):
    """Even if the owner is killed while it samples."""
    code = (
        "import sys, time; from tests.rollout.vllm import native_child; from tests.rollout.engines import request\n"
        "from lockstep.types import Sampling\n"
        f"engine = native_child.start({str(tiny_model_dir)!r}); engine.load(iter(()), 0)\n"
        "engine.submit([request('a', (5, 6), Sampling(3000, ignore_eos=True))])\n"
        "print(engine._process.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(native_child.ROOT)},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it outlives its owner"
        time.sleep(0.1)


def test_an_attention_that_the_engine_shares_with_nobody(tiny_model_dir: Path):
    """The engine's weights are its own: changing the owner's model changes nothing over there."""
    engine = native_child.start(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=NAME, dtype=torch.float32)
    engine.load(named_weights(model), 0)
    before = engine.fingerprints()
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert engine.fingerprints() == before
    engine.close()


# --- numerics and noise ---------------------------------------------------------------------------------------------
def test_noise_and_numerics_reach_the_other_process_and_leave_it(engine: EngineProcess, tiny_model_dir: Path):
    here = NativeEngine(model_of_engine(tiny_model_dir), slots=4, stop_ids=frozenset(), decode=str)
    here.load(iter(()), 0)
    names = ("model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight")
    noise = NormNoise(0.1, 5, names, (1.0, 0.5))
    clean, before = engine.score([PROMPT]), engine.fingerprints()
    for forward in (Forward("mxfp4-w4a4"), Forward("", noise), Forward("mxfp4-w4a4", noise)):
        assert engine.set_forward(forward) == here.set_forward(forward)
        assert engine.forward == forward
        assert engine.score([PROMPT]) == here.score([PROMPT]) != clean
    for call in (
        engine.fingerprints,
        lambda: engine.load(iter(()), 1),
        lambda: list(engine.weights(["model.norm.weight"])),
    ):
        with pytest.raises(EngineError, match="noise is applied to the normalisation weights"):
            call()
    engine.set_forward(Forward())
    assert engine.score([PROMPT]) == clean
    assert engine.fingerprints() == before


def test_a_forward_that_touches_nothing_is_refused_over_there(engine: EngineProcess):
    with pytest.raises(EngineError, match="needs a weight of this name"):
        engine.set_forward(Forward("", NormNoise(0.1, 5, ("model.nothing",), (1.0,))))
    assert engine.forward == Forward()


def model_of_engine(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32)
    return model.eval()
