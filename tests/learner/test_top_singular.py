"""Singular values against full decompositions, on spectra that a plain randomised SVD gets wrong."""

from __future__ import annotations

import pytest
import torch

from lockstep.learner.top_singular import exact_values, top_singular


def matrices(shape: tuple[int, int], spectrum: str, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    small = min(shape)
    found = []
    for _ in range(count):
        noise = torch.randn(shape, generator=generator)
        if spectrum == "decaying":
            left, _ = torch.linalg.qr(torch.randn(shape[0], small, generator=generator))
            right, _ = torch.linalg.qr(torch.randn(shape[1], small, generator=generator))
            noise = left * torch.logspace(2, -3, small) @ right.T
        found.append(noise)
    return found


@pytest.mark.parametrize("spectrum", ["flat", "decaying"])
@pytest.mark.parametrize(("shape", "rank"), [((400, 300), 8), ((300, 500), 16), ((40, 64), 6), ((64, 12), 12)])
def test_values_and_approximation_are_the_best(shape: tuple[int, int], rank: int, spectrum: str) -> None:
    weights = matrices(shape, spectrum)
    top = top_singular(weights, rank)
    for place, weight in enumerate(weights):
        exact_R = torch.linalg.svdvals(weight.double())
        torch.testing.assert_close(top.values_NR[place].double(), exact_R[:rank], rtol=1e-3, atol=0)
        torch.testing.assert_close(exact_values(weight, rank), exact_R[:rank], rtol=1e-6, atol=1e-9)
        rest = (weight.double() - top.up_NOR[place].double() @ top.down_NRI[place].double()).norm() ** 2
        least = (exact_R[rank:] ** 2).sum()
        assert rest <= least * 1.001 + 1e-6 * weight.norm() ** 2
        lengths = [top.up_NOR[place].norm(dim=0), top.down_NRI[place].norm(dim=1)]
        torch.testing.assert_close(lengths[0], lengths[1], rtol=1e-3, atol=1e-3)


def test_plain_randomised_svd_would_not_do() -> None:
    """The case that the polynomial is for: torch's own is off by more than the tolerance."""
    (weight,) = matrices((400, 300), "flat", 1)
    _, rough, _ = torch.svd_lowrank(weight, 8, niter=2)
    exact = exact_values(weight, 8)
    assert ((rough.double() - exact).abs() / exact).max() > 0.01
    ours = top_singular([weight], 8).values_NR[0].double()
    assert ((ours - exact).abs() / exact).max() < 1e-4


def test_a_stack_is_each_of_its_matrices_and_comes_out_again_the_same() -> None:
    weights = [w.bfloat16() for w in matrices((200, 320), "flat")]
    together = top_singular(weights, 8)
    again = top_singular(weights, 8)
    assert torch.equal(together.up_NOR, again.up_NOR)
    for place, weight in enumerate(weights):
        alone = top_singular([weight], 8)
        torch.testing.assert_close(alone.values_NR[0], together.values_NR[place], rtol=1e-5, atol=0)
