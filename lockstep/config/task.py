"""Where questions come from, and how they become a chat."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import Json, Section
from lockstep.config.verifier import NumericVerifier, Verifier


class ReasoningGymTask(Section):
    """A procedural data set of reasoning-gym, by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(default="chain_sum", min_length=1)
    """Its name in reasoning-gym."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Its own settings. Example: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"""
    seed: int = Field(default=1, ge=0)
    """Seed of the questions; held-out questions are those that training never asks."""
    size: int = Field(default=2000, ge=1)
    """Training questions drawn before the first repeats; duplicates are dropped and counted."""
    repeat_heldout: bool = False
    """Ask held-out questions again when there are fewer different ones than eval.items; otherwise that is an error."""
    verifier: Verifier = NumericVerifier()


class FileTask(Section):
    """Questions and answers from a jsonl or parquet file."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """Training rows, .jsonl or .parquet."""
    heldout: dict[Literal["id_probe", "ood_probe", "sanity"], str] = Field(default_factory=dict)
    """A file for each held-out role; without id_probe, `heldout_rows` are split off `path` by hash."""
    heldout_rows: int = Field(default=200, ge=0)
    """Rows split off when there is no id_probe file."""
    prompt: str = "prompt"
    """Column with the question, as text or as a list of messages."""
    answer: str = "answer"
    """Column with the reference answer."""
    id: str | None = None
    """Column with a unique id; none numbers the rows."""
    verifier: Verifier = NumericVerifier()


class PythonTask(Section):
    """A class from your file with the methods of lockstep.types.Task."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""


Task: TypeAlias = Annotated[ReasoningGymTask | FileTask | PythonTask, Field(discriminator="kind")]


class Example(Section):
    """One solved turn shown before the question."""

    user: str
    """The example question."""
    assistant: str
    """The example reply."""


class Chat(Section):
    """How a question becomes a chat."""

    system: str | None = None
    """System text; none leaves it to the model's template."""
    examples: list[Example] = Field(default_factory=list)
    """Solved turns before the question (few-shot)."""
    suffix: str = ""
    """Text appended to the question, to the examples' too. It is part of a score's conditions."""
    template_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Extra variables for the model's chat template."""
