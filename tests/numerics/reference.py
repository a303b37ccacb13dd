"""The formats once more, number by number in Python's exact fractions, from the text of the standards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
"""By code: the last bit of a code's place in the list is the last bit of its mantissa."""
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest(value: Fraction, levels: Sequence[Fraction]) -> Fraction:
    """Of ascending non-negative levels, saturating, ties to the level of even place."""
    size = min(abs(value), levels[-1])
    place = min(range(len(levels)), key=lambda i: (abs(levels[i] - size), i % 2))
    return levels[place] if value >= 0 else -levels[place]


def exponent(amax: Fraction, scale: str) -> int:
    """log2 of an MXFP4 block's scale, found by search."""
    fits: dict[str, Callable[[int], bool]] = {
        "floor": lambda k: amax < Fraction(2) ** (k + 3),
        "rceil": lambda k: amax <= 6 * Fraction(2) ** k,
        "ceil": lambda k: amax <= 4 * Fraction(2) ** k,
    }
    return next(k for k in range(-127, 128) if fits[scale](k))


def mxfp4(row: Sequence[float], scale: str = "floor") -> list[float]:
    """A row of numbers, in blocks of 32."""
    result: list[float] = []
    for start in range(0, len(row), 32):
        block = [Fraction(x) for x in row[start : start + 32]]
        amax = max(map(abs, block))
        unit = Fraction(2) ** exponent(amax, scale) if amax else Fraction(1)
        result += [float(nearest(x / unit, E2M1) * unit) for x in block]
    return result


def nvfp4(row: Sequence[float], top: float, rounded: Callable[[float], float]) -> list[float]:
    """A row in blocks of 16, of a tensor whose largest magnitude is `top`; `rounded` is to the precision computed in."""
    result: list[float] = []
    outer = rounded(top / 2688)
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        ratio = rounded(rounded(max(map(abs, block)) / 6) / outer) if outer else 0.0
        unit = rounded(float(nearest(Fraction(ratio), E4M3)) * outer)
        codes = [nearest(Fraction(rounded(x / unit)), E2M1) if unit else Fraction(0) for x in block]
        result += [rounded(math.copysign(float(code), x) * unit) for code, x in zip(codes, block, strict=True)]
    return result
