from __future__ import annotations

import math
import os
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.schema import Track
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.track.rundir import RunDirectory
from lockstep.track.sinks import Guarded, build_sinks
from lockstep.types import Metrics
from tests.track.runs import FACTS, RECIPE

PROGRAM = """
import sys
from pathlib import Path

asked = []
def watch(event, args):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(args[1], tuple)):
        asked.append(f"{event} {args[1:] if event == 'socket.connect' else args[:2]}")
sys.addaudithook(watch)

from lockstep.config.schema import Track
from lockstep.track.rundir import RunDirectory
from lockstep.track import sinks as module
from lockstep.track.sinks import build_sinks

module.ONLINE_SECONDS = 3
path, names, first = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
run = RunDirectory.resume(path, {}) if path.exists() else RunDirectory.create(path, "name: demo\\n", {})
track = Track(sinks=names, project="crates", tags=["blue"])
sinks = build_sinks(track, run, "demo", {"seed": 7}, on_failure=lambda name, error: sys.exit(f"{name}: {error!r}"))
for step in range(first, first + 3):
    for sink in sinks:
        sink.log(step, {"reward/mean": step / 8 + run.attempt, "grad/norm": float("nan"), "lr": float("inf")})
for sink in sinks:
    sink.close()
print("ASKED THE NETWORK:", asked)
"""


def attempt(run: Path, sinks: str, first: int, **environment: str) -> str:
    """Log three steps in a process of its own, at a terminal, with none of the test session's settings for offline use."""
    home = run.parent / "home"
    home.mkdir(exist_ok=True)
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(run), sinks, str(first)],
            env={**plain, **environment}, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
            check=False,
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_wandb_without_a_key_is_offline_inside_the_run_and_asks_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    output = attempt(tmp_path / "run", "wandb", 1)
    assert "ASKED THE NETWORK: []" in output
    attempt(tmp_path / "run", "wandb", 3)
    identity = (tmp_path / "run" / "wandb" / "run_id").read_bytes()
    stored = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(stored) == 2  # both attempts are one run to W&B: they share its id
    assert all(identity in file.name.encode() for file in stored)
    first = stored[0].read_bytes()
    assert [word in first for word in (b"reward/mean", b"1.125", b"demo", b"crates", b"blue")] == [True] * 5
    assert not list((tmp_path / "home").glob("**/*.wandb"))


@pytest.mark.slow
def test_wandb_with_a_key_but_no_network_goes_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    unreachable = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    output = attempt(tmp_path / "run", "wandb", 1, **unreachable)
    assert "syncing is set to `offline`" in output
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in stored.read_bytes()


def test_trackio_stays_local_even_where_the_environment_names_a_hub(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    hub = {"HF_TOKEN": "hf_" + "a" * 34, "TRACKIO_SPACE_ID": "someone/space", "TRACKIO_DIR": str(tmp_path / "store")}
    for first in (1, 3):
        assert "ASKED THE NETWORK: []" in attempt(tmp_path / "run", "trackio", first, **hub)
    with sqlite3.connect(tmp_path / "store" / "crates.db") as database:
        rows = database.execute("select run_name, step, json_extract(metrics, '$.reward/mean') from metrics").fetchall()
    assert [row[:2] for row in rows] == [("demo", step) for step in (1, 2, 3, 3, 4, 5)]
    with sqlite3.connect(tmp_path / "store" / "crates.db") as database:
        assert database.execute("select count(distinct run_id) from metrics").fetchall() == [(1,)]


def test_tensorboard_hides_what_a_killed_attempt_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for number, first in ((1, 1), (2, 3)):
        facts = (tmp_path / "run", RECIPE, FACTS) if number == 1 else None
        run = RunDirectory.create(*facts) if facts else RunDirectory.resume(tmp_path / "run", FACTS)
        (sink,) = build_sinks(Track(sinks=["tensorboard"]), run, "demo", {"seed": 7}, on_failure=fail)
        for step in range(first, first + 3):
            sink.log(step, {"reward/mean": step / 8 + number, "grad/norm": math.nan})
        sink.close()
        run.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 1.125),
        (2, 1.25),
        (3, 2.375),
        (4, 2.5),
        (5, 2.625),
    ]


def fail(name: str, error: Exception) -> None:
    pytest.fail(f"{name}: {error!r}")


class Breaks:
    """A tracker that works for two steps."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Metrics) -> None:
        self.calls += 1
        if self.calls > 2:
            raise ConnectionError("disk of the tracker is full")

    def close(self) -> None:
        raise ConnectionError("close must not be tried after a failure")


def test_a_sink_that_fails_is_reported_once_and_left_alone() -> None:
    heard: list[tuple[str, str]] = []
    sink = Breaks()
    guarded = Guarded("wandb", sink, lambda name, error: heard.append((name, str(error))))
    for step in range(1, 10):
        guarded.log(step, {"lr": 1.0})
    guarded.close()
    assert heard == [("wandb", "disk of the tracker is full")]
    assert sink.calls == 3


def test_a_real_sink_that_cannot_write_does_not_stop_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    heard: list[str] = []
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        (run.path / "tensorboard").write_text("a file where the folder should be")
        (sink,) = build_sinks(
            Track(sinks=["tensorboard"]), run, "demo", {}, on_failure=lambda name, error: heard.append(name)
        )
        sink.log(1, {"lr": 1.0})
        sink.log(2, {"lr": 1.0})
        sink.close()
    assert heard == ["tensorboard"]


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        for name in ("trackio", "wandb"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(ConfigError) as caught:
            build_sinks(Track(sinks=["wandb", "trackio"]), run, "demo", {}, on_failure=fail)
    assert caught.value.mistakes == ["track.sinks: wandb is not installed", "track.sinks: trackio is not installed"]
    assert "pip install 'lockstep-rl[trackers]'" in str(caught.value)


def test_a_sink_that_cannot_be_set_up_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    with (
        RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run,
        pytest.raises(ConfigError, match=r"track\.sinks: trackio cannot be set up: .*registry"),
    ):
        build_sinks(Track(sinks=["trackio"], project="registry-x"), run, "demo", {}, on_failure=fail)


def test_no_sinks_for_a_reader_and_none_without_asking(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        assert build_sinks(Track(), run, "demo", {}, on_failure=fail) == []
    with pytest.raises(RunDirectoryError, match="reading only"):
        build_sinks(Track(sinks=["tensorboard"]), RunDirectory.open(tmp_path / "a"), "demo", {}, on_failure=fail)
