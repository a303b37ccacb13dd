"""The largest singular values of many matrices together, by Chebyshev-filtered subspace iteration (Zhou et al. 2006).

A product with the Gram matrix of the smaller side is cheap compared with an SVD, so flat spectra (where plain randomised SVD is
off by several percent) are handled by more multiplications: a polynomial that is small up to the last Ritz value and large
above it turns a random subspace into that of the largest values in a few rounds.

Legend: N matrices, O rows, I columns, S the smaller of both, K columns of the subspace, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEGREE = 6
"""Degree of the polynomial."""
ROUNDS = 12
SETTLED = 1e-3
"""Convergence limit: largest relative change of a squared singular value in the last round."""
GRAM_BYTES = 2 * 2**30
"""Bytes of Gram matrices held at a time."""


@dataclass(frozen=True, slots=True)
class TopSingular:
    """Low-rank factors, fp32: up_NOR · down_NRI is the best approximation of rank R; both carry the root of the singular
    values.
    """

    up_NOR: Tensor
    down_NRI: Tensor
    values_NR: Tensor


@torch.no_grad()
def top_singular(weights: Sequence[Tensor], rank: int) -> TopSingular:
    """Factor matrices of one shape [O, I] with min(O, I) >= rank. The same input gives the same bits on the same machine."""
    small = min(weights[0].shape)
    at_once = max(1, GRAM_BYTES // (4 * small * small))
    parts = [_some(weights[start : start + at_once], rank) for start in range(0, len(weights), at_once)]
    return TopSingular(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("up_NOR", "down_NRI", "values_NR"))
    )


@torch.no_grad()
def exact_values(weight: Tensor, rank: int) -> Tensor:
    """Return the largest singular values [R] by a full decomposition in fp64."""
    values_S: Tensor = torch.linalg.eigvalsh(_gram(weight.double()))
    return values_S.flip(-1)[:rank].clamp_min(0).sqrt()


def _some(weights: Sequence[Tensor], rank: int) -> TopSingular:
    wide_NOI = torch.stack([weight.float() for weight in weights])
    if _columns(min(wide_NOI.shape[1:]), rank) > min(wide_NOI.shape[1:]) // 4:
        left_NOS, values_NS, right_NSI = torch.linalg.svd(wide_NOI, full_matrices=False)
        root_NR = values_NS[:, :rank].sqrt()
        return TopSingular(
            left_NOS[..., :rank] * root_NR[:, None], right_NSI[:, :rank] * root_NR[..., None], root_NR**2
        )
    rows_first = wide_NOI.shape[1] <= wide_NOI.shape[2]
    wide_NSL = wide_NOI if rows_first else wide_NOI.mT
    left_NSR, values_NR = _subspace(_gram(wide_NSL), rank)
    root_NR = values_NR.sqrt().clamp_min(torch.finfo(torch.float32).tiny ** 0.25)
    near_NSR = left_NSR * root_NR[:, None]
    far_NRL = (left_NSR.mT @ wide_NSL) / root_NR[..., None]
    return TopSingular(near_NSR if rows_first else far_NRL.mT, far_NRL if rows_first else near_NSR.mT, values_NR)


def _gram(wide_NSL: Tensor) -> Tensor:
    """Return W·Wᵀ of the smaller side."""
    if wide_NSL.shape[-2] > wide_NSL.shape[-1]:
        wide_NSL = wide_NSL.mT
    return wide_NSL @ wide_NSL.mT


def _subspace(gram_NSS: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return eigenvectors [N, S, R] and roots of the eigenvalues [N, R], largest first."""
    size = gram_NSS.shape[-1]
    columns = _columns(size, rank)
    generator = torch.Generator().manual_seed(0)
    start_SK = torch.randn(size, columns, generator=generator).to(gram_NSS.device)
    basis_NSK, ritz_NK = _ritz(gram_NSS, gram_NSS @ start_SK.expand(len(gram_NSS), -1, -1))
    for _ in range(ROUNDS):
        before_NR = ritz_NK[:, :rank]
        basis_NSK, ritz_NK = _ritz(gram_NSS, _filtered(gram_NSS, basis_NSK, ritz_NK))
        change = (ritz_NK[:, :rank] - before_NR).abs() / ritz_NK[:, :rank].clamp_min(1e-30)
        if float(change.max()) < SETTLED:
            break
    return basis_NSK[..., :rank], ritz_NK[:, :rank].clamp_min(0).sqrt().float()


def _columns(size: int, rank: int) -> int:
    """Return the columns of the subspace: more than the rank, so that the last wanted value is far from the first dropped one."""
    return min(size, rank + max(16, rank))


def _filtered(gram_NSS: Tensor, basis_NSK: Tensor, ritz_NK: Tensor) -> Tensor:
    """Return a Chebyshev polynomial of G, times the basis: at most 1 on [0, last Ritz value], scaled to 1 at the largest."""
    half = (ritz_NK[:, -1] / 2).float().clamp_min(1e-30)[:, None, None]
    first = half / (ritz_NK[:, 0].float()[:, None, None] - half).clamp_min(half / 4)
    older, scale = basis_NSK, first
    newer = (torch.bmm(gram_NSS, basis_NSK) - half * basis_NSK) * (first / half)
    for _ in range(DEGREE - 1):
        scale_next = 1 / (2 / first - scale)
        newest = (torch.bmm(gram_NSS, newer) - half * newer) * (2 * scale_next / half) - (scale * scale_next) * older
        older, newer, scale = newer, newest, scale_next
    return newer


def _ritz(gram_NSS: Tensor, block_NSK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block's orthonormal Ritz vectors, fp32, and Ritz values, fp64, largest first."""
    basis_NSK = _orthonormal(block_NSK.double()).float()
    small_NKK = basis_NSK.double().mT @ torch.bmm(gram_NSS, basis_NSK).double()
    # Small and batched: a CPU is faster, and gives the same bits for every GPU.
    values_NK, vectors_NKK = torch.linalg.eigh(((small_NKK + small_NKK.mT) / 2).cpu())
    rotation_NKK = vectors_NKK.flip(-1).to(gram_NSS.device)
    return (basis_NSK.double() @ rotation_NKK).float(), values_NK.flip(-1).to(gram_NSS.device)


def _orthonormal(block_NSK: Tensor) -> Tensor:
    """Orthonormalise by Cholesky, twice, which a GPU does for all matrices together; by QR if columns are nearly dependent."""
    for _ in range(2):
        block_NSK = block_NSK / block_NSK.norm(dim=-2, keepdim=True).clamp_min(1e-300)
        factor_NKK, failed_N = torch.linalg.cholesky_ex(block_NSK.mT @ block_NSK)
        if bool(failed_N.any()):
            basis_NSK: Tensor = torch.linalg.qr(block_NSK).Q
            return basis_NSK
        block_NSK = torch.linalg.solve_triangular(factor_NKK.mT, block_NSK, upper=True, left=False)
    return block_NSK
