"""Chooses the held-out rows, and checks that training does not ask their questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.data.questions import question_digest, raw_digest
from lockstep.errors import DataError
from lockstep.types import Prompt

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Split:
    """Two sets without a question in common."""

    train: tuple[Prompt, ...]
    """In the order given."""
    heldout: tuple[Prompt, ...]
    """In hash order, each question once."""
    dropped: int
    """Rows that repeat a held-out question: in neither set."""


def split(prompts: Sequence[Prompt], heldout: int, where: str = "") -> Split:
    """Hold out the first `heldout` questions in the order of their hashes; all other questions train.

    Which questions are held out depends on their texts alone, not on the order of the rows or a seed. Raises DataError
    naming `where` if that leaves nothing to train on.
    """
    digests = [question_digest(prompt.messages) for prompt in prompts]
    first: dict[bytes, Prompt] = {}
    for digest, prompt in zip(digests, prompts, strict=True):
        first.setdefault(digest, prompt)
    if heldout >= len(first):
        raise DataError(
            f"{heldout} questions are to be held out, which leaves none to train on: there are {len(first)} different ones",
            where=where,
            fix="set task.heldout_rows lower, or give a separate file of held-out questions in task.heldout.id_probe",
        )
    chosen = sorted(first)[:heldout]
    held = set(chosen)
    train = tuple(prompt for digest, prompt in zip(digests, prompts, strict=True) if digest not in held)
    return Split(train, tuple(first[digest] for digest in chosen), len(prompts) - len(train) - heldout)


def refuse_overlap(train: Sequence[Prompt], heldout: Sequence[Prompt], where: str) -> None:
    """Raise DataError if training asks a held-out question; names the first few."""
    asked: dict[bytes, Prompt] = {}
    for prompt in train:
        asked.setdefault(question_digest(prompt.messages), prompt)
    digests = ((question_digest(held.messages), held) for held in heldout)
    same = [f"{held.id} = {asked[digest].id} ({_start(held)!r})" for digest, held in digests if digest in asked]
    if not same:
        return
    names = "; ".join(same[:_SHOWN])
    raise DataError(
        f"{len(same)} of {len(heldout)} held-out questions are also training questions: {names}",
        where=where,
        fix="remove these questions from the training data or from the held-out data",
    )


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows that ask what an earlier row of the same set asked."""

    rows: int
    contrary: tuple[tuple[Prompt, Prompt], ...]
    """Pairs of an earlier row and a later one with the same text and another answer."""


def repeats(prompts: Sequence[Prompt]) -> Repeats:
    """Count rows that repeat a question. A question with two answers rewards either of them at random."""
    first: dict[bytes, Prompt] = {}
    pairs = [(first.setdefault(question_digest(prompt.messages), prompt), prompt) for prompt in prompts]
    return Repeats(len(pairs) - len(first), tuple((one, other) for one, other in pairs if _contrary(one, other)))


def _contrary(one: Prompt, other: Prompt) -> bool:
    """Return whether exactly the same text has two answers: case and form may be what is asked about."""
    if one.answer.strip() == other.answer.strip() or raw_digest(one.messages) != raw_digest(other.messages):
        return False
    try:
        return float(one.answer) != float(other.answer)
    except ValueError:
        return True


def _start(prompt: Prompt) -> str:
    text = prompt.messages[-1]["content"]
    return text if len(text) <= 60 else text[:60] + "…"
