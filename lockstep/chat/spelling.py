"""The bytes of a tokenizer's tokens, by which replies are decoded in a fraction of the time that the tokenizer itself takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Spelling:
    """Decodes ids as a tokenizer whose text is the bytes of its tokens, one after the other."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        """Take the tokens. `special`: special ones are shown."""
        from tokenizers.pre_tokenizers import ByteLevel

        signs = sorted(ByteLevel.alphabet())
        own = [ord(sign) for sign in signs if ord(sign) < 256]  # the other bytes have signs after these, in their order
        byte_of = dict(zip(map(ord, signs), [*own, *sorted({*range(256)} - {*own})], strict=True))
        tokens: dict[int, str] = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=False).items()}
        for id, added in tokenizer.get_added_tokens_decoder().items():
            tokens[id] = "" if added.special and not special else added.content
        known = frozenset(signs)
        self._bytes = [b""] * (1 + max(tokens, default=0))
        for id, token in tokens.items():
            spelled = known.issuperset(token)
            self._bytes[id] = token.translate(byte_of).encode("latin-1") if spelled else token.encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those that are no tokens have none."""
        try:
            spelled = b"".join(map(self._bytes.__getitem__, ids))
        except IndexError:  # a model may have more ids than its tokenizer
            return self.decode([id for id in ids if id < len(self._bytes)])
        return spelled.decode("utf-8", "replace")
