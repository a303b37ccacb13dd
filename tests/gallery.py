"""Finished runs that many tests read and none changes: each is trained once for all workers of a session, when asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from lockstep.track.rundir import RunDirectory
from tests.tiny import write_tiny_model

LORA = ("adapter.kind=lora", "adapter.rank=4", "optimizer.lr=0.01")
RUNS = {
    "plain": ("eval.enabled=false",),
    "plain_lora": (*LORA, "eval.enabled=false"),
    "lora": (*LORA, "eval.every=2", "save.keep_last=3"),
}
"""Overrides of the recipe of tests/loops/runs.py, which has three steps; "lora" is evaluated at steps 0, 2 and 3."""


class Gallery(NamedTuple):
    folder: Path

    def run(self, name: str) -> RunDirectory:
        """The run of this name of RUNS; not to be written to."""
        from tests.loops.runs import trained

        home = self.folder / name
        self.folder.mkdir(exist_ok=True)
        with FileLock(self.folder / f"{name}.lock"):
            if not (home / "done").exists():
                shutil.rmtree(home, ignore_errors=True)  # of a worker that failed amid it
                write_tiny_model(home / "model")
                trained(home, home / "model", *RUNS[name], f"name={name}")
                (home / "done").touch()
        return RunDirectory.open(home / "runs" / name)

    def copy(self, name: str, to: Path) -> RunDirectory:
        """A copy of a run in `to`, which may be written to."""
        shutil.copytree(self.run(name).path, to)
        return RunDirectory.open(to)
