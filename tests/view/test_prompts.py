"""The prompt box: any checkpoint of a run, in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lockstep.errors import EngineError, RunDirectoryError
from lockstep.track.rundir import RunDirectory
from lockstep.view import prompts
from lockstep.view.api import Viewer
from lockstep.view.server import Server
from tests.gallery import Gallery
from tests.view.test_server import get

ASK = {"text": "4 + 3 =", "count": "3", "tokens": "6", "temperature": "1"}


def held_by(viewer: Viewer) -> int | None:
    """Return the process id of the engine; None while there is none."""
    process = viewer._prompter._process
    return None if process is None or process.poll() is not None else process.pid


@pytest.fixture(scope="module")
def run(gallery: Gallery) -> RunDirectory:
    return gallery.run("lora")


@pytest.fixture(scope="module")
def viewer(run: RunDirectory) -> Iterator[Viewer]:
    made = Viewer([run.path])
    yield made
    made.close()


def test_replies_are_those_of_the_checkpoint_and_of_the_seed(viewer: Viewer, run: RunDirectory) -> None:
    assert viewer.places({})["steps"] == [0, 1, 2, 3]
    base = viewer.sample({**ASK, "step": "0"})
    process = held_by(viewer)
    again = viewer.sample({**ASK, "step": "0"})
    assert held_by(viewer) == process  # the weights stay loaded
    assert again == base
    assert len(base["replies"]) == 3
    assert len({str(one["pieces"]) for one in base["replies"]}) > 1
    trained = viewer.sample({**ASK, "step": "3"})
    assert held_by(viewer) != process  # one at a time
    assert (trained["numerics"], trained["device"]) == ("fp32", "cpu")
    assert trained["weights"] != base["weights"]
    assert trained["seen"] == base["seen"]
    assert trained["weights"] in (run.path / "events.jsonl").read_text()


@pytest.mark.slow
def test_greedy_replies_have_the_log_probabilities_of_temperature_1(viewer: Viewer) -> None:
    (one,) = viewer.sample({**ASK, "count": "1", "temperature": "0", "raw": "true", "text": "a b c"})["replies"]
    assert len(one["logprobs"]) == len(one["pieces"])
    assert all(value < 0 for value in one["logprobs"])


def test_what_cannot_be_asked_is_said_and_the_process_goes_on(viewer: Viewer) -> None:
    viewer.sample(ASK)
    process = held_by(viewer)
    with pytest.raises(EngineError, match="control token"):
        viewer.sample({**ASK, "text": "<|im_end|>"})
    with pytest.raises(EngineError, match="tokens"):
        viewer.sample({**ASK, "text": "word " * 3000})
    for wrong in ({"temperature": "-1"}, {"count": "0"}, {"text": ""}, {"top_p": "nan"}, {"shell": "1"}):
        with pytest.raises(RunDirectoryError):
            viewer.sample({**ASK, **wrong})
    viewer.sample(ASK)
    assert held_by(viewer) == process
    with pytest.raises(EngineError, match="step 9"):
        viewer.sample({**ASK, "step": "9"})


def test_one_at_a_time_and_a_stop_ends_it(viewer: Viewer) -> None:
    viewer.sample(ASK)
    told: list[str] = []

    def long() -> None:
        try:
            viewer.sample({**ASK, "count": "32", "tokens": "100"})
        except EngineError as error:
            told.append(str(error))

    thread = threading.Thread(target=long)
    thread.start()
    while not viewer._prompter._busy.locked():
        time.sleep(0.001)
    with pytest.raises(EngineError, match="another prompt"):
        viewer.sample(ASK)
    process = held_by(viewer)
    viewer.stop({})
    thread.join(10)
    assert told == [] or "was stopped" in told[0]
    assert not _runs(process)


@pytest.mark.slow
def test_an_idle_process_ends(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "IDLE_S", 0.05)
    viewer.sample(ASK)
    process = held_by(viewer)
    for _ in range(200):
        if not _runs(process):
            return
        time.sleep(0.05)
    pytest.fail("the process still runs")


@pytest.mark.slow
def test_the_process_ends_with_the_viewer_and_with_a_viewer_that_is_killed(run: RunDirectory) -> None:
    one = Viewer([run.path])
    one.sample(ASK)
    process = held_by(one)
    engine = one._prompter._engine
    assert engine is not None
    assert engine.process.stdin is not None
    engine.process.stdin.close()  # what a killed parent leaves
    assert engine.process.wait(20) == 0
    one.sample(ASK)
    process = held_by(one)
    one.close()
    assert not _runs(process)


def test_prompts_come_as_a_body_which_is_bounded(serve: Callable[..., Server], run: RunDirectory) -> None:
    server = serve(run.path)
    path = server.address.split(str(server.server_port))[1] + "api/"
    assert get(server, f"{path}state", "POST", **{"Content-Length": "-1"})[0] == 400
    assert get(server, f"{path}state", "POST", **{"Content-Length": "99999999"})[0] == 413
    assert get(server, path.replace("api/", "") + "app.js", "POST", **{"Content-Length": "0"})[0] == 400
    assert get(server, "/wrong/api/state", "POST", **{"Content-Length": "0"})[0] == 403
    assert get(server, f"{path}state", "POST", **{"Content-Length": "0"})[0] == 200


def _runs(process: int | None) -> bool:
    assert process is not None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
