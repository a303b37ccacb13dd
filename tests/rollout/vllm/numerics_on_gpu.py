"""What a vLLM engine must do with numerics and noise, as checks over a small model. Used by the smoke script on a GPU.

Activations of four bits magnify rounding: a number next to the border between two codes moves by a whole code. In bf16 two
correct engines therefore differ under w4a4 far more than without. What is asked of vLLM there is to be no further from the
learner than the learner is from itself with another attention kernel, and much nearer than to the unquantised model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.errors import EngineError
from lockstep.models.weights import named_weights
from lockstep.noise.apply import NoisyNorms
from lockstep.numerics.apply import numerics_of
from lockstep.rollout.vllm.engine import VllmEngine
from lockstep.rollout.vllm.process import vllm_process
from lockstep.rollout.vllm.settings import VllmSettings
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import Forward, NormNoise, Request, Sampling, TokenIds
from tests.rollout.vllm.on_gpu import CONTEXT, STOPS, write_model

NUMERICS = ("mxfp4-w4a16", "mxfp4-w4a4")
BAND = {"bfloat16": 0.03, "float32": 1e-3}
"""Mean |Δ log-probability| of two correct engines without quantised activations."""
FLOOR_TIMES = 1.5
"""Under w4a4, how far vLLM may be from the learner in units of the learner's distance from itself."""
LAYERS = 21
SEQUENCES: tuple[TokenIds, ...] = tuple(
    tuple((place * 37 + row * 11) % 600 + 5 for place in range(48)) for row in range(16)
)


class Rig:
    """An engine and the learner's side: two copies of the model that differ in their attention kernel."""

    def __init__(self, folder: Path, *, own_process: bool, dtype: str, device: str = "cuda") -> None:
        write_model(folder)
        self.dtype, self.device = dtype, device
        self.settings = VllmSettings(
            folder=str(folder),
            dtype=dtype,
            slots=64,
            max_model_len=CONTEXT,
            kv_cache_bytes=2**29,
            stop_ids=STOPS,
            sleep=device == "cuda",
            enforce_eager=device != "cuda",
            numerics=NUMERICS,
        )
        self.learner, self.twin = self.model(folder, "sdpa"), self.model(folder, "eager")
        self.other = self.model(folder, "sdpa", seed=1)
        self.engine: Any
        if own_process:
            self.engine = vllm_process(self.settings, torch.device(device, 0), through_host=False)
        else:
            self.engine = VllmEngine(self.settings, AutoTokenizer.from_pretrained(folder).decode)
        self.engine.load(named_weights(self.learner), 0)

    def model(self, folder: Path, attention: str, seed: int = 0) -> Any:
        kind = getattr(torch, self.dtype)
        made: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=kind)
        generator = torch.Generator().manual_seed(seed)
        for parameter in made.parameters() if seed else ():
            parameter.data += (0.02 * torch.randn(parameter.shape, generator=generator)).to(kind)
        return made.to(self.device).eval()

    def scores(self) -> list[float]:
        return [value for row in self.engine.score(SEQUENCES) for value in row]

    def learnt(self, model: Any, numeric: str = "") -> list[float]:
        """The learner's log-probabilities of the same tokens."""
        numerics = numerics_of(model)
        numerics.serve(numeric)
        rows: list[float] = []
        with torch.no_grad(), numerics.computing(numeric):
            for ids in SEQUENCES:
                ids_1T = torch.tensor([ids], device=self.device)
                logprobs_TV = model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
                rows += logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()
        return rows

    def noise(self, sigma: float = 0.05) -> NormNoise:
        names = tuple(sorted(name for name, _ in named_weights(self.learner) if "layernorm" in name))
        return NormNoise(sigma, 11, names, (1.0,) * len(names))

    def prints(self) -> str:
        own = getattr(self.engine, "fingerprints", None)
        return str(own().combined if own else fingerprint(self.engine.weights()).combined)

    def sampled(self) -> list[tuple[TokenIds, tuple[float, ...]]]:
        """Rollouts by captured decode steps."""
        sampling = Sampling(32, ignore_eos=True)
        asked = [
            Request(f"r{i}", SEQUENCES[i % 4][:20], f"g{i % 4}", i, sampling, self.engine.version) for i in range(24)
        ]
        self.engine.submit(asked)
        done = {c.request.id: c for c in self.engine.completed()}
        return [(done[r.id].ids, done[r.id].logprobs) for r in asked]


def gap(one: list[float], other: list[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def same(one: list[float], other: list[float], rig: Rig) -> bool:
    """Of one computation made twice: on a CPU equal to the bit; a GPU's kernels may add in another order."""
    return one == other if rig.device == "cpu" else gap(one, other) <= BAND[rig.dtype] / 10


def refusal(call: Callable[[], object]) -> str:
    """What a call that must be refused says."""
    said = ""
    try:
        call()
    except EngineError as error:
        said = str(error)
    assert said, "it was not refused"
    return said


def each_numeric(rig: Rig, values: dict[str, Any]) -> None:
    plain, before = rig.scores(), rig.prints()
    values["plain_gap"] = gap(plain, rig.learnt(rig.learner))
    assert values["plain_gap"] <= BAND[rig.dtype]
    for numeric in NUMERICS:
        report = rig.engine.set_forward(Forward(numeric))
        assert report.quantised_layers == LAYERS, report
        found, wanted = rig.scores(), rig.learnt(rig.learner, numeric)
        floor = gap(rig.learnt(rig.twin, numeric), wanted)
        values |= {f"{numeric}_gap": gap(found, wanted), f"{numeric}_floor": floor}
        values[f"{numeric}_effect"] = gap(found, plain)
        allowed = BAND[rig.dtype] if numeric.endswith("w4a16") else max(BAND[rig.dtype], FLOOR_TIMES * floor)
        assert values[f"{numeric}_gap"] <= allowed, values
        assert values[f"{numeric}_effect"] > 1.3 * values[f"{numeric}_gap"], values
        assert rig.prints() == before, "what is proven is what was sent"
    rig.engine.set_forward(Forward())
    assert same(rig.scores(), plain, rig), "off again"


def decode_steps_are_quantised(rig: Rig, values: dict[str, Any]) -> None:
    """Captured steps follow the switch: what they sample has the log-probabilities that prefill gives under the same numeric."""
    for numeric in ("", *NUMERICS, ""):
        rig.engine.set_forward(Forward(numeric))
        gaps, other = [], []
        for (ids, logprobs), i in zip(rig.sampled(), range(24), strict=True):
            prompt = SEQUENCES[i % 4][:20]
            rig.engine.set_forward(Forward(numeric))
            (row,) = rig.engine.score([prompt + ids])
            gaps += [abs(a - b) for a, b in zip(logprobs, row[len(prompt) - 1 :], strict=True)]
            rig.engine.set_forward(Forward("" if numeric else NUMERICS[1]))
            (row,) = rig.engine.score([prompt + ids])
            other += [abs(a - b) for a, b in zip(logprobs, row[len(prompt) - 1 :], strict=True)]
        name = numeric or "plain"
        values |= {f"{name}_gap": fmean(gaps), f"{name}_against_other": fmean(other)}
        assert fmean(gaps) < fmean(other), values
    rig.engine.set_forward(Forward())


def a_push_quantises_again(rig: Rig, values: dict[str, Any]) -> None:
    rig.engine.set_forward(Forward(NUMERICS[0]))
    old = rig.scores()
    rig.engine.load(named_weights(rig.other), 1)
    new = rig.scores()
    values |= {"gap": gap(new, rig.learnt(rig.other, NUMERICS[0])), "from_old": gap(new, old)}
    assert values["gap"] <= BAND[rig.dtype] < values["from_old"]
    rig.engine.load(named_weights(rig.learner), 0)
    assert same(rig.scores(), old, rig)
    rig.engine.set_forward(Forward())


def noise_on_and_off(rig: Rig, values: dict[str, Any]) -> None:
    clean, before, noise = rig.scores(), rig.prints(), rig.noise()
    report = rig.engine.set_forward(Forward("", noise))
    noisy = rig.scores()
    own = NoisyNorms(rig.learner)
    outcome = own.set(noise)
    wanted = rig.learnt(rig.learner)
    own.set(None)
    assert (report.noisy_norms, report.noise_share) == (outcome.norms, outcome.share)
    values |= {"norms": report.noisy_norms, "share": report.noise_share, "lost": report.noise_lost}
    values |= {"effect": gap(noisy, clean), "gap": gap(noisy, wanted)}
    assert values["gap"] <= BAND[rig.dtype] < values["effect"]
    for call in (rig.prints, lambda: rig.engine.load(iter(()), 1)):
        assert "noise is applied to the normalisation weights" in refusal(call)
    rig.engine.set_forward(Forward(NUMERICS[1], noise))
    rig.engine.set_forward(Forward("", rig.noise(0.01)))  # of the clean weights, not of the noisy ones
    rig.engine.set_forward(Forward("", noise))
    assert same(rig.scores(), noisy, rig)
    rig.engine.set_forward(Forward())
    assert same(rig.scores(), clean, rig)
    assert rig.prints() == before


def what_touches_nothing_is_refused(rig: Rig, values: dict[str, Any]) -> None:
    clean = rig.scores()
    for bad in (Forward("nvfp4-w4a4"), Forward("", NormNoise(0.1, 1, ("model.nothing.weight",), (1.0,)))):
        values[bad.numerics or "noise"] = refusal(partial(rig.engine.set_forward, bad))[:80]
    assert same(rig.scores(), clean, rig)


CHECKS: dict[str, Callable[[Rig, dict[str, Any]], None]] = {
    check.__name__: check
    for check in (
        each_numeric,
        decode_steps_are_quantised,
        a_push_quantises_again,
        noise_on_and_off,
        what_touches_nothing_is_refused,
    )
}
