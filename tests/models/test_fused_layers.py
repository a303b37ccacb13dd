"""Fused layers: the model's own results, which layers are known, and that nothing else is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from lockstep.config.schema import Lora
from lockstep.learner.adapters import attach
from lockstep.models.fused_layers import FusedLayers, fuse_layers, is_gated
from lockstep.models.one_input import ATTENTION, GATED
from lockstep.rollout.paged.joined import joined
from tests.interpreter import interpreted
from tests.learner.models import logits_of, plain, tokens, twin

COUNTS = {
    "llama": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "qwen3": (9, 2, 2),  # norms of queries and keys, too
    "mistral": (5, 2, 2),
    "gemma2": (9, 2, 2),  # offset weights, four norms a layer, gelu
    "gemma3": (13, 2, 2),
    "gpt-oss": (5, 0, 2),  # experts
    "cohere": (0, 2, 0),  # layer norms; interleaved rotary embedding
    "granite": (5, 2, 2),
    "phi": (0, 0, 2),  # part of each head is rotated
    "starcoder2": (0, 0, 2),
}
"""Norms, gated activations and rotary embeddings of two layers."""


@pytest.mark.parametrize("family", COUNTS)
def test_what_is_replaced_of_each_family(family: str):
    model = plain(family)
    forwards = LlamaRMSNorm.forward, LlamaMLP.forward, LlamaAttention.forward
    result = fuse_layers(model)
    assert (result.norms, result.gates, result.rotary) == COUNTS[family]
    assert result.line.startswith(f"fused layers: {COUNTS[family][0]} norms, {COUNTS[family][1]} gated activations")
    assert fuse_layers(model) is result, "once"
    assert forwards == (LlamaRMSNorm.forward, LlamaMLP.forward, LlamaAttention.forward), "instances alone"
    assert not [m for m in plain(family).modules() if "forward" in vars(m)], "other models are as they were"


def test_a_model_without_known_layers_says_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    assert fuse_layers(model) == FusedLayers(reason="no layer of Sequential is of a known kind")
    assert fuse_layers(model).line == "fused layers: none, no layer of Sequential is of a known kind"


def test_a_layer_that_differs_by_a_cast_or_an_activation_is_left_alone():
    class Rounded(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return (self.weight * super().forward(hidden_states)).to(torch.bfloat16)

    model = plain("llama")
    model.model.norm = Rounded(64)  # type: ignore[union-attr]
    model.model.layers[0].mlp.act_fn = nn.ReLU()  # type: ignore[union-attr, index]
    assert is_gated(model.model.layers[0].mlp)  # type: ignore[union-attr, index, arg-type]
    result = fuse_layers(model)
    assert (result.norms, result.gates) == (4, 1)


# --- by the interpreter ---------------------------------------------------------------------------------------------
def gradients(model: nn.Module, ids: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = logits_of(model, ids)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def every_family() -> None:
    for family in ("llama", "qwen3", "gemma3", "gpt-oss", "cohere", "phi"):
        model, ids = plain(family), tokens(9, 1)
        fused = copy.deepcopy(model)
        fuse_layers(fused)
        (logits, grads), (ours, own) = gradients(model, ids), gradients(fused, ids)
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=2e-5)
        assert family == "phi" or not torch.equal(ours, logits), "the kernels ran; phi's rotary embedding is exact"
        assert grads.keys() == own.keys()
        for name, grad in grads.items():
            assert (own[name] - grad).abs().max() < 1e-5 * grad.abs().max(), (family, name)
        other = copy.deepcopy(fused)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(gradients(fused, ids)[0], ours), "a copy has kernels over its own weights"
        lay_side_by_side(fused)
        (ours, own) = gradients(fused, ids)
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=2e-5)
        for name, grad in grads.items():
            assert (own[name] - grad).abs().max() < 1e-5 * grad.abs().max(), (family, name)


def lay_side_by_side(model: Any) -> None:
    """Make the weights of layers that read one input adjacent, as the native engine does."""
    names = {id(p): name for name, p in model.named_parameters()}
    for layer in model.get_decoder().layers:
        for module, group in ((layer.self_attn, ATTENTION), (layer.mlp, GATED)):
            if set(group) <= {*module._modules}:
                layers = [module.get_submodule(name) for name in group]
                for kind in ("weight", "bias"):
                    if getattr(layers[0], kind) is not None:
                        joined([getattr(one, kind) for one in layers], names, {})


def in_half_precision() -> None:
    """As far from float64 as the plain layers are. fp16: to bf16 the interpreter does not round, it cuts off."""
    for family in ("qwen2", "gemma2"):
        model, ids = plain(family, dtype=torch.float16), tokens(9, 1)
        fused = copy.deepcopy(model)
        fuse_layers(fused)
        exact, grads = gradients(copy.deepcopy(model).double(), ids)
        errors = []
        for one in (model, fused):
            logits, own = gradients(one, ids)
            worst = max(float((own[n].double() - g).norm() / g.norm()) for n, g in grads.items())
            errors.append((float((logits.double() - exact).norm() / exact.norm()), worst))
        (plain_logits, plain_grads), (fused_logits, fused_grads) = errors
        assert fused_logits < 1.3 * plain_logits + 1e-3, (family, errors)
        assert fused_grads < 1.5 * plain_grads + 1e-3, (family, errors)


def under_adapters() -> None:
    ids = tokens(9, 1)
    model: Any = attach(twin(plain("qwen2")), Lora(rank=4), seed=0)  # type: ignore[arg-type]
    plainly: Any = attach(twin(plain("qwen2")), Lora(rank=4), seed=0)  # type: ignore[arg-type]
    for one in (model, plainly):
        one.get_base_model().config._attn_implementation = "eager"
        for number, parameter in enumerate(p for p in one.parameters() if p.requires_grad):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    assert fuse_layers(model.get_base_model()).gates == 2
    (ours, own), (theirs, grads) = gradients(model, ids), gradients(plainly, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    assert own.keys() == grads.keys()
    assert all(".lora_" in name for name in own)
    for name, grad in grads.items():
        assert (own[name] - grad).abs().max() < 1e-5 * grad.abs().max(), name


def many_rows() -> None:
    """Norms over more rows than programs, neither a multiple of a tile; gates over more entries than a block; two batches."""
    from lockstep.models import layer_kernels, norm_kernels

    norm_kernels.PROGRAMS = 3
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    norm: Any = norm_kernels.RmsNorm
    for late in (False, True):
        x, weight = normal(2, 1201, 24), normal(24)
        wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        ours = norm.apply(x, weight, 1e-6, 0.5, late)
        theirs = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (wide_weight + 0.5)
        mix = torch.linspace(-1, 1, x.numel()).view_as(x)
        for a, b in zip(
            (ours, *torch.autograd.grad((ours * mix).sum(), (x, weight))),
            (theirs, *torch.autograd.grad((theirs * mix).sum(), (wide, wide_weight))),
            strict=True,
        ):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)

    wide = normal(3, 3100)  # rows with other numbers between them
    gate, up = wide[:, :1500], wide[:, 1550:3050]
    for kernel, activation in (
        (layer_kernels.SiluGate, nn.functional.silu),
        (layer_kernels.GeluGate, lambda x: nn.functional.gelu(x, approximate="tanh")),
    ):
        function: Any = kernel
        results = [function.apply(gate, up), activation(gate) * up]
        grads = [torch.autograd.grad((out * out.detach().cos()).sum(), (gate, up)) for out in results]
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)

    rotary: Any = layer_kernels.Rotary
    heads = normal(2, 7, 5, 12)  # of a token: those of queries, keys and values
    query, key = heads[:, :, :3].transpose(1, 2), heads[:, :, 3:4].transpose(1, 2)
    cos, sin = normal(1, 7, 12).detach(), normal(1, 7, 12).detach()
    turned = rotary.apply(query, key, cos, sin)

    def plainly(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin[:, None]

    expected = plainly(query), plainly(key)
    torch.testing.assert_close(turned, expected)
    total, plain_total = (sum((out * out.detach().cos()).sum() for out in one) for one in (turned, expected))
    torch.testing.assert_close(
        torch.autograd.grad(total, (query, key)), torch.autograd.grad(plain_total, (query, key)), rtol=1e-4, atol=1e-5
    )
    assert turned[0].transpose(1, 2).is_contiguous(), "heads of a token end to end"

    halves = cos[..., :6].contiguous(), sin[..., :6].contiguous()
    whole = (torch.cat((half, half), -1) for half in halves)
    assert all(map(torch.equal, rotary.apply(query, key, *halves), rotary.apply(query, key, *whole)))


def all_of_it() -> None:
    every_family()
    in_half_precision()
    under_adapters()
    many_rows()


@pytest.mark.slow
def test_fused_models_are_the_models():
    interpreted(all_of_it)
