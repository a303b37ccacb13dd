"""The soft penalty for long replies (DAPO, arXiv 2503.14476, §3.4, eq. 13)."""

from __future__ import annotations


def overlong_penalty(tokens: int, max_tokens: int, *, buffer: int, penalty: float) -> float:
    """Return the amount to subtract from the reward of a reply with `tokens` tokens: 0 up to max_tokens - buffer, then rising
    linearly to `penalty` at max_tokens. A buffer of 0 means no penalty.
    """
    if buffer == 0:
        return 0.0
    over = tokens - (max_tokens - buffer)
    return penalty * min(max(over, 0) / buffer, 1.0)
