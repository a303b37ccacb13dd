"""Decodes replies from a table of the bytes of a tokenizer's tokens, in a fraction of the tokenizer's own time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenBytes:
    """Decodes ids as a tokenizer whose text is the bytes of its tokens, one after the other."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        """Take the tokens. `special`: special ones are shown."""
        from tokenizers.pre_tokenizers import ByteLevel

        characters = sorted(ByteLevel.alphabet())
        # the other bytes have characters after these, in their order
        own = [ord(one) for one in characters if ord(one) < 256]
        byte_of = dict(zip(map(ord, characters), [*own, *sorted({*range(256)} - {*own})], strict=True))
        tokens: dict[int, str] = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=False).items()}
        for id, added in tokenizer.get_added_tokens_decoder().items():
            tokens[id] = "" if added.special and not special else added.content
        known = frozenset(characters)
        bytes_of = [b""] * (2 + max(tokens, default=0))
        for id, token in tokens.items():
            coded = known.issuperset(token)
            bytes_of[id] = token.translate(byte_of).encode("latin-1") if coded else token.encode()
        self._bytes = np.frombuffer(b"".join(bytes_of), np.uint8)
        self._sizes = np.array([len(one) for one in bytes_of], np.int64)
        self._ends = np.cumsum(self._sizes)

    def decode(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of replies; ids that are no tokens have none."""
        lengths = [len(ids) for ids in many]
        id_T = np.fromiter(chain.from_iterable(many), np.int64, sum(lengths))
        # A model may have more ids than its tokenizer: the last of the table has no bytes.
        id_T = np.minimum(id_T, len(self._sizes) - 1)
        sizes_T = self._sizes[id_T]
        ends_T = np.cumsum(sizes_T)
        place = np.repeat(self._ends[id_T] - ends_T, sizes_T) + np.arange(sizes_T.sum())
        found = self._bytes[place].tobytes()
        bounds = np.concatenate([[0], ends_T])[np.cumsum([0, *lengths])].tolist()
        return [found[start:end].decode("utf-8", "replace") for start, end in pairwise(bounds)]
