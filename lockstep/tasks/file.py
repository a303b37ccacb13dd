"""Questions and answers from the user's files as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import schema
from lockstep.data.sources import Columns, read_prompts
from lockstep.data.split import refuse_overlap, split
from lockstep.errors import TaskError
from lockstep.tasks.base import check_references, draw_batch, no_such_role
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.build import build_verifier


@dataclass(slots=True)
class FileRows:
    """Rows in memory. No held-out question is among the training rows: build_file_task has checked."""

    name: str
    train: tuple[Prompt, ...]
    heldout_rows: Mapping[str, tuple[Prompt, ...]]
    """By role."""
    verifier: Verifier
    seed: int
    notes: tuple[str, ...]

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self.train, step, size, self.seed, f"task {self.name}")

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """The first `size` held-out rows of the role. Raises TaskError if there are fewer, or none."""
        if role not in self.heldout_rows:
            no_such_role(role, sorted(self.heldout_rows), f"task {self.name}")
        rows = self.heldout_rows[role]
        if size > len(rows):
            raise TaskError(
                f"{size} held-out questions were asked for, {role} has {len(rows)}",
                where=f"task {self.name}",
                fix=f"set eval.items={len(rows)}",
            )
        return rows[:size]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return self.verifier.grade(prompt, reply)


def build_file_task(settings: schema.FileTask, seed: int) -> FileRows:
    """Read all files of the task.

    Raises DataError for a bad file or row or a question both trained and held out, and TaskError for an answer that
    the verifier cannot grade.
    """
    path, columns = Path(settings.path).expanduser(), Columns(settings.prompt, settings.answer, settings.id)
    name = path.stem
    train = read_prompts(path, columns, name)
    heldout: dict[str, tuple[Prompt, ...]] = {
        role: read_prompts(Path(file).expanduser(), columns, f"{name}@{role}", task=name)
        for role, file in settings.heldout.items()
    }
    notes = [f"{name}: {len(train)} rows in {path}"]
    if "id_probe" not in heldout and settings.heldout_rows:
        parts = split(train, settings.heldout_rows, where=str(path))
        train, heldout["id_probe"] = parts.train, parts.heldout
        notes.append(
            f"{name}: {len(parts.heldout)} questions held out by hash as id_probe, {len(train)} rows left to train on, "
            f"{parts.dropped} more rows dropped because they repeat a held-out question"
        )
    verifier = build_verifier(settings.verifier)
    check_references(verifier, train, str(path))
    files = {role: str(path) for role in heldout} | dict(settings.heldout)
    for role, prompts in heldout.items():
        refuse_overlap(train, prompts, f"{path} and {files[role]}")
        check_references(verifier, prompts, files[role])
    notes += [
        f"{name}: {len(prompts)} held-out rows for {role}, none of them in training"
        for role, prompts in heldout.items()
    ]
    return FileRows(name, train, heldout, verifier, seed, tuple(notes))
