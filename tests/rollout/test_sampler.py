"""Counter-based random numbers and the draw: frequencies, edges, and what each cut leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.rollout.sampler import sample, uniforms
from lockstep.types import Sampling

DRAWS, FEWER = 100_000, 30_000
LAST = 1 - 2.0**-53
"""The largest number below 1, and the largest that `uniforms` can give."""


def draw(logits_V: Tensor, sampling: Sampling, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of one distribution for many numbers, in chunks."""
    tokens, logprobs = [], []
    for chunk in np.array_split(uniform, max(1, len(uniform) // 4000)):
        rows = logits_V.float().expand(len(chunk), -1).clone()
        found, values = sample(rows, sampling, torch.from_numpy(chunk))
        tokens.append(found.numpy())
        logprobs.append(values.numpy())
    return np.concatenate(tokens), np.concatenate(logprobs)


def spread(size: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def evenly(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


# --- the numbers ----------------------------------------------------------------------------------------------------
def test_the_numbers_follow_their_formula_and_nothing_of_the_process():
    here = uniforms([0, 1, 2**63 - 1], [0, 7, 4096]).tolist()
    assert here == [twice_mixed(0, 0), twice_mixed(1, 7), twice_mixed(2**63 - 1, 4096)]


def twice_mixed(seed: int, position: int) -> float:
    """splitmix64 in Python's own integers. If this changes, every sample of every stored run changes."""
    x = seed + position * 0x9E3779B97F4A7C15
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return (x >> 11) / 2**53


def test_the_numbers_do_not_depend_on_what_else_is_asked():
    seeds, positions = list(range(50)), list(range(100, 150))
    together = uniforms(seeds, positions)
    alone = [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_neighbours_are_uniform_and_uncorrelated(axis: str):
    counted = np.arange(DRAWS)
    fixed = np.full(DRAWS, 12345)
    u = uniforms(counted, fixed) if axis == "seeds" else uniforms(fixed, counted)
    assert u.dtype == np.float64
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert len(np.unique(u)) == DRAWS
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / DRAWS)
    counts = np.bincount((u * 1000).astype(int), minlength=1000)
    assert chi_square(counts, np.full(1000, DRAWS / 1000)) < bound(999)
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / math.sqrt(DRAWS)
    pairs = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
    assert chi_square(pairs, np.full(256, (DRAWS - 1) / 256)) < bound(255)


def test_seed_and_position_are_not_interchangeable():
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(u)) == u.size
    table = u.reshape(200, 200)
    assert abs(np.corrcoef(table.ravel(), table.T.ravel())[0, 1]) < 4 / 200


# --- the draw -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "sampling"),
    [
        (300, Sampling(1)),
        (1000, Sampling(1, temperature=0.6)),
        (257, Sampling(1, temperature=1.7)),
        (640, Sampling(1, top_k=20)),
        (640, Sampling(1, top_p=0.8)),
        (640, Sampling(1, min_p=0.02)),
        (640, Sampling(1, temperature=0.8, top_k=60, top_p=0.9, min_p=0.01)),
    ],
)
def test_frequencies_match_the_distribution(size: int, sampling: Sampling):
    logits_V = spread(size)
    expected_V = distribution(logits_V, sampling)
    found, logprobs = draw(logits_V, sampling, uniforms(range(FEWER), [size] * FEWER))
    counts = np.bincount(found, minlength=size)
    assert counts[expected_V == 0].sum() == 0
    kept = expected_V * FEWER >= 5
    merged_counts = np.append(counts[kept], counts[~kept].sum())
    merged_expected = np.append(expected_V[kept], expected_V[~kept].sum()) * FEWER
    if merged_expected[-1] < 5:
        merged_counts, merged_expected = merged_counts[:-1], merged_expected[:-1]
    assert chi_square(merged_counts, merged_expected) < bound(len(merged_counts) - 1)
    np.testing.assert_allclose(logprobs, np.log(expected_V[found]), atol=2e-6)


def distribution(logits_V: Tensor, sampling: Sampling) -> np.ndarray:
    """What is to be drawn from, by loops over sorted float64 probabilities."""
    scaled = logits_V.double().numpy() / sampling.temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if sampling.top_k:
        order = order[: sampling.top_k]

    def normalised() -> dict[int, float]:
        total = math.fsum(math.exp(scaled[i]) for i in order)
        return {i: math.exp(scaled[i]) / total for i in order}

    kept, mass = [], 0.0
    for i, p in normalised().items():
        if mass < sampling.top_p:
            kept.append(i)
        mass += p
    order = kept
    probs = normalised()
    order = [i for i in order if probs[i] >= sampling.min_p * probs[order[0]]]
    result = np.zeros(len(scaled))
    for i, p in normalised().items():
        result[i] = p
    return result


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """Exceeded by chance about once in 30 000 times."""
    return degrees + 4 * math.sqrt(2 * degrees) + 8


def test_equal_logits_give_equal_shares_exactly():
    """With 512 equal tokens, the numbers k / 512 up to the next belong to token k."""
    edges = np.arange(512) / 512
    just_before = np.nextafter(np.append(edges[1:], 1.0), 0)
    for numbers in (edges, evenly(512), just_before):
        found, logprobs = draw(torch.zeros(512), Sampling(1), numbers)
        assert found.tolist() == list(range(512))
        np.testing.assert_allclose(logprobs, -math.log(512), rtol=1e-6)


@given(
    size=st.sampled_from([1, 2, 255, 256, 257, 300, 511, 512, 513, 700, 1024]),
    seed=st.integers(0, 2**20),
    live=st.integers(1, 6),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_tokens_without_mass_are_never_drawn(size: int, seed: int, live: int, scale: float):
    generator = np.random.default_rng(seed)
    alive = generator.choice(size, min(live, size), replace=False)
    logits_V = torch.full((size,), -torch.inf)
    logits_V[torch.from_numpy(alive)] = torch.from_numpy(generator.normal(size=len(alive)) * scale).float()
    numbers = np.concatenate([[0.0, LAST, np.nextafter(0, 1), 0.5], generator.random(20)])
    found, logprobs = draw(logits_V, Sampling(1), numbers)
    assert set(found) <= set(alive.tolist())
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    # The first and the last number fall to the first and the last token that has mass in fp32.
    mass = (logits_V - logits_V.max()).exp()
    assert found[0] == int(mass.nonzero()[0])
    assert found[1] == int(mass.nonzero()[-1]) or mass[found[1] + 1 :].sum() < 1e-6


def test_the_edges_are_safe_for_ordinary_logits():
    """Sums of blocks are rounded to fp32: the goal may pass the end of a block, but never leave the vocabulary."""
    for seed in range(200):
        size = 200 + 17 * seed
        found, logprobs = draw(spread(size, seed, 5.0), Sampling(1), np.array([0.0, LAST, 1 - 1e-12, 1 - 1e-8]))
        assert found.min() >= 0
        assert found.max() < size
        assert np.isfinite(logprobs).all()


def test_tokens_far_below_are_as_good_as_impossible():
    logits_V = torch.zeros(400)
    logits_V[100:] = -200.0
    found, _ = draw(logits_V, Sampling(1), np.append(evenly(1000), [0.0, LAST]))
    assert found.max() == 99


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1, top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1, top_p=0.69), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1, top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(1, min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1, min_p=0.76), [1, 0, 0, 0]),
        (Sampling(1, temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(1, temperature=0.5, top_k=3, top_p=0.8), [16 / 25, 9 / 25, 0, 0]),
        # top_p is of what top_k left: 4/7 + 3/7 reach 0.9 only together
        (Sampling(1, top_k=2, top_p=0.9), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_each_cut_by_hand(sampling: Sampling, expected: list[float]):
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log() + 3.0
    found, logprobs = draw(logits_V, sampling, evenly(5040))
    shares = np.bincount(found, minlength=4) / 5040
    np.testing.assert_allclose(shares, expected, atol=2 / 5040)
    np.testing.assert_allclose(np.exp(logprobs), np.array(expected)[found], rtol=1e-5)


def test_greedy_takes_the_first_of_the_most_likely_and_reports_the_models_own_logprob():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    expected = [float(torch.tensor(row).double().log_softmax(-1).max()) for row in logits.tolist()]
    found, logprobs = sample(logits, Sampling(1, temperature=0.0), torch.tensor([0.9, 0.9], dtype=torch.float64))
    assert found.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)])
def test_a_row_does_not_look_at_the_others(sampling: Sampling):
    logits = torch.stack([spread(700, seed) for seed in range(9)])
    numbers = torch.from_numpy(uniforms(range(9), [3] * 9))
    together = sample(logits.clone(), sampling, numbers)
    for row in range(9):
        tokens, logprobs = sample(logits[row : row + 1].clone(), sampling, numbers[row : row + 1])
        assert tokens[0] == together[0][row]
        assert logprobs[0] == together[1][row]
