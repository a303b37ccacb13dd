"""The task `file`: questions and answers from a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config import schema
from lockstep.config.verifier import reads_rows
from lockstep.data.load import Rows, open_rows
from lockstep.data.overlap import NGRAM, measure
from lockstep.data.split import refuse_overlap, repeats, split
from lockstep.errors import DataError
from lockstep.tasks.base import VerifiedTask, check_references, draw_batch, first_heldout
from lockstep.types import Prompt
from lockstep.verifiers.base import Verifier, notes_of
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.selftest import oddities


@dataclass
class FileRows(VerifiedTask):
    """Rows in memory. No held-out question is among the training rows: build_file_task has checked it."""

    name: str
    train: tuple[Prompt, ...]
    heldout_rows: Mapping[str, tuple[Prompt, ...]]
    """Held-out rows by role."""
    verifier: Verifier
    seed: int
    notes: tuple[str, ...] = ()

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self.train, step, size, self.seed, f"task {self.name}")

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return the first `size` held-out rows of the role. Raises TaskError if there are fewer, or none."""
        return first_heldout(self.heldout_rows, role, size, f"task {self.name}")


def build_file_task(settings: schema.FileTask, seed: int) -> FileRows:
    """Read all rows of the task.

    Raises DataError for a bad source or row, a question both trained and held out, or (near_overlap = refuse) one that shares
    13 words in a row; and TaskError for an answer that the verifier cannot grade.
    """
    whole = reads_rows(settings.verifier)
    rows = open_rows(settings.data, where="task.data", whole=whole)
    name, origin = rows.name, rows.origin
    train = rows.prompts(name)
    notes = [f"{name}: {len(train)} rows in {origin}", *_reading_notes(name, rows), *_repeat_notes(name, train)]
    heldout: dict[str, tuple[Prompt, ...]] = {}
    origins: dict[str, str] = {}
    for role, data in settings.heldout.items():
        held = open_rows(data, where=f"task.heldout.{role}", whole=whole)
        heldout[role], origins[role] = held.prompts(f"{name}@{role}", task=name), held.origin
        notes += [*_reading_notes(f"{name}@{role}", held), *_repeat_notes(f"{name}@{role}", heldout[role])]
    if "id_probe" not in heldout and settings.heldout_rows:
        parts = split(train, settings.heldout_rows, where=origin)
        train, heldout["id_probe"], origins["id_probe"] = parts.train, parts.heldout, origin
        notes.append(
            f"{name}: {len(parts.heldout)} questions held out by hash as id_probe, {len(train)} rows left to train on, "
            f"{parts.dropped} more rows dropped because they repeat a held-out question"
        )
    verifier = build_verifier(settings.verifier)
    notes += [f"{name}: {note}" for note in notes_of(verifier)]
    check_references(verifier, train, origin)
    notes += [f"{name}: warning: {line}" for line in oddities(verifier, train[0])[:1]]
    for held_as, prompts in heldout.items():
        refuse_overlap(train, prompts, f"{origin} and {origins[held_as]}")
        check_references(verifier, prompts, origins[held_as])
        notes.append(f"{name}: {len(prompts)} held-out rows for {held_as}, none of them in training")
        notes += _near_notes(settings, name, train, held_as, prompts)
    return FileRows(name, train, heldout, verifier, seed, tuple(notes))


def count_training_rows(settings: schema.FileTask) -> int:
    """Return the number of rows that the task trains on, without trying them on the verifier. Raises DataError."""
    rows = open_rows(settings.data, where="task.data", whole=reads_rows(settings.verifier))
    train = rows.prompts(rows.name)
    if "id_probe" not in settings.heldout and settings.heldout_rows:
        return len(split(train, settings.heldout_rows, where=rows.origin).train)
    return len(train)


def _reading_notes(name: str, rows: Rows) -> list[str]:
    """Return lines about rows left out by filters or because they are bad."""
    reading = rows.reading
    found = [f"{name}: {reading.bad} of {reading.read} rows are bad and were dropped"] if reading.bad else []
    return found + [f"{name}: filter {stage.name} kept {stage.after} of {stage.before}" for stage in reading.stages]


def _repeat_notes(name: str, prompts: Sequence[Prompt]) -> list[str]:
    """Return the number of rows that repeat a question, and a warning if they give it another answer."""
    found = repeats(prompts)
    if not found.rows:
        return []
    lines = [f"{name}: {found.rows} of {len(prompts)} rows repeat a question"]
    if found.contrary:
        pairs = "; ".join(f"{one.id} and {other.id}" for one, other in found.contrary[:3])
        lines.append(
            f"{name}: warning: of these, {len(found.contrary)} with another answer than the first row that asks it: {pairs}"
        )
    return lines


def _near_notes(
    settings: schema.FileTask, name: str, train: Sequence[Prompt], role: str, heldout: Sequence[Prompt]
) -> list[str]:
    """Return a warning for questions that share a run of words with training. Raises DataError if they must be refused."""
    if settings.near_overlap == "allow":
        return []
    found = measure(name, train, role, heldout)
    if not found.ngram:
        return []
    pairs = "; ".join(f"{held} and {trained}" for trained, held in found.pairs)
    what = f"{found.ngram} of {found.items} held-out questions for {role} share {NGRAM} words in a row with a training question"
    if settings.near_overlap == "refuse":
        fix = "drop these questions with the filter {kind: not_in, match: ngram}, or set task.near_overlap=warn"
        raise DataError(f"{what}: {pairs}", where=f"task {name}", fix=fix)
    return [f"{name}: warning: {what}: {pairs}"]
