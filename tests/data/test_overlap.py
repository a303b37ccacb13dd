from __future__ import annotations

import random
import re

from lockstep.data.overlap import NGRAM, Overlap, measure
from lockstep.types import Prompt


def prompts(name: str, *texts: str) -> list[Prompt]:
    return [Prompt(f"{name}/{n}", ({"role": "user", "content": text},), "1") for n, text in enumerate(texts, start=1)]


LONG = "find the sum of all positive integers n such that n squared plus one is prime"  # 16 words


def test_three_grades_of_sameness() -> None:
    train = prompts("t", "one question", "Two  QUESTIONS", f"Well: {LONG.replace(' ', ', ')}.", "apart")
    held = prompts("h", "one question", "two questions", LONG, "apart from this", "ONE question")
    assert measure("t", train, "h", held) == Overlap(
        "t", "h", 5, 1, 3, 4, (("t/1", "h/1"), ("t/1", "h/5"), ("t/2", "h/2"), ("t/3", "h/3"))
    )


def test_twelve_words_in_a_row_are_too_few() -> None:
    words = LONG.split()
    for size, found in ((12, 0), (13, 1)):
        other = "completely different start " + " ".join(words[1 : 1 + size]) + " and end"
        assert measure("t", prompts("t", other), "h", prompts("h", LONG)).ngram == found


def test_the_roles_of_turns_matter_to_exact_alone() -> None:
    one = [Prompt("t/1", ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}), "1")]
    other = [Prompt("h/1", ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}), "1")]
    found = measure("t", one, "h", other)
    assert (found.exact, found.normalised) == (0, 1)


def test_against_brute_force() -> None:
    rng = random.Random(3)

    def text() -> str:
        return " ".join(rng.choices(["a", "B", "c,", "d"], k=rng.randint(1, 17)))

    train, held = prompts("t", *(text() for _ in range(120))), prompts("h", *(text() for _ in range(120)))
    texts = [prompt.messages[0]["content"] for prompt in held]
    longest = sorted(texts, key=len)[-20:]
    train += prompts("s", *texts[:8], *(text.replace(" ", "\n ").upper() for text in longest[:10]))
    train += prompts("n", *(f"start {text} end" for text in longest[10:]))

    def grams(prompt: Prompt) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", prompt.messages[0]["content"].lower())
        return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}

    def plain(prompt: Prompt) -> str:
        return " ".join(prompt.messages[0]["content"].lower().split())

    exact = sum(any(t.messages == h.messages for t in train) for h in held)
    normalised = sum(any(plain(t) == plain(h) for t in train) for h in held)
    ngram = sum(any(plain(t) == plain(h) or grams(t) & grams(h) for t in train) for h in held)
    found = measure("t", train, "h", held)
    assert (found.exact, found.normalised, found.ngram) == (exact, normalised, ngram)
    assert 8 <= exact < normalised < ngram < 120
