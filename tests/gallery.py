"""Finished runs that many tests read and none changes: each is trained once for all workers of a session, when asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from lockstep.track.rundir import RunDirectory
from tests.tiny import write_tiny_model

RUNS = {
    "full": ("eval.every=2",),
    "lora": ("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01", "eval.every=2", "save.keep_last=3"),
}
"""Overrides of the recipe of tests/loops/runs.py: three steps, evaluated at steps 0, 2 and 3."""


class Gallery(NamedTuple):
    folder: Path

    def run(self, name: str) -> RunDirectory:
        """The run of this name of RUNS, or "sft"; not to be written to. Its model is in `model` beside its `runs`."""
        from tests.loops import runs, sft_runs

        home = self.folder / name
        self.folder.mkdir(exist_ok=True)
        with FileLock(self.folder / f"{name}.lock"):
            if not (home / "done").exists():
                shutil.rmtree(home, ignore_errors=True)  # of a worker that failed amid it
                write_tiny_model(home / "model")
                make = sft_runs.trained if name == "sft" else runs.trained
                make(home, home / "model", *RUNS.get(name, ()), f"name={name}")
                (home / "done").touch()
        return RunDirectory.open(home / "runs" / name)

    def copy(self, name: str, to: Path) -> RunDirectory:
        """A copy of a run in `to`, which may be written to."""
        shutil.copytree(self.run(name).path, to)
        return RunDirectory.open(to)
