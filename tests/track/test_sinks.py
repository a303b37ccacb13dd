from __future__ import annotations

import json
import math
import os
import pty
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.config.schema import Recipe, Track
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.track.rundir import RunDirectory, never_began
from lockstep.track.sinks import build_sinks, record_of
from lockstep.track.sync import findings, sync
from lockstep.track.writer import RunWriter
from tests.loops.runs import LORA, NO_EVAL, trained
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
from lockstep.track import trackers as module
from lockstep.track.sinks import build_sinks

module.ONLINE_SECONDS = 3
path, names, first = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
run = RunDirectory.resume(path, {}) if path.exists() else RunDirectory.create(path, "name: demo\\n", {})
track = Track.model_validate(dict(sinks=names, project="crates", tags=["blue"]))
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
    identity = json.loads((tmp_path / "run" / "trackers" / "wandb.json").read_text())["id"].encode()
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
    identity = json.loads((tmp_path / "run" / "trackers" / "trackio.json").read_text())["id"]
    assert [row[:2] for row in rows] == [(f"demo-{identity[:6]}", step) for step in (1, 2, 3, 4, 5)]
    with sqlite3.connect(tmp_path / "store" / "crates.db") as database:
        assert database.execute("select count(distinct run_id) from metrics").fetchall() == [(1,)]


def test_tensorboard_hides_what_a_killed_attempt_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for number, first in ((1, 1), (2, 3)):
        facts = (tmp_path / "run", RECIPE, FACTS) if number == 1 else None
        run = RunDirectory.create(*facts) if facts else RunDirectory.resume(tmp_path / "run", FACTS)
        (sink,) = build_sinks(
            Track.model_validate({"sinks": ["tensorboard"]}), run, "demo", {"seed": 7}, on_failure=fail
        )
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


OWN = """
import json, time
from pathlib import Path


class Kept:
    def __init__(self, run):
        self.path, self.settings = Path(run.settings["path"]), run.settings
        self.path.touch()
        self.write({"id": run.id, "project": run.project, "group": run.group})

    def write(self, row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\\n")

    def last_step(self):
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return max((row["step"] for row in rows if "step" in row), default=-1)

    def log(self, step, metrics):
        if step == self.settings.get("breaks"):
            raise ConnectionError("no route; key wb-0123456789")
        if step == self.settings.get("hangs"):
            time.sleep(600)
        self.write({"step": step, **metrics})

    def close(self):
        self.write({"closed": True})


class Rude:
    def __init__(self, run):
        raise ValueError("no such project")
"""


def own(tmp_path: Path, **settings: object) -> Track:
    """A tracker of the user's own that keeps what it gets in a file."""
    (tmp_path / "own.py").write_text(OWN)
    sink = {"name": f"{tmp_path}/own.py:Kept", "settings": {"path": str(tmp_path / "kept.jsonl"), **settings}}
    return Track.model_validate({"sinks": [sink], "timeout_s": 1.0, "project": "crates", "group": "blue"})


def steps_kept(tmp_path: Path) -> list[int]:
    rows = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "step" in row]


def tracked(run: RunDirectory, track: Track, steps: range, start: int = 0) -> list[str]:
    """Log steps to metrics.jsonl and to the trackers; returns what was reported."""
    heard: list[str] = []
    senders = build_sinks(track, run, "demo", {}, on_failure=lambda name, error: heard.append(str(error)), start=start)
    with RunWriter(run) as writer:
        for step in steps:
            writer.step(step, {"lr": step / 8})
            for sender in senders:
                sender.log(step, {"lr": step / 8})
    for sender in senders:
        sender.close()
    return heard


def test_a_tracker_that_breaks_is_reported_once_and_gets_the_rest_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wb-0123456789")
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        heard = tracked(run, own(tmp_path, breaks=3), range(1, 9))
    assert heard == ["no route; key wb-0123456789"]
    assert steps_kept(tmp_path) == [1, 2]
    (record,) = (tmp_path / "a" / "trackers").glob("*.json")
    assert "no route; key ***" in record.read_text()
    recipe = Recipe(track=own(tmp_path))
    assert list(sync(tmp_path / "a", recipe)) == [(True, f"{tmp_path}/own.py:Kept: sent steps 3 to 8 (6)")]
    assert [line for _, line in sync(tmp_path / "a", recipe)] == [f"{tmp_path}/own.py:Kept: nothing is missing"]
    assert steps_kept(tmp_path) == list(range(1, 9))


def test_a_tracker_that_hangs_slows_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        heard = tracked(run, own(tmp_path, hangs=2), range(1, 50))
    assert heard == ["the tracker has not answered for 1 s"]
    assert time.monotonic() - began < 20
    assert steps_kept(tmp_path) == [1]


def test_a_resumed_run_continues_the_same_tracker_run_without_a_step_twice(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        tracked(run, own(tmp_path, breaks=4), range(1, 6))  # it has 1 to 3, the run 1 to 5
    with RunDirectory.resume(tmp_path / "a", FACTS) as run:
        assert tracked(run, own(tmp_path), range(5, 8), start=4) == []
    assert steps_kept(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    heads = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines() if "project" in line]
    assert len(heads) == 2
    assert heads[0] == heads[1]
    assert (heads[0]["project"], heads[0]["group"]) == ("crates", "blue")


def test_a_tracker_that_is_off_is_never_loaded(tmp_path: Path) -> None:
    track = Track.model_validate({"sinks": [{"name": f"{tmp_path}/none.py:Kept", "mode": "off"}]})
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        assert build_sinks(track, run, "demo", {}, on_failure=fail) == []


def test_a_tracker_that_cannot_be_opened_stops_a_start_and_no_resume(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    track = Track.model_validate({"sinks": [f"{tmp_path}/own.py:Rude"]})
    with (
        RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run,
        pytest.raises(ConfigError, match="cannot be set up: ValueError: no such project"),
    ):
        build_sinks(track, run, "demo", {}, on_failure=fail)
    assert never_began(tmp_path / "a")  # its name is not taken
    heard: list[str] = []
    with RunDirectory.resume(tmp_path / "a", FACTS) as run:
        build_sinks(track, run, "demo", {}, on_failure=lambda name, error: heard.append(str(error)))
    assert heard == ["no such project"]


def test_a_checkpoint_is_sent_as_an_artefact(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-55: what the tracker's own client gives back is the checkpoint, byte for byte."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track = "track={sinks: [mlflow], project: crates, artifacts: true}"
    run = trained(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=2", "save.every=1", "name=sent", track)
    client = MlflowClient(tracking_uri=(run.path / "trackers" / "mlflow").resolve().as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("crates").experiment_id])
    for place in sorted(run.checkpoints_path.iterdir()):
        (tmp_path / place.name).mkdir()
        back = Path(client.download_artifacts(found.info.run_id, f"sent-{place.name}", str(tmp_path / place.name)))
        assert contents(back) == contents(place)
    assert [one.path for one in client.list_artifacts(found.info.run_id) if one.is_dir] == [
        "sent-step_000001",
        "sent-step_000002",
    ]


def contents(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "COMMIT.json" in files
    return files


def test_mlflow_offline_is_sent_to_its_server_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track = Track.model_validate({"sinks": ["mlflow"], "project": "crates", "tags": ["blue"]})
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        assert tracked(run, track, range(1, 4)) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    assert [line for _, line in sync(tmp_path / "a", Recipe(track=track))] == ["mlflow: sent steps 1 to 3 (3)"]
    with RunDirectory.resume(tmp_path / "a", FACTS) as run:
        assert tracked(run, track, range(3, 6), start=2) == []
    client = MlflowClient(tracking_uri=(tmp_path / "server").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("crates").experiment_id])
    history = client.get_metric_history(found.info.run_id, "lr")
    assert [(point.step, point.value) for point in history] == [(step, step / 8) for step in range(1, 6)]
    assert found.data.tags["blue"] == ""


def test_a_real_sink_that_cannot_write_does_not_stop_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    heard: list[str] = []
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        (run.path / "tensorboard").write_text("a file where the folder should be")
        (sink,) = build_sinks(
            Track.model_validate({"sinks": ["tensorboard"]}),
            run,
            "demo",
            {},
            on_failure=lambda name, error: heard.append(name),
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
            build_sinks(Track.model_validate({"sinks": ["wandb", "trackio"]}), run, "demo", {}, on_failure=fail)
    assert caught.value.mistakes == ["track.sinks: wandb is not installed", "track.sinks: trackio is not installed"]
    assert "pip install 'lockstep-rl[trackers]'" in str(caught.value)


def test_a_sink_that_cannot_be_set_up_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    with (
        RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run,
        pytest.raises(ConfigError, match=r"track\.sinks: trackio cannot be set up: .*registry"),
    ):
        build_sinks(
            Track.model_validate({"sinks": ["trackio"], "project": "registry-x"}), run, "demo", {}, on_failure=fail
        )


def test_no_sinks_for_a_reader_and_none_without_asking(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        assert build_sinks(Track(), run, "demo", {}, on_failure=fail) == []
    with pytest.raises(RunDirectoryError, match="reading only"):
        build_sinks(
            Track.model_validate({"sinks": ["tensorboard"]}),
            RunDirectory.open(tmp_path / "a"),
            "demo",
            {},
            on_failure=fail,
        )


@pytest.mark.parametrize("content", ["{}", "[]", '{"id": "a", "sent": {"online": "x"}}'])
def test_a_record_of_a_tracker_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trackers" / "wandb.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(RunDirectoryError, match="this is not a record of a tracker") as error:
        record_of(tmp_path, "wandb")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("address", ["http://host:abc", "http://host:99999", "http://[x"])
def test_an_address_that_is_none_is_a_finding(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    recipe = Recipe.model_validate({"track": {"sinks": ["mlflow"]}})
    found = {what: (verdict, said) for verdict, what, said in findings(recipe, None)}
    assert found["mlflow network"] == ("warn", f"{address} is no address")


def test_a_tracker_that_the_run_has_not_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS):
        pass
    recipe = Recipe(track=own(tmp_path))
    with pytest.raises(ConfigError, match=r"--tracker wandb: the run has no such tracker; it has .*own\.py:Kept"):
        list(sync(tmp_path / "a", recipe, "wandb"))
    also = Recipe.model_validate({"track": {"sinks": [*recipe.track.sinks, "no_such_tracker"]}})
    (found,) = sync(tmp_path / "a", also, recipe.track.sinks[0].name)  # the others need not be installed
    assert found[0]


def test_findings_leave_no_file_in_the_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS):
        pass
    before = sorted(tmp_path.rglob("*"))
    rows = findings(Recipe.model_validate({"track": {"sinks": ["mlflow"]}}), tmp_path / "a")
    assert (rows[-1][0], rows[-1][2]) == ("ok", "nothing yet; the run has 0 steps")
    assert sorted(tmp_path.rglob("*")) == before
