"""Experts by grouped products, by Triton's interpreter: values and gradients are those of transformers' loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.interpreter import interpreted
from tests.learner.models import plain

pytest.importorskip("triton")


def experts(family: str) -> Any:
    model = plain(family, seed=3)
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))


def asked(module: Any, tokens: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).requires_grad_()
    count = module.num_experts
    index = torch.stack([torch.randperm(count, generator=generator)[:top] for _ in range(tokens)])
    weight = torch.rand(tokens, top, generator=generator).requires_grad_()
    return x, index, weight


def close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-6, what


def values_and_gradients(family: str) -> None:
    from lockstep.models.expert_kernels import use_expert_kernels

    module = experts(family)
    for tokens, top in ((1, 2), (41, 2)):
        x, index, weight = asked(module, tokens, top)
        inputs = [x, weight, *module.parameters()]
        theirs = type(module).forward(module, x, index, weight)
        mix = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
        wanted = torch.autograd.grad((theirs * mix).sum(), inputs)
        holder = nn.ModuleList([module])
        assert use_expert_kernels(holder) == 1
        ours = module(x, index, weight)
        close(ours, theirs, "in training")
        for a, b in zip(torch.autograd.grad((ours * mix).sum(), inputs), wanted, strict=True):
            close(a, b, "gradient")
        with torch.no_grad():
            close(module(x, index, weight), theirs, "in decoding")
        del module.forward


def only_what_is_reached() -> None:
    """Experts that no token reaches hold NaN: they are not read, nor is anything of them written."""
    from lockstep.models.expert_kernels import sort_rows, use_expert_kernels

    module = experts("qwen3-moe")
    x, index, weight = asked(module, 20, 2)
    index = torch.where(index == 3, (index.flip(1) + 1) % 3, index) % 3  # experts 0 to 2
    index[:, 1] = (index[:, 0] + 1) % 3
    with torch.no_grad():
        expected = type(module).forward(module, x, index, weight)
        module.gate_up_proj[3] = torch.nan
        module.down_proj[3] = torch.nan
        use_expert_kernels(nn.ModuleList([module]))
        close(module(x, index, weight), expected, "with an expert of NaN")
    rows = sort_rows(index, 4)
    used = rows.expert_P[rows.expert_P >= 0]
    assert used.tolist() == sorted(used.tolist())
    assert set(used.tolist()) == {0, 1, 2}
    assert rows.bounds_E.tolist()[-1] == 40
    assert rows.bounds_E.tolist()[3] == 40
    flat = index.reshape(-1)
    for expert, start, end in zip(rows.expert_P, rows.start_P, rows.end_P, strict=True):
        if expert >= 0:
            assert (flat[rows.order_R[start:end]] == expert).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_values_and_gradients_are_those_of_the_loop(family: str) -> None:
    interpreted(values_and_gradients, family)


def test_experts_that_nothing_reaches_are_not_read() -> None:
    interpreted(only_what_is_reached)


def test_it_is_off_unless_asked() -> None:
    from tests.learner.models import twin

    model = twin(plain("qwen3-moe"))
    assert all("forward" not in m.__dict__ for m in model.modules())
