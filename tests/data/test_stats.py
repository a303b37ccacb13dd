from __future__ import annotations

import pytest

from lockstep.data.stats import Lengths, Repeats, lengths, repeats
from lockstep.types import Prompt


def ask(text: str, answer: str = "1", number: int = 0) -> Prompt:
    return Prompt(f"a/{number}", ({"role": "user", "content": text},), answer)


def test_percentiles_are_lengths_that_occur() -> None:
    prompts = [ask("x" * n, number=n) for n in range(1, 101)]
    found = lengths(prompts[::-1], lambda prompt: len(prompt.messages[0]["content"]), limit=90)
    percentiles = ((0, 1), (5, 5), (25, 25), (50, 50), (75, 75), (90, 90), (95, 95), (99, 99), (100, 100))
    assert found == Lengths(percentiles, 50.5, 5050, 10, "a/100")
    (one,) = {tokens for _, tokens in lengths([ask("abc")], lambda prompt: 3).percentiles}
    assert one == 3
    with pytest.raises(ValueError, match="no prompts"):
        lengths([], len)


def test_repeats_and_answers_that_differ() -> None:
    prompts = [ask("a b"), ask("A  b"), ask("a b", "2"), ask("c"), ask("d", "3"), ask("d", "3")]
    assert repeats(prompts) == Repeats(prompts=6, distinct=3, conflicting=1, most=3, answers=3)
