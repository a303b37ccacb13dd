"""The data sets of a recipe, for training and for evaluation, and their overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.config.data import Data
from lockstep.config.schema import FileTask, Recipe
from lockstep.config.section import Section
from lockstep.config.verifier import Verifier, reads_rows
from lockstep.data.load import Rows, open_rows
from lockstep.data.overlap import Overlap, measure
from lockstep.errors import ConfigError
from lockstep.types import Prompt


@dataclass(frozen=True, slots=True)
class DataSet:
    """One Data of a recipe. Example: DataSet("id_probe", "evaluation", "task.heldout.id_probe", Data(…), False)"""

    name: str
    """Name of its file when it is built: train, id_probe, validation …"""
    side: Literal["train", "evaluation"]
    where: str
    """Path of the setting."""
    data: Data
    chats: bool
    """Rows are conversations to learn from (sft), not questions with answers."""
    verifier: Verifier | None = None
    """Grades replies to its questions."""

    @property
    def whole(self) -> bool:
        """True if its grader reads whole rows."""
        return self.verifier is not None and reads_rows(self.verifier)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A data set in memory. In a conversation the last turn is the answer, and all others are the question."""

    set: DataSet
    rows: Rows
    prompts: tuple[Prompt, ...]


def sets_of(recipe: Recipe) -> tuple[DataSet, ...]:
    """Return every Data of the recipe that its run would read. Raises ConfigError if there is none."""
    if recipe.loop == "sft" and recipe.sft is not None:
        found = [DataSet("train", "train", "sft.data", recipe.sft.data, True)] if recipe.sft.data is not None else []
        if recipe.sft.validation is not None:
            found.append(DataSet("validation", "evaluation", "sft.validation", recipe.sft.validation, True))
    else:
        tasks = list(_file_tasks(recipe.task, "task"))
        found = [one for at, task in tasks for one in _of_task(task, at, several=len(tasks) > 1)]
    if not found:
        raise ConfigError(
            [f"the recipe reads no data set: task.kind={recipe.task.kind}"],
            fix="give a recipe with task.kind=file or loop=sft, or name a source of data",
        )
    return tuple(found)


def _of_task(task: FileTask, at: str, *, several: bool) -> Iterator[DataSet]:
    place = at.removeprefix("task.").replace(".", "_") + "_" if several else ""
    yield DataSet(f"{place}train", "train", f"{at}.data", task.data, False, task.verifier)
    for role, data in task.heldout.items():
        yield DataSet(f"{place}{role}", "evaluation", f"{at}.heldout.{role}", data, False, task.verifier)


def _file_tasks(section: object, at: str) -> Iterator[tuple[str, FileTask]]:
    """Yield the tasks of kind file in a section: itself, or those that a mixture holds."""
    if isinstance(section, FileTask):
        yield at, section
    elif isinstance(section, Section):
        for name in type(section).model_fields:
            yield from _file_tasks(getattr(section, name), f"{at}.{name}")
    elif isinstance(section, list | tuple):
        for number, item in enumerate(section):
            yield from _file_tasks(item, f"{at}.{number}")
    elif isinstance(section, dict):
        for name, item in section.items():
            yield from _file_tasks(item, f"{at}.{name}")


def load_set(one: DataSet, *, whole: bool = False) -> Loaded:
    """Read a data set; with `whole` as the task's grader reads its rows. Raises DataError."""
    rows = open_rows(one.data, where=one.where, whole=whole and one.whole)
    if not one.chats:
        return Loaded(one, rows, rows.prompts())
    made = (
        Prompt(chat.id, chat.messages[:-1], chat.messages[-1]["content"], rows.name, tools=chat.tools)
        for chat in rows.conversations()
    )
    return Loaded(one, rows, tuple(made))


def overlaps(loaded: Sequence[Loaded]) -> tuple[Overlap, ...]:
    """Measure the overlap of every train set with every evaluation set."""
    train = [one for one in loaded if one.set.side == "train"]
    evaluation = [one for one in loaded if one.set.side == "evaluation"]
    return tuple(measure(a.set.name, a.prompts, b.set.name, b.prompts) for a in train for b in evaluation)
