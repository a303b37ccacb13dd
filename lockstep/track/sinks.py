"""Other places where a run's numbers go: W&B, trackio, TensorBoard. They never stop a run and never ask anything.

A sink that cannot be set up is an error before the first step; one that fails later is reported once and switched off.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, assert_never
from urllib.parse import urlparse

from lockstep.config.schema import Track
from lockstep.errors import ConfigError
from lockstep.track.files import read_plain, write_atomic
from lockstep.track.rundir import RunDirectory
from lockstep.types import Metrics, Tracker

SinkName: TypeAlias = Literal["wandb", "trackio", "tensorboard"]
OnFailure: TypeAlias = Callable[[SinkName, Exception], None]
Recipe: TypeAlias = Mapping[str, Any]

ONLINE_SECONDS = 30
"""How long W&B may take to answer before the run is tracked offline."""
FLUSH_SECONDS = 10


def build_sinks(
    track: Track, run: RunDirectory, run_name: str, resolved_recipe: Recipe, *, on_failure: OnFailure
) -> list[Tracker]:
    """Open the trackers of `track.sinks`. `on_failure` hears, once for each, of a sink that failed while logging.

    Raises ConfigError, with the pip line, for packages that are not installed, and for a sink that cannot be set up.
    """
    run.require_writable()
    check_installed(track)
    sinks: list[Tracker] = []
    for name in dict.fromkeys(track.sinks):
        try:
            sinks.append(Guarded(name, _open(name, track, run, run_name, resolved_recipe), on_failure))
        except (
            Exception
        ) as error:  # whatever a tracker raises, the others must be closed and the user told which it was
            for sink in sinks:
                sink.close()
            mistake = f"track.sinks: {name} cannot be set up: {type(error).__name__}: {error}"
            raise ConfigError([mistake], fix="mend it, or take it out of track.sinks") from error
    return sinks


def check_installed(track: Track) -> None:
    """Raise ConfigError, with the pip line, for trackers whose package is missing. To be asked before a run is created."""
    missing = [name for name in track.sinks if importlib.util.find_spec(name) is None]
    if missing:
        mistakes = [f"track.sinks: {name} is not installed" for name in missing]
        raise ConfigError(mistakes, fix="pip install 'lockstep-rl[trackers]', or take it out of track.sinks")


class Guarded:
    """A sink that is switched off, and reported, the first time that it fails."""

    def __init__(self, name: SinkName, sink: Tracker, on_failure: OnFailure) -> None:
        self.name = name
        self._sink: Tracker | None = sink
        self._on_failure = on_failure

    def log(self, step: int, metrics: Metrics) -> None:
        if self._sink is not None:
            self._try(lambda sink: sink.log(step, metrics))

    def close(self) -> None:
        if self._sink is not None:
            self._try(lambda sink: sink.close())
            self._sink = None

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self._sink is None:
            return
        try:
            action(self._sink)
        except Exception as error:  # a tracker may raise anything, and none of it is worth the run
            self._sink = None
            self._on_failure(self.name, error)


def _open(name: SinkName, track: Track, run: RunDirectory, run_name: str, recipe: Recipe) -> Tracker:
    match name:
        case "wandb":
            return Wandb(track, run, run_name, recipe)
        case "trackio":
            return Trackio(track, run, run_name, recipe)
        case "tensorboard":
            return TensorBoard(run, run_name, recipe)
        case _:
            assert_never(name)


class Wandb:
    """W&B, its files in <run>/wandb. Offline without a key or an answer; `wandb sync` sends it later. WANDB_MODE wins."""

    def __init__(self, track: Track, run: RunDirectory, run_name: str, recipe: Recipe) -> None:
        import wandb

        identity = run.path / "wandb" / "run_id"
        identity.parent.mkdir(exist_ok=True)
        if not identity.exists():
            write_atomic(identity, uuid.uuid4().hex[:12])
        options: dict[str, Any] = {
            "project": track.project,
            "name": run_name,
            "id": read_plain(identity).decode(),
            "resume": "allow" if run.attempt > 1 else None,
            "dir": str(run.path),
            "tags": track.tags or None,
            "config": dict(recipe),
            "save_code": False,
            "settings": wandb.Settings(console="off", init_timeout=ONLINE_SECONDS, login_timeout=ONLINE_SECONDS),
        }
        asked = os.environ.get("WANDB_MODE")
        # Online without a key it would ask for one at the terminal.
        mode: Literal["offline"] | None = None if _has_wandb_key() or asked in ("offline", "disabled") else "offline"
        try:
            self._run = wandb.init(mode=mode, **options)
        except wandb.errors.CommError:
            if mode == "offline" or asked:
                raise
            wandb.teardown()  # the half-made run holds the id
            self._run = wandb.init(mode="offline", **options)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio in its local store (TRACKIO_DIR, by default in the Hugging Face cache): no Space, no server, no hub.

    Variables of trackio that name a Space or a server, and the hub's name look-up, are switched off while it starts.
    """

    def __init__(self, track: Track, run: RunDirectory, run_name: str, recipe: Recipe) -> None:
        with _no_hub():
            import trackio

            self._run = trackio.init(
                project=track.project,
                name=run_name,
                resume="allow" if run.attempt > 1 else "never",
                config=dict(recipe),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._finish: Callable[[], None] = trackio.finish

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._finish()


class TensorBoard:
    """TensorBoard's event files in <run>/tensorboard; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: RunDirectory, run_name: str, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.path / "tensorboard"
        self._text = f"{run_name}\n\n" + "\n".join(f"    {key}: {value}" for key, value in recipe.items())
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        if self._writer is None:
            # Opened now, because a resumed run must hide the points that a killed attempt wrote from this step on.
            self._writer = self._make(str(self._folder), purge_step=step, flush_secs=FLUSH_SECONDS)
            self._writer.add_text("recipe", self._text)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _has_wandb_key() -> bool:
    """Whether W&B would find a key without asking: in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(FileNotFoundError, netrc.NetrcParseError):
        return netrc.netrc(str(path)).authenticators(host) is not None
    return False


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
