"""Questions for recipes/quickstart.yaml: which of some numbers is the largest?"""

from __future__ import annotations

import random
from collections.abc import Iterator


def rows(count: int = 3000, numbers: int = 3, digits: int = 3, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` different questions with their answers. The largest number stands at each place equally often."""
    drawn = random.Random(seed)
    asked: set[tuple[int, ...]] = set()
    while len(asked) < count:
        choice = tuple(drawn.sample(range(10 ** (digits - 1), 10**digits), numbers))
        if choice not in asked:
            asked.add(choice)
            shown = ", ".join(str(number) for number in choice)
            yield {"prompt": f"Which of these numbers is the largest? {shown}", "answer": str(max(choice))}
