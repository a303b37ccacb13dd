"""Decodes replies from a table of the bytes of a tokenizer's tokens, in a fraction of the tokenizer's own time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
        self._bytes = [b""] * (1 + max(tokens, default=0))
        for id, token in tokens.items():
            coded = known.issuperset(token)
            self._bytes[id] = token.translate(byte_of).encode("latin-1") if coded else token.encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those that are no tokens have none."""
        try:
            found = b"".join(map(self._bytes.__getitem__, ids))
        except IndexError:  # a model may have more ids than its tokenizer
            return self.decode([id for id in ids if id < len(self._bytes)])
        return found.decode("utf-8", "replace")
