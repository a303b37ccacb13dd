"""Rows that show the answer format: sums of three terms, with nothing but \\boxed{answer} as the reply.

The questions are not those of the recipes' task, which asks sums of two terms: SFT teaches the form, RL the sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import reasoning_gym


def rows(count: int = 400, seed: int = 7) -> Iterator[dict[str, str]]:
    """`count` different questions with their replies."""
    data = reasoning_gym.create_dataset(
        "chain_sum", size=4 * count, seed=seed, min_terms=3, max_terms=3, min_digits=1, max_digits=1
    )
    questions = {data[i]["question"].strip(): data[i]["answer"] for i in range(4 * count)}
    for question, answer in list(questions.items())[:count]:
        yield {"prompt": question, "answer": f"\\boxed{{{answer}}}"}
