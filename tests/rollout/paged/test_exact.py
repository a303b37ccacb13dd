"""Exactness: what the engine samples with has the bits of what the learner computes. Kernels here need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config.schema import Recipe
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.models import exact
from lockstep.types import Batch, LossInput, LossOutput, Request, Sampling, TrainSequence

pytest.importorskip("triton")

from lockstep.build import exactness_check
from lockstep.models import ordered_attention
from lockstep.models.decoder import Decoder
from lockstep.models.head_kernels import pick_logprobs
from lockstep.models.ordered_product_kernel import product
from lockstep.rollout.paged import prefill
from lockstep.rollout.paged.ops import TritonOps

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def off_again():
    yield
    exact.enable("", on=False)


def built(kind: str) -> tuple[Any, Any, TorchLearner]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lockstep.build.exactness import settle_exactness
    from lockstep.models.attention import NAME
    from lockstep.models.fused_layers import fuse_layers
    from lockstep.rollout.paged.engine import PagedEngine

    torch.manual_seed(0)
    adapter = {"kind": "lora", "rank": 8} if kind == "lora" else {"kind": "none"}
    given = Recipe.model_validate({"numerics": {"exact": True}, "adapter": adapter, "steps": 20})
    config = Qwen2Config(vocab_size=5000, num_key_value_heads=2, tie_word_embeddings=True, **SHAPE)
    base = Qwen2ForCausalLM._from_config(config, attn_implementation=NAME).bfloat16().to("cuda").eval()
    fuse_layers(base)
    model = attach(base, given.adapter, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    settle_exactness(model, given)
    assert exact.enabled(), exact.line()
    engine = PagedEngine(model, slots=24, stop_ids=frozenset(), decode=str)
    engine.load(iter(()), 0)
    return model, engine, TorchLearner(model, given)


def requests(version: int) -> list[Request]:
    """Ask for groups of 8 with prompts of 1 to 300 tokens and replies of many lengths: more than there are rows."""
    prompts = [tuple(int(t) for t in torch.randint(5000, (n,))) for n in (1, 63, 64, 65, 300)]
    return [
        Request(f"{g}/{s}", ids, str(g), 8 * g + s, Sampling(1 + 37 * s, ignore_eos=True), version)
        for g, ids in enumerate(prompts)
        for s in range(8)
    ]


def sequence(given: Request, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> TrainSequence:
    count = len(ids)
    return TrainSequence(given.prompt_ids, ids, (True,) * count, logprobs, (1.0,) * count, 0.01, int(given.group))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sampled_scored_and_trained_log_probabilities_are_equal(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 256)  # the longest prompt takes two passes
    _, engine, learner = built(kind)
    for _ in range(2):  # the second time with the weights after an update
        engine.submit(requests(engine.version))
        done = list(engine.completed())
        scores = engine.score([(*d.request.prompt_ids, *d.ids) for d in done])
        for d, row in zip(done, scores, strict=True):
            assert d.logprobs == row[len(d.request.prompt_ids) - 1 :]
        gaps: list[torch.Tensor] = []

        def loss(given: LossInput, gaps: list[torch.Tensor] = gaps) -> LossOutput:
            gaps.append((given.logprobs_T.detach() - given.rollout_logprobs_T).abs())
            return LossOutput(-given.logprobs_T * given.advantages_T)

        replies = sorted(done, key=lambda d: d.request.id)
        sequences = [sequence(d.request, d.ids, d.logprobs) for d in replies]
        learner.update(Batch(tuple(sequences)), loss)
        engine.load(iter(()), learner.version)
        assert float(torch.cat(gaps).max()) == 0


def test_a_sample_depends_on_its_seed_alone():
    _, engine, _ = built("full")
    wanted = requests(0)
    engine.submit(wanted)
    together = {d.request.id: (d.ids, d.logprobs) for d in engine.completed()}
    for one in wanted[3::9]:
        engine.submit([one])
        (alone,) = engine.completed()
        assert (alone.ids, alone.logprobs) == together[one.id]


def split_in_two(x: Any, weight: Any, bias: Any, alpha: float, out: Any, tile: Any) -> Any:
    """Split K of small products."""
    if len(x) > 8:
        return product(x, weight, bias, alpha, out, tile)
    half = x.shape[1] // 2
    return out.copy_((x[:, :half] @ weight[:, :half].T).float() + (x[:, half:] @ weight[:, half:].T).float())


def norm_by_torch(ops: Any, x: Any, residual: Any, weight: Any, eps: float, room: int = 0) -> Any:
    """Round once less."""
    total = x + residual
    return total, torch.nn.functional.rms_norm(total.float(), weight.shape, weight.float(), eps).bfloat16()


def gate_by_torch(ops: Any, x: Any, room: int = 0) -> Any:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def head_by_torch(logits: Any, ids: Any, temperature: Any, peak: Any, mass: Any, out: Any) -> None:
    if len(ids) > 8:
        pick_logprobs(logits, ids, temperature, peak, mass, out)
    else:
        out.copy_((logits.float() / temperature[:, None]).log_softmax(-1).gather(-1, ids[:, None])[:, 0] + 1e-6)


PLANTED: list[tuple[Any, str, Any, str]] = [
    (exactness_check, "product", split_in_two, "products of"),
    (ordered_attention, "KEYS", 32, "decoded"),
    (TritonOps, "add_norm", norm_by_torch, "the norm"),
    (TritonOps, "gate", gate_by_torch, "the gated activation"),
    (exactness_check, "pick_logprobs", head_by_torch, "log-probabilities of the head"),
]


def test_the_device_test_names_what_differs(monkeypatch: pytest.MonkeyPatch):
    model, _, _ = built("full")
    decoder = Decoder.of(model)
    assert exactness_check.differing(decoder) == ()
    for place, name, fault, words in PLANTED:
        with monkeypatch.context() as planted:
            planted.setattr(place, name, fault)
            assert any(words in found for found in exactness_check.differing(decoder)), words


def test_gradients_are_those_of_the_usual_kernels():
    _, _, learner = built("full")
    sequences = tuple(sequence(r, tuple(range(40)), (0.0,) * 40) for r in requests(0))
    grads = []
    for on in (True, False):
        exact.enable("", on=on)
        learner.optimizer.forget()
        for packed in learner._streams(sequences):
            from lockstep.learner.learner import _forward

            logprobs, _, _ = _forward(learner.model, packed, 1.0)
            grads.append(torch.autograd.grad(logprobs.sum(), [learner.model.model.layers[0].mlp.down_proj.weight])[0])
            break
    torch.testing.assert_close(grads[0], grads[1], rtol=0.1, atol=0.05 * float(grads[1].abs().max()))
