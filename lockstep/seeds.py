"""Random seeds from keys, such as step, prompt and sample: a key gives the same seed in every process and on every machine."""

from __future__ import annotations

import hashlib
from functools import lru_cache

SEED_BITS = 63
"""Seeds are in 0 … 2^63 - 1, so that they fit a signed 64-bit integer."""


def seed_for(*key: int | str) -> int:
    """Return a 63-bit seed for a key such as (run, step, prompt id, sample).

    The parts are encoded with their type and length before hashing (blake2b), so ("1", 2), (1, "2") and ("12",) are three keys.
    Changing the encoding changes every sample of every run: tests pin two values.

    Raises TypeError for a part that is neither an int nor a str, and ValueError for an empty key.

    Example: seed_for("run", 3, "chain_sum/17", 0)
    """
    if not key:
        raise ValueError("seed_for needs at least one part: an empty key would be the same seed everywhere")
    digest = hashlib.blake2b(b"".join(_encode(part) for part in key), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


@lru_cache(maxsize=1 << 14, typed=True)
def _encode(part: int | str) -> bytes:
    # A bool is an int to Python, but True and 1 in one place of a key is more likely a mistake than intended.
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise TypeError(f"a seed's key is made of int and str, got {part!r} of type {type(part).__name__}")
    tag = "s" if isinstance(part, str) else "i"
    # surrogatepass: prompt ids come from users' files and may hold lone surrogates.
    body = str(part).encode("utf-8", "surrogatepass")
    return f"{tag}{len(body)}:".encode() + body
