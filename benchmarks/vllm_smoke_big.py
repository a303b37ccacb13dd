"""The sections of gpu_vllm_smoke.py on the Qwen2.5-1.5B shape with random weights."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_smoke_steps import Steps

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 128, 512
SLOTS = PROMPTS * SAMPLES


def big_model(folder: Path) -> Any:
    """transformers' model on the GPU, random bf16 weights; the folder gets its configuration and a byte tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny import write_tiny_tokenizer

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():  # not model.to: the rotary frequencies stay fp32
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def big_settings(folder: Path) -> Any:
    from lockstep.rollout.vllm.settings import VllmSettings

    return VllmSettings(
        folder=str(folder), dtype="bfloat16", slots=SLOTS, max_model_len=2048, kv_cache_bytes=20 * 2**30, stop_ids=(2,)
    )


class Trained:
    """A learner that is changed by noise."""

    def __init__(self, model: Any) -> None:
        self.model, self.version = model, 0

    def train(self) -> None:
        import torch

        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.002)

    def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        import torch

        rows = []
        with torch.no_grad():
            for ids in sequences:
                ids_1T = torch.tensor([list(ids)], device=self.model.device)
                logprobs_TV = self.model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
                rows.append(tuple(logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()))
        return rows

    def weights(self) -> Any:
        from lockstep.models.weights import named_weights

        return named_weights(self.model)


def requests(version: int, *, seed: int = 0) -> list[Any]:
    import random

    from lockstep.types import Request, Sampling

    chosen = random.Random(7)
    sampling = Sampling(NEW_TOKENS, ignore_eos=True)
    made = []
    for prompt in range(PROMPTS):
        ids = tuple(chosen.randrange(3, 150000) for _ in range(PROMPT_TOKENS))
        for sample in range(SAMPLES):
            name = f"{prompt}/{sample}"
            made.append(Request(name, ids, str(prompt), seed + SAMPLES * prompt + sample, sampling, version))
    return made


def rollouts(step: Steps, learner: Trained, engine: Any, times: int = 3) -> None:
    """Tokens per second of whole rollouts, the first of them warming up, and log-probabilities against transformers."""
    import statistics

    from lockstep.learner.rounding import shaken
    from lockstep.sync.proof import ROUNDINGS

    speeds, done = [], []
    with step("rollouts") as values:
        for index in range(times + 1):
            start = time.perf_counter()
            engine.submit(requests(engine.version, seed=1000 * index))
            done = list(engine.completed())
            seconds = time.perf_counter() - start
            tokens = sum(len(c.ids) for c in done)
            assert tokens == SLOTS * NEW_TOKENS, tokens
            if index:
                speeds.append(tokens / seconds)
        values |= {"tok_s": statistics.median(speeds), "tok_s_all": [round(s) for s in speeds]}
    with step("logprobs against transformers") as values:
        gaps = []
        for completion in done[::64]:
            prompt = completion.request.prompt_ids
            (row,) = learner.logprobs([prompt + completion.ids])
            wanted = row[len(prompt) - 1 :]
            gaps += [abs(a - b) for a, b in zip(completion.logprobs, wanted, strict=True)]
        values |= {"mean_gap": statistics.fmean(gaps), "max_gap": max(gaps), "tokens": len(gaps)}
        with shaken(learner.model):
            (moved,) = learner.logprobs([prompt + completion.ids])
        values["rounding"] = statistics.fmean(abs(a - b) for a, b in zip(row, moved, strict=True))
        assert statistics.fmean(gaps) <= max(0.03, ROUNDINGS * float(values["rounding"]))


def pushes(step: Steps, learner: Trained, engine: Any, sync: Any, target_ms: float) -> None:
    with step("first push and proof") as values:
        proof = sync.push(learner, engine)
        values |= facts(proof)
    with step("negative control") as values:
        values["falsified"] = sync.negative_control(learner, engine)
    with step(f"pushes without probe, target {target_ms:g} ms") as values:
        import statistics

        times = []
        sync._prover._pushes = 10  # no probe from here on, but for every 1000th
        for _ in range(6):
            learner.train()
            proof = sync.push(learner, engine)
            assert proof.passed
            assert proof.probe is None
            times.append(1000 * proof.seconds)
        values |= {"ms": statistics.median(times[1:]), "ms_all": [round(t, 1) for t in times], **facts(proof)}
        assert statistics.median(times[1:]) <= target_ms
    with step("verify (all and probe)") as values:
        values |= facts(sync.verify(learner, engine))


def facts(proof: Any) -> dict[str, Any]:
    shown = {
        "passed": proof.passed,
        "tensors": proof.tensors,
        "changed": proof.changed,
        "proof_ms": 1000 * proof.seconds,
    }
    if proof.probe:
        shown |= {"probe_mean": proof.probe.mean, "probe_max": proof.probe.max}
    return shown


def planted_faults(step: Steps, learner: Trained, engine: Any, sync: Any) -> None:
    """Weights that miss a tensor, and rows exchanged: each must be named."""
    from lockstep.errors import SyncError

    name = "model.layers.13.self_attn.k_proj.weight"
    with step("a tensor that was not sent is named") as values:
        learner.train()
        engine.load(((n, t) for n, t in learner.weights() if n != name), learner.version)
        values["told"] = refused(SyncError, lambda: sync.verify(learner, engine), f"{name}: stale")
    with step("rows exchanged in the engine are named") as values:
        wrong = dict(learner.weights())[name].clone()
        wrong[[3, 200]] = wrong[[200, 3]]
        engine.load(iter([(name, wrong)]), learner.version)
        values["told"] = refused(SyncError, lambda: sync.verify(learner, engine), "rows 3 and 200 are swapped")
    with step("a push heals it") as values:
        learner.train()
        values |= facts(sync.push(learner, engine))


def refused(kind: type[Exception], call: Callable[[], object], text: str) -> str:
    said = ""
    try:
        call()
    except kind as error:
        said = str(error)
    assert text in said, said or f"no {kind.__name__}"
    return said[:200]


def memory_steps(step: Steps, engine: Any) -> None:
    import torch

    with step("sleep and wake") as values:
        times = []
        for _ in range(3):
            engine.wake()
            torch.cuda.synchronize()
            awake = torch.cuda.mem_get_info()[0]
            start = time.perf_counter()
            engine.sleep()
            torch.cuda.synchronize()
            asleep = torch.cuda.mem_get_info()[0]
            middle = time.perf_counter()
            engine.wake()
            torch.cuda.synchronize()
            times.append((1000 * (middle - start), 1000 * (time.perf_counter() - middle)))
            engine.sleep()
        values |= {"freed_gib": (asleep - awake) / 2**30, "sleep_ms": times[-1][0], "wake_ms": times[-1][1]}
        assert asleep - awake > 15 * 2**30, "the cache of 20 GiB is to be given back"


def fingerprint_steps(step: Steps, learner: Trained, engine: Any) -> None:
    import torch

    from lockstep.sync.fingerprint import fingerprint

    with step("fingerprint of all weights") as values:
        for side, read in (("learner_ms", learner.weights), ("engine_ms", engine.weights)):
            if side == "engine_ms" and hasattr(engine, "fingerprints"):
                timed = timing(engine.fingerprints)
            else:
                timed = timing(lambda read=read: fingerprint(read()))  # type: ignore[misc]
            values[side] = timed
        torch.cuda.synchronize()


def timing(call: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return min(times[1:])


def copy_sync(model: Any, *, merge: bool = False) -> Any:
    from lockstep.config.schema import Sync
    from lockstep.models.weights import frozen_names, named_weights
    from lockstep.sync.transports import build_sync

    names = frozenset(name for name, _ in named_weights(model)) if merge else None
    settings = Sync(transport="copy", probe_first=10, probe_every=1000)
    return build_sync(
        settings, vocab=151936, numerics="bf16", frozen=frozen_names(model), transport="copy", merge=names
    )


def big_in(folder: Path, step: Steps) -> None:
    """In process: first copied, then shared."""
    import torch

    from lockstep.config.schema import Sync
    from lockstep.errors import SyncError
    from lockstep.rollout.vllm.engine import VllmEngine
    from lockstep.sync.transports import build_sync

    learner = Trained(big_model(folder))
    engine: Any = None
    with step("start") as values:
        engine = VllmEngine(big_settings(folder), str)
        values["gib"] = gib()
    if engine is None:
        return
    copying = copy_sync(learner.model)
    pushes(step, learner, engine, copying, 150)
    planted_faults(step, learner, engine, copying)
    fingerprint_steps(step, learner, engine)
    with step("share the parameters") as values:
        before = gib()
        values |= {"parameters": len(engine.share(learner.model)), "gib_before": before, "gib_after": gib()}
    shared = build_sync(Sync(probe_every=1000), vocab=151936, numerics="bf16", transport="shared")
    pushes(step, learner, engine, shared, 50)
    with step("an optimizer step trains vLLM's memory") as values:
        optimizer = torch.optim.AdamW(learner.model.parameters(), lr=1e-4)
        ids = torch.randint(3, 150000, (2, 64), device=learner.model.device)
        learner.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        learner.version += 1
        values |= facts(shared.push(learner, engine))
        values |= {"after": facts(shared.verify(learner, engine))}
        del optimizer
    rollouts(step, learner, engine)
    with step("unseeded, for comparison"):
        engine._settings = replace(engine._settings, seeded=False)
    rollouts(step, learner, engine, 2)
    engine._settings = replace(engine._settings, seeded=True)
    memory_steps(step, engine)
    with step("a parameter that is no view any more is named") as values:
        weight = learner.model.model.layers[5].mlp.down_proj.weight
        weight.data = weight.data.clone()
        values["told"] = refused(SyncError, lambda: shared.verify(learner, engine), "not shared")
    with step("close") as values:
        engine.close()
        values["gib"] = gib()


def big_own(folder: Path, step: Steps) -> None:
    """In its own process: by CUDA IPC, then through host memory."""
    import torch

    from lockstep.rollout.vllm.process import vllm_process

    learner = Trained(big_model(folder))
    engine: Any = None
    with step("start") as values:
        engine = vllm_process(big_settings(folder), torch.device("cuda", 0), through_host=False)
        values |= {"engine_seconds": engine.seconds, "gib": gib()}
    if engine is None:
        return
    sync = copy_sync(learner.model)
    pushes(step, learner, engine, sync, 150)
    planted_faults(step, learner, engine, sync)
    fingerprint_steps(step, learner, engine)
    with step("load alone") as values:
        values["ms"] = timing(lambda: engine.load(learner.weights(), learner.version))
        sync.push(learner, engine)
    rollouts(step, learner, engine)
    memory_steps(step, engine)
    with step("through host memory") as values:
        engine._device, engine._bucket = torch.device("cpu"), None
        values["ms"] = timing(lambda: engine.load(learner.weights(), learner.version))
        values |= facts(sync.verify(learner, engine))
    with step("close") as values:
        print("the end of the engine's output:\n" + engine._tail())
        engine.close()
        values["gib"] = gib()


def big_lora(folder: Path, step: Steps) -> None:
    """Adapters of rank 32 on all linear layers, merged into what is sent to a process of its own."""
    import torch

    from lockstep.config.schema import Lora
    from lockstep.learner.adapters import attach
    from lockstep.rollout.vllm.process import vllm_process

    model = attach(big_model(folder), Lora(rank=32, alpha=64), 0)
    learner = Trained(model)
    learner.train()
    engine: Any = None
    with step("start"):
        engine = vllm_process(big_settings(folder), torch.device("cuda", 0), through_host=False)
    if engine is None:
        return
    pushes(step, learner, engine, copy_sync(model, merge=True), 250)
    rollouts(step, learner, engine, 1)
    with step("close"):
        engine.close()


def gib() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
