"""Generates different questions with reasoning-gym, all for training or all held out.

A bit of a question's hash decides whether it is held out. So a held-out question is held out in every run, whatever the
seeds, and training never asks it, even if the data set has only 200 possible questions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from typing import Any

from lockstep.config import schema
from lockstep.data.questions import question_digest
from lockstep.errors import MachineError, TaskError
from lockstep.seeds import seed_for
from lockstep.text import did_you_mean, reason_of
from lockstep.types import Message, Prompt
from lockstep.verifiers.gym_scores import ANSWER, METADATA, QUESTION
from lockstep.workers.watched import Alive, HungError, run_watched

ITEM_SECONDS = 20.0
"""Time without a question after which a generator is considered hung."""
CHUNK = 500
"""Questions per generator; the next chunk has another seed. Some generators prepare this many when they are created."""
PATIENCE = 2000
"""Draws without a new question, or 20 for each one found if that is more, before the questions count as exhausted."""

EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")
"""Metadata keys that hold one right answer in data sets with several."""
UNSEEDED = ("codeio", "composite", "knight_swap", "list_functions")
"""Data sets of reasoning-gym 0.1.25 that a seed does not determine (codeio also runs code that writes files), or that combine
others (composite).
"""
HASH_SEEDED = (
    "intermediate_integration",
    "isomorphic_strings",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Data sets that depend on the order of Python's sets, which differs between processes unless PYTHONHASHSEED is 0."""


class Side(IntEnum):
    """The two halves into which all questions of a generator are split."""

    TRAIN = 0
    HELDOUT = 1


@dataclass(frozen=True, slots=True)
class Source:
    """A generator with its settings, checked. Example: Source("chain_sum", '{"max_terms": 2}')"""

    dataset: str
    settings: str
    """Settings as JSON with sorted keys, so that a Source can be a key."""


@dataclass(frozen=True, slots=True)
class QuestionDraw:
    """Different questions in the order in which they were drawn, and counts of the other draws."""

    prompts: tuple[Prompt, ...]
    draws: int
    repeats: int
    """Number of draws of a question drawn before; they are dropped."""
    other_side: int
    """Number of draws of questions of the other side."""
    no_answer: int = 0
    """Number of draws of questions whose answer is an empty text; they are dropped."""


def check_source(settings: schema.ReasoningGymTask) -> Source:
    """Return the generator that the settings name. Raises TaskError for unknown names, with the nearest ones."""
    from reasoning_gym.factory import DATASETS

    name, where = settings.dataset, "task.dataset"
    if name not in DATASETS:
        raise TaskError(f"reasoning-gym has no data set {name!r}", where=where, fix=_nearest(name, list(DATASETS)))
    if name in UNSEEDED:
        raise TaskError(
            f"the data set {name} cannot be used: it gives different questions for the same seed",
            where=where,
            fix="use another data set",
        )
    if name in HASH_SEEDED and sys.flags.hash_randomization:
        raise TaskError(
            f"the data set {name} gives different questions in each process, unless Python's hash seed is fixed",
            where=where,
            fix="start lockstep with the environment variable PYTHONHASHSEED=0",
        )
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in settings.settings:
        if key in ("seed", "size"):
            raise TaskError(f"{key} may not be set here", where=f"task.settings.{key}", fix=f"set task.{key} instead")
        if key not in known:
            raise TaskError(
                f"the data set {name} has no setting {key!r}", where=f"task.settings.{key}", fix=_nearest(key, known)
            )
    return Source(name, json.dumps(settings.settings, sort_keys=True))


@lru_cache(maxsize=16)
def draw(source: Source, stream: str, side: Side, want: int, seconds: float = ITEM_SECONDS) -> QuestionDraw:
    """Return `want` different questions of one side, or as many as there seem to be. A pure function of its arguments.

    `stream` names the seeds: other streams draw in another order. A smaller `want` gives the first questions of a larger one.
    Raises TaskError if the generator refuses its settings, fails, hangs, or gives a question without a single answer.
    """
    where = f"task.dataset={source.dataset}"
    try:
        return run_watched(lambda alive: _draw(source, stream, side, want, alive), seconds)
    except HungError as error:
        raise TaskError(
            f"reasoning-gym generated no question within {seconds:g} s with the settings {source.settings}",
            where=where,
            fix="change task.settings: with some values no question exists, and reasoning-gym searches for one forever",
        ) from error
    except (TaskError, MachineError):
        raise
    except Exception as error:
        raise TaskError(
            f"reasoning-gym failed with the settings {source.settings}: {reason_of(error)}",
            where=where,
            fix="correct task.settings",
        ) from error


def _draw(source: Source, stream: str, side: Side, want: int, alive: Alive) -> QuestionDraw:
    prompts: list[Prompt] = []
    seen: set[bytes] = set()
    draws = repeats = other_side = no_answer = idle = 0
    for item in _items(source, stream):
        alive()
        draws += 1
        messages = (Message(role="user", content=str(item["question"]).strip()),)
        digest = question_digest(messages)
        idle += 1
        answer = _answer(source.dataset, item)
        if not answer.strip():
            no_answer += 1
        elif side_of(digest) is not side:
            other_side += 1
        elif digest in seen:
            repeats += 1
        else:
            idle = 0
            seen.add(digest)
            prompts.append(_prompt(source.dataset, messages, item, answer))
        if len(prompts) == want or idle >= max(PATIENCE, 20 * len(prompts)):
            break
    return QuestionDraw(tuple(prompts), draws, repeats, other_side, no_answer)


def side_of(digest: bytes) -> Side:
    """Return the side of a question by its digest: half of all questions are held out."""
    return Side(digest[0] & 1)


def _items(source: Source, stream: str) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    settings = json.loads(source.settings)
    chunk = 0
    while True:
        # Generators seed item i with seed + i, so neighbouring seeds share items: these seeds are far apart.
        seed = seed_for("reasoning_gym", source.dataset, stream, chunk) % 2**31
        items = reasoning_gym.create_dataset(source.dataset, seed=seed, size=CHUNK, **settings)
        for index in range(CHUNK):
            yield items[index]
        chunk += 1


def _prompt(dataset: str, messages: tuple[Message, ...], item: dict[str, Any], answer: str) -> Prompt:
    digest = hashlib.sha256(json.dumps([messages[0]["content"], answer]).encode()).hexdigest()[:12]
    data = {QUESTION: item["question"], ANSWER: item["answer"], METADATA: item.get("metadata", {})}
    return Prompt(f"{dataset}/{digest}", messages, answer, dataset, data)


def _answer(dataset: str, item: dict[str, Any]) -> str:
    """Return the right answer, or an example of one for a question with several; "" for an item whose answer is not a text."""
    metadata = item.get("metadata", {})
    examples = (metadata[key] for key in EXAMPLES if metadata.get(key))
    answer = item["answer"] if item["answer"] is not None else next(examples, None)
    if isinstance(answer, dict):
        answer = json.dumps(answer)
    if not isinstance(answer, str):
        raise TaskError(
            f"the data set has a question without a right answer to test the grader with (its answer is {answer!r})",
            where=f"task.dataset={dataset}",
            fix="use another data set, or write a task of your own (task.kind=python)",
        )
    return answer


def _nearest(name: str, known: list[str]) -> str:
    return did_you_mean(name, known, f"it has {', '.join(sorted(known)[:12])}", most=3, cutoff=0.4)
