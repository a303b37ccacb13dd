"""The task `verifiers`: prompts of an environment of the package verifiers, which runs and grades the episodes itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config import schema
from lockstep.data.split import split
from lockstep.envs.programs import Programs
from lockstep.envs.verifiers_env import INDEX, VerifiersPrograms
from lockstep.errors import TaskError
from lockstep.tasks.base import Episodes, draw_batch, first_heldout
from lockstep.types import Prompt


class VerifiersEnvTask(Episodes):
    """A verifiers environment as a task. Its rows are read at the start; some are held out by a hash of the question."""

    def __init__(self, settings: schema.VerifiersTask, seed: int) -> None:
        """Start the environment. Raises TaskError if it cannot be loaded, or has too few tasks."""
        self._settings, self._seed = settings, seed
        self.turns = schema.Turns(limit=settings.requests, reply_tokens=settings.reply_tokens)
        self._programs = VerifiersPrograms(settings)
        self.name = Path(settings.env).stem
        rows = [
            Prompt(f"{self.name}/{index}-{name}", messages, "", self.name, {INDEX: index})
            for index, (name, messages) in enumerate(self._programs.tasks)
        ]
        if len(rows) <= settings.heldout_rows:
            raise TaskError(
                f"the environment has {len(rows)} tasks; holding out {settings.heldout_rows} would leave none to train on",
                where=f"task.env={settings.env}",
                fix="set task.heldout_rows lower",
            )
        parts = split(rows, settings.heldout_rows, where=settings.env)
        self._train, self._heldout, self._dropped = parts.train, parts.heldout, parts.dropped

    @property
    def notes(self) -> tuple[str, ...]:
        counts = (
            f"{len(self._train)} tasks to train on, {len(self._heldout)} held out, {self._dropped} repeat one of these"
        )
        return (f"{self.name}: {counts}; played and graded by verifiers in {self._settings.python}",)

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self._train, step, size, self._seed, f"task {self.name}")

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return first_heldout({"id_probe": self._heldout}, role, size, f"task {self.name}", "tasks")

    def keep_in(self, folder: Path) -> None:
        self._programs.log = folder / "verifiers.log"

    def programs(self, prompt: Prompt) -> Programs | None:
        return self._programs
