"""Trackers: W&B, trackio, TensorBoard, MLflow, SwanLab. Each is made from a `TrackedRun`; so is a tracker class of the user.

All have `log(step, metrics)` and `close()`. These methods are optional: `last_step()` returns the last step of this run that the
tracker holds; `samples(step, samples)` takes replies as text; `artifact(path, name)` takes a folder of files.
"""

from __future__ import annotations

import netrc
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from lockstep.config.records import Mode
from lockstep.errors import ConfigError
from lockstep.types import Metrics

ONLINE_SECONDS = 20
"""Time that W&B may take to answer before the run is tracked offline."""
FLUSH_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """A reply as trackers show it."""

    id: str
    """Id of its prompt."""
    messages: Sequence[Mapping[str, Any]]
    reply: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Facts of a run that a tracker is opened with."""

    name: str
    id: str
    """The same in every attempt, so that a resumed run continues the tracker's own."""
    folder: Path
    """The run directory."""
    project: str = "lockstep"
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    mode: Mode = "auto"
    resumed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def place(self, name: str) -> Path:
        """Return a folder in the run directory for a tracker's own files."""
        path = self.folder / "trackers" / name
        path.mkdir(parents=True, exist_ok=True)
        return path


class Wandb:
    """W&B, its files in <run>/wandb. auto is online with a key, unless nothing answers; WANDB_MODE wins over auto."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        asked = os.environ.get("WANDB_MODE") if run.mode == "auto" else run.mode
        if run.mode == "online" and not has_wandb_key():  # it would ask for one at the terminal
            raise _needs_key("wandb", "WANDB_API_KEY")
        offline = asked in ("offline", "disabled", "dryrun") or not has_wandb_key()
        # Its own notes of the command line would show what `mask` hides in the manifest.
        own = wandb.Settings(
            console="off", init_timeout=ONLINE_SECONDS, login_timeout=ONLINE_SECONDS, x_disable_meta=True
        )
        options: dict[str, Any] = {
            "project": run.project,
            "name": run.name,
            "id": run.id,
            "group": run.group,
            "job_type": run.job_type,
            "resume": "allow" if run.resumed else None,
            "dir": str(run.folder),
            "tags": list(run.tags) or None,
            "config": dict(run.recipe),
            "save_code": False,
            "settings": own,
            **run.settings,
        }
        known: Literal["disabled", "offline"] = "disabled" if asked == "disabled" else "offline"
        try:
            self._run = wandb.init(mode=known if offline else "online", **options)
        except wandb.errors.CommError:
            if offline or asked:
                raise
            wandb.teardown()  # the half-made run holds the id
            self._run, offline = wandb.init(mode="offline", **options), True
        self._wandb, self.mode = wandb, "offline" if offline else "online"

    def last_step(self) -> int:
        return int(self._run.step) - 1

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[one.id, one.messages[-1]["content"], one.reply, one.reward] for one in samples]
        table = self._wandb.Table(columns=["id", "prompt", "reply", "reward"], data=rows)
        self._run.log({"samples": table}, step=step)

    def artifact(self, path: Path, name: str) -> None:
        found = self._wandb.Artifact(name, type="checkpoint")
        found.add_dir(str(path))
        self._run.log_artifact(found)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio in its local store (TRACKIO_DIR, by default in the Hugging Face cache): no Space, no server, no hub.

    Variables of trackio that name a Space or a server, and the hub's name look-up, are switched off while it starts. Mode online
    needs a Space or a server among the settings: space_id or server_url.
    """

    def __init__(self, run: TrackedRun) -> None:
        remote = {"space_id", "server_url"} & run.settings.keys() and run.mode != "offline"
        self.mode = "online" if remote else "local"
        with nullcontext() if remote else _no_hub():
            import trackio
            from trackio.sqlite_storage import SQLiteStorage

            name = f"{run.name}-{run.id[:6]}"  # runs are found again by their name alone, and others may have the same
            self._trackio, self._last = trackio, SQLiteStorage.get_last_step(run.project, name)
            self._run = trackio.init(
                project=run.project,
                name=name,
                group=run.group,
                resume="allow" if run.resumed else "never",
                config=dict(run.recipe),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **(run.settings if remote else {}),
            )
        self._finish: Callable[[], None] = trackio.finish

    def last_step(self) -> int:
        return -1 if self._last is None else int(self._last)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for one in samples:
            messages = [*map(dict, one.messages), {"role": "assistant", "content": one.reply}]
            trace = self._trackio.Trace(messages, metadata={"id": one.id, "reward": one.reward})
            self._run.log({f"sample/{one.id}": trace}, step=step)

    def artifact(self, path: Path, name: str) -> None:
        self._run.log_artifact(path, name=name, type="checkpoint")

    def close(self) -> None:
        self._finish()


class TensorBoard:
    """TensorBoard's event files in <run>/tensorboard; `tensorboard --logdir runs` shows all runs."""

    mode = "local"
    rewrites = True
    """A step may be logged again: what a killed attempt wrote from there on is hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / "tensorboard"
        self._text = f"{run.name}\n\n" + "\n".join(f"    {key}: {value}" for key, value in run.recipe.items())
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        writer = self._opened(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for one in samples:
            self._opened(step).add_text(f"sample/{one.id}", f"reward {one.reward}\n\n{one.reply}", step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            # Opened now, because a resumed run must hide the points that a killed attempt wrote from this step on.
            self._writer = self._make(str(self._folder), purge_step=step, flush_secs=FLUSH_SECONDS)
            self._writer.add_text("recipe", self._text)
        return self._writer


class Mlflow:
    """MLflow at settings.uri or MLFLOW_TRACKING_URI; offline, or without one, in <run>/trackers/mlflow."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        uri = run.settings.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if run.mode == "online" and not uri:
            raise ConfigError(
                ["track.sinks: mlflow: mode online needs a server"],
                fix="set the variable MLFLOW_TRACKING_URI, or settings.uri",
            )
        self.mode = "online" if uri and run.mode != "offline" else "offline"
        local = run.place("mlflow")
        if self.mode == "offline":
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # its file store is kept, and no longer the default
        self._client = MlflowClient(tracking_uri=uri if self.mode == "online" else local.resolve().as_uri())
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        known = self._client.search_runs([experiment], f"tags.lockstep_id = '{run.id}'", max_results=1)
        labels = {"lockstep_id": run.id, "group": run.group, "job_type": run.job_type, **dict.fromkeys(run.tags, "")}
        tags = {key: value for key, value in labels.items() if value is not None}
        self._run = known[0] if known else self._client.create_run(experiment, tags=tags, run_name=run.name)
        self._id = self._run.info.run_id
        if known:
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._client.log_dict(self._id, dict(run.recipe), "recipe.json")

    def last_step(self) -> int:
        names = {"lr", "reward/mean", "time/step"} & self._run.data.metrics.keys()
        points = [point.step for name in names for point in self._client.get_metric_history(self._id, name)]
        return max(points, default=-1)

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(found), 1000):
            self._client.log_batch(self._id, metrics=found[start : start + 1000])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [{"id": one.id, "reply": one.reply, "reward": one.reward} for one in samples]
        self._client.log_dict(self._id, {"samples": rows}, f"samples/step_{step:06d}.json")

    def artifact(self, path: Path, name: str) -> None:
        self._client.log_artifacts(self._id, str(path), name)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLab:
    """SwanLab, its files in <run>/trackers/swanlab: in its cloud with SWANLAB_API_KEY, else offline."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        key = bool(os.environ.get("SWANLAB_API_KEY"))
        if run.mode == "online" and not key:
            raise _needs_key("swanlab", "SWANLAB_API_KEY")
        self.mode = "online" if key and run.mode != "offline" else "offline"
        self._swanlab = swanlab
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            group=run.group,
            job_type=run.job_type,
            tags=list(run.tags),
            config=dict(run.recipe),
            logdir=str(run.place("swanlab")),
            mode="cloud" if self.mode == "online" else "offline",
            **({"id": run.id, "resume": "allow"} if self.mode == "online" else {}),
            **run.settings,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._swanlab.log(metrics, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [self._swanlab.Text(one.reply, caption=f"{one.id}: {one.reward}") for one in samples]
        self._swanlab.log({"samples": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


BUILT_IN: Mapping[str, Callable[[TrackedRun], Any]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "swanlab": SwanLab,
}


def has_wandb_key() -> bool:
    """Return True if W&B would find a key without asking: in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(FileNotFoundError, netrc.NetrcParseError):
        return netrc.netrc(str(path)).authenticators(urlparse(wandb_address()).hostname or "") is not None
    return False


def wandb_address() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def _needs_key(name: str, variable: str) -> ConfigError:
    what = f"track.sinks: {name}: mode online needs {variable}"
    return ConfigError([what], fix=f"set the variable {variable}, or mode: offline")


@contextmanager
def _no_hub() -> Iterator[None]:
    import huggingface_hub.constants as hub

    names = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    offline = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        os.environ.update(saved)
