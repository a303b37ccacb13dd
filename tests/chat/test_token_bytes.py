"""Replies are decoded by the bytes of their tokens exactly as the tokenizer decodes them."""

from __future__ import annotations

import random

import pytest
from tokenizers import decoders

from lockstep.chat.chat import ChatFormat
from lockstep.chat.token_bytes import TokenBytes
from lockstep.config.schema import Chat
from tests.chat.toy_tokenizers import chatml


@pytest.mark.parametrize("special", [True, False])
def test_any_ids_have_the_text_that_the_tokenizer_gives_them(special: bool) -> None:
    tokenizer = chatml()
    tokenizer.add_tokens(["two words", "é", "Ġ", "Ġ Ġ", "日本"])
    backend = tokenizer.backend_tokenizer
    decoder, rng = TokenBytes(backend, special=special), random.Random(0)
    single = [id for token, id in backend.get_vocab().items() if len(token) == 1]
    assert len(single) > 200  # nearly all bytes: their texts are mostly no valid UTF-8
    for pool in (range(len(tokenizer) + 9), single):
        replies = [[rng.choice(pool) for _ in range(rng.randrange(40))] for _ in range(300)]
        found = decoder.decode(replies)
        assert decoder.decode([]) == []
        assert found == backend.decode_batch(replies, skip_special_tokens=not special)
        assert any("\ufffd" in text for text in found)


def test_a_tokenizer_whose_text_is_not_its_tokens_side_by_side_decodes_by_itself() -> None:
    tokenizer = chatml()
    ids = tokenizer("answer is", add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.decoder = decoders.Replace("Ġ", "_")
    text = tokenizer.decode(ids)
    assert "_is" in text
    assert ChatFormat(tokenizer, Chat()).read_many([ids]) == [(text, text)]
