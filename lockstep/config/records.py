"""Settings of what a run writes: checkpoints and trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import Json, PathText, Section, ShortSection

Mode: TypeAlias = Literal["auto", "online", "offline", "off"]


class Paths(Section):
    """Folders outside of the run. The run itself is in runs_dir."""

    cache: PathText | None = None
    """Folder of all caches: models and data of the hub, converted models, compiled kernels. Variables that are set win (HF_HOME,
    LOCKSTEP_CACHE, VLLM_CACHE_ROOT, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR)."""
    checkpoints: PathText | None = None
    """Folder, on another disk for example, in which the checkpoints of each run get a folder of their own, called by the run's
    name and a random id; the run's checkpoints.json names it. It must be there. Without it they lie in the run's own folder."""

    def disk(self, runs_dir: str) -> Path:
        """Return the folder on whose disk checkpoints are written."""
        return Path(runs_dir) if self.checkpoints is None else Path(self.checkpoints).expanduser()


class Save(Section):
    """Checkpoints to keep. The last step is always saved."""

    every: int = Field(default=20, ge=1)
    """Steps between checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this metric. Example: eval/greedy/accuracy"""


class Sink(ShortSection):
    """A tracker. A text is short for its name: `track.sinks: [wandb]`."""

    SHORT = "name"

    name: str = Field(pattern=r"^([a-z][a-z0-9_-]*|.+\.py:\w+)$")
    """wandb, trackio, tensorboard, mlflow, swanlab; a name that a package registers as entry point in the group
    lockstep.trackers; or a class in your own file, file.py:Class."""
    mode: Mode = "auto"
    """online sends at once; offline writes locally, and `lockstep track sync` sends it later; off leaves the tracker out. auto is
    online where a key or a server is known, else offline."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the tracker: of wandb arguments of wandb.init, of mlflow uri, of your own class what it takes."""

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        """Return the settings that a name alone stands for, as in `track.sinks: wandb,trackio`."""
        return {"name": name}


class Track(Section):
    """Trackers besides metrics.jsonl."""

    sinks: list[Sink] = Field(default_factory=list)
    """Trackers. One that fails or hangs is reported once and left behind; `lockstep track sync` sends what it missed."""
    project: str = "lockstep"
    """Project name in trackers."""
    group: str | None = None
    """Group of runs that the trackers show together."""
    job_type: str | None = None
    """Kind of the run within its group. Example: train"""
    tags: list[str] = Field(default_factory=list)
    """Free labels of the run."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a tracker may take to open, to accept a step, and to finish."""
    samples: int = Field(default=0, ge=0)
    """Prompts of a step whose best and worst reply trackers get, at the steps of replies_every; 0 sends no text."""
    artifacts: bool = False
    """Send each checkpoint to trackers that take files: wandb, trackio, mlflow, and your own."""
    rollouts_every: int = Field(default=1, ge=1)
    """Steps between rollout files (rollouts/step_000012.parquet)."""
    tokens: bool = True
    """Store with each rollout the learner's log-probability and entropy of its trained tokens: 6 bytes a token before
    compression, no further computation."""
    replies_every: int = Field(default=5, ge=0)
    """Steps between two replies that a terminal shows with their rewards; 0 shows none."""
