"""The head without a tokens × vocabulary matrix: values and gradients are those of the plain formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from lockstep.errors import ModelError
from lockstep.models.heads import Head, head_of, token_logprobs
from tests.learner.models import logits_of, plain, tokens

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.3},
    "all": {"bias": True, "softcap": 1.5, "scale": 2.5},
}


def parts(
    rows: int,
    vocab: int,
    hidden: int = 6,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight, bias, targets."""
    generator = torch.Generator().manual_seed(rows + vocab)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype).requires_grad_()

    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, vocab - 1])
    return normal(rows, hidden), normal(vocab, hidden), normal(vocab) if bias else None, targets


def plainly(head: Head, hidden_TH: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The whole matrix of logits, float64."""
    logits_TV = hidden_TH.double() @ head.weight_VH.double().T
    if head.bias_V is not None:
        logits_TV = logits_TV + head.bias_V.double()
    logits_TV = logits_TV * head.scale
    if head.softcap is not None:
        logits_TV = head.softcap * torch.tanh(logits_TV / head.softcap)
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, targets_T[:, None])[:, 0], -(logprobs_TV.exp() * logprobs_TV).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", HEADS)
def test_gradcheck(kind: str, temperature: float):
    settings = dict(HEADS[kind])
    hidden, weight, bias, targets = parts(5, 9, bias=settings.pop("bias", False))
    given = (hidden, weight) if bias is None else (hidden, weight, bias)

    def function(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return token_logprobs(Head(weight_VH, bias_V, **settings), hidden_TH, targets, temperature)

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("kind", HEADS)
def test_many_tiles_are_the_plain_formula(kind: str, temperature: float):
    """More rows and entries than any tile holds, and no multiple of one."""
    settings = dict(HEADS[kind])
    hidden, weight, bias, targets = parts(1061, 4999, bias=settings.pop("bias", False))
    head = Head(weight, bias, **settings)
    mix_T = torch.linspace(-1, 1, 1061, dtype=torch.float64)
    results = []
    for function in (token_logprobs, plainly):
        logprobs_T, entropy_T = function(head, hidden, targets, temperature)
        (logprobs_T * mix_T + entropy_T * mix_T.flip(0)).sum().backward()
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        results.append([logprobs_T, entropy_T, *(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)])
        for leaf in leaves:
            leaf.grad = None
    assert len(results[0]) == 2 + 2 + (bias is not None)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradients_of_logprobs_alone_and_of_entropy_alone():
    hidden, weight, _, targets = parts(40, 30)
    for place in (0, 1):
        ours = torch.autograd.grad(token_logprobs(Head(weight), hidden, targets)[place].sum(), (hidden, weight))
        theirs = torch.autograd.grad(plainly(Head(weight), hidden, targets, 1.0)[place].sum(), (hidden, weight))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_frozen_weights_get_no_gradient():
    hidden, weight, bias, targets = parts(4, 9, bias=True)
    assert bias is not None
    head = Head(weight.detach(), bias.detach())
    token_logprobs(head, hidden, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert head.weight_VH.grad is None
    with torch.no_grad():
        assert not token_logprobs(Head(weight), hidden, targets)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_give_fp32_results(dtype: torch.dtype):
    hidden, weight, _, targets = parts(200, 3000, 32, dtype=dtype, spread=0.5)
    logprobs_T, entropy_T = token_logprobs(Head(weight), hidden, targets, 0.9)
    (logprobs_T.mean() + 0.1 * entropy_T.mean()).backward()
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    ours, grads = (logprobs_T, entropy_T), (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    theirs = plainly(Head(weight), hidden, targets, 0.9)
    (theirs[0].mean() + 0.1 * theirs[1].mean()).backward()
    narrow = dtype == torch.bfloat16
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4e-2 if narrow else 1e-5)
    for a, b in zip(grads, (hidden.grad, weight.grad), strict=True):
        assert a is not None
        assert b is not None
        error = (a - b).norm() / b.norm()
        assert error < (2e-2 if narrow else 1e-5)


def test_extreme_logits_stay_finite():
    weight = torch.eye(4) * torch.tensor([1e4, -1e4, 0.0, 1e4])
    hidden = torch.ones(3, 4, requires_grad=True)
    logprobs_T, entropy_T = token_logprobs(Head(weight), hidden, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(logprobs_T, torch.tensor([-0.693147, -20000.693, -10000.693]))
    torch.testing.assert_close(entropy_T, torch.full((3,), 0.693147))
    (logprobs_T + entropy_T).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_no_tokens_give_no_logprobs():
    logprobs_T, entropy_T = token_logprobs(
        Head(torch.randn(9, 4)), torch.empty(0, 4), torch.empty(0, dtype=torch.int64)
    )
    assert logprobs_T.shape == entropy_T.shape == (0,)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "cohere", "granite", "phi", "gpt-oss"])
def test_the_head_of_a_model_gives_the_models_logits(family: str):
    model = plain(family)
    ids = tokens(12, 1)
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    with torch.no_grad():
        hidden_TH = decoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        ours, theirs = head_of(model).logits(hidden_TH), logits_of(model, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.01


def test_the_head_of_a_model_with_a_text_part_reads_the_text_parts_settings():
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 7.0}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text | heads, vision_config=vision, image_token_index=49, boi_token_index=48)
    )
    assert head_of(model).softcap == 7.0


def test_a_head_that_is_no_linear_layer_is_refused():
    model = plain("llama")
    model.lm_head = nn.Sequential(nn.Linear(64, 300))
    with pytest.raises(ModelError, match="the model's head is Sequential"):
        head_of(model)
