"""Layers with a state: nothing leaks from a sequence into its neighbours, in training or in sampling."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from lockstep.config.schema import Recipe
from lockstep.learner.learner import TorchLearner, plain_logprobs
from lockstep.models.decoder import even_heads
from lockstep.models.small import random_model, small_config
from lockstep.models.states import follow_layouts, state_layers
from lockstep.types import Sampling
from tests.learner.batches import learner_gradients, make_batch, plain_gradients
from tests.learner.models import STATES, logprobs_of, plain, tokens, twin
from tests.learner.test_gradients import LOSS, closest, recipe
from tests.rollout.engines import engine_over, finish, request

LONG = tokens(150, 9)
"""More than two chunks of 64 tokens."""


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token in the precision of its inputs, from the paper (arXiv 2412.06464, equation 10)."""
    groups = value.shape[2] // key.shape[2]
    query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(groups, 2) for x in (query * query.shape[-1] ** -0.5, key))
    shape = (*value.shape[:1], value.shape[2], key.shape[-1], value.shape[-1])
    state = value.new_zeros(shape) if initial_state is None else initial_state
    out = []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        told = torch.einsum("nhkv,nhk->nhv", state, key[:, t])
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, t], (value[:, t] - told) * beta[:, t, :, None])
        out.append(torch.einsum("nhkv,nhk->nhv", state, query[:, t]))
    return torch.stack(out, 1), state


class Gated(nn.Module):
    """The gated norm of such layers, in the precision of its inputs."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed * torch.nn.functional.silu(gate)


class OneMore(nn.Module):
    """A norm with weight 1 + w, likewise."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def in_float64(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Qwen3.5 in float64 throughout: transformers computes parts of it in fp32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    monkeypatch.setattr(
        torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(torch.float32)
    )
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(theirs, name, delta_rule)
    model = plain("qwen3.5", dtype=torch.float64, attention="sdpa")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNormGated"):
                setattr(module, name, Gated(child.weight))
            elif type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, OneMore(child.weight))
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [24, 10_000])
def test_packed_training_is_that_of_one_sequence_at_a_time(
    share: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_float64(monkeypatch)
    given = recipe(tokens_per_microbatch=budget, share_prompts=share)
    metrics, ours = learner_gradients(twin(model), make_batch(0.7), LOSS, given)
    loss, theirs = plain_gradients(model, make_batch(0.7), LOSS)
    assert closest(ours, theirs) < 1e-11
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-10)


def test_a_stream_without_borders_would_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one run over the whole stream, as a layer that knows no sequences would make it."""
    model = in_float64(monkeypatch)
    leaking = twin(model)
    a, b = tokens(20, 1), tokens(20, 2)
    right = plain_logprobs(leaking, [a, b], 100)[1]
    from lockstep.learner.layout import PackedLayout

    monkeypatch.setattr(PackedLayout, "mix", lambda self, layer, hidden_TH, run: run(hidden_TH[None], None)[0][0])
    wrong = plain_logprobs(leaking, [a, b], 100)[1]
    np.testing.assert_allclose(right, logprobs_of(model, b).numpy(), atol=1e-10)
    assert np.abs(np.array(right) - wrong).max() > 0.01


@pytest.mark.parametrize("family", STATES)
def test_long_sequences_agree(family: str) -> None:
    reference = plain(family)
    expected = logprobs_of(reference, LONG).numpy()
    model = twin(reference)
    np.testing.assert_allclose(engine_over(model).score([LONG])[0], expected, atol=2e-5)
    np.testing.assert_allclose(TorchLearner(model, Recipe()).logprobs([LONG[:9], LONG])[1], expected, atol=2e-5)


@pytest.mark.parametrize("family", STATES)
def test_a_freed_row_leaves_nothing_to_the_next(family: str) -> None:
    """Two slots, nine requests of other lengths: each sample is the one that has the engine for itself, bit for bit where no
    expert's number of rows depends on its neighbours.
    """
    model = twin(plain(family))
    wanted = [
        request(str(i), tokens(3 + 5 * i, i), Sampling(4 + 3 * (i % 4), ignore_eos=True), seed=i) for i in range(9)
    ]
    together = finish(engine_over(model, 2), wanted)
    for one in wanted:
        alone = finish(engine_over(model, 2), [one])[one.id]
        assert together[one.id].ids == alone.ids
        np.testing.assert_allclose(together[one.id].logprobs, alone.logprobs, atol=0 if family == "qwen3.5" else 1e-5)


def test_short_time_steps_are_as_long_in_sampling_as_in_training() -> None:
    """Nemotron-H has a least time step. transformers keeps to it in passes of several tokens alone."""
    reference = random_model(hf.NemotronHForCausalLM, small_config(hf.NemotronHConfig()), "eager")
    for layer in state_layers(reference):
        nn.init.constant_(layer.dt_bias, -12.0)  # steps of 6e-6
    done = finish(engine_over(twin(reference)), [request("a", tokens(5, 1), Sampling(12, ignore_eos=True))])["a"]
    wanted = logprobs_of(reference, (*done.request.prompt_ids, *done.ids)).numpy()[-len(done.ids) :]
    np.testing.assert_allclose(done.logprobs, wanted, atol=1e-5)


def test_layers_with_a_state_are_found_and_copied_with_their_model() -> None:
    model = plain("qwen3.5")
    (layer,) = state_layers(model)
    assert "forward" not in layer.__dict__
    ours = twin(model)
    follow_layouts(ours)
    (copied,) = state_layers(copy.deepcopy(ours))
    replaced: Any = copied.forward
    assert replaced.module is copied
    assert state_layers(plain("llama")) == []
    assert even_heads(plain("llama")) == (2, 16)
    assert {even_heads(plain(family)) for family in ("qwen3.5", "gemma4", "deepseek-v3")} == {(0, 0)}
    few_in_some_layers = small_config(hf.MiMoV2FlashConfig())
    assert even_heads(random_model(hf.MiMoV2FlashForCausalLM, few_in_some_layers, "eager")) == (0, 0)
