"""Environments behind a server of OpenEnv: a small server that speaks the protocol, and one of the package itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("websockets")

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.envs import openenv
from lockstep.envs.runners import Fault
from lockstep.errors import ConfigError, TaskError
from lockstep.loops.preflight import start_checks
from lockstep.tasks.build import build_task
from lockstep.track.rollouts import read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Turn
from tests.envs.test_adapters import episodes, played, turn
from tests.pythons import python_with

SERVER = Path(__file__).parents[2] / "recipes" / "envs" / "letters_server.py"
TEXT = {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["text"]}


@dataclass
class Fake:
    """A server whose sessions say what they are told: the action's text names what happens."""

    action: dict[str, Any] = field(default_factory=lambda: TEXT)
    sessions: int = 1
    late: float = 0.0
    """Seconds after which a closed session is free."""
    breaks: int = 0
    """Openings that break from now on."""
    seeded: bool = True
    open: int = 0
    resets: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def schema(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        found = request.path == "/schema"
        status = HTTPStatus.OK if found else HTTPStatus.NOT_FOUND
        return Response(status, "", Headers(), json.dumps({"action": self.action, "observation": {}}).encode())

    def session(self, connection: ServerConnection) -> None:
        with self.lock:
            free = self.open < self.sessions
            self.open += free
        if not free:
            data = {"message": "no room", "code": "CAPACITY_REACHED", "max_sessions": self.sessions}
            connection.send(json.dumps({"type": "error", "data": data}))
            return
        try:
            for raw in connection:
                message = json.loads(raw)
                if message["type"] == "reset" and self.breaks:
                    self.breaks -= 1
                    return
                answer = self.answer(message["type"], message["data"])
                if answer is None:
                    return
                connection.send(json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            time.sleep(self.late)
            with self.lock:
                self.open -= 1

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        (self.resets if kind == "reset" else self.actions).append(data)
        said = {
            "text": f"seed {data['seed'] if self.seeded else len(self.resets)}" if kind == "reset" else "on",
            "metadata": {"secret": 1},
        }
        match data.get("text"):
            case "break":
                return None
            case "hang":
                time.sleep(1.5)
            case "fail":
                return {"type": "error", "data": {"message": "it is broken", "code": "EXECUTION_ERROR"}}
            case "refuse":
                errors = [{"loc": ["text"], "msg": "not a move"}]
                return {"type": "error", "data": {"message": "m", "code": "VALIDATION_ERROR", "errors": errors}}
            case "more":
                said |= {"left": 2}
        done = data.get("text") == "end"
        return {
            "type": "observation",
            "data": {"observation": said, "reward": 0.5 if data.get("text") else None, "done": done},
        }


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    server: Server = serve(made.session, "127.0.0.1", 0, process_request=made.schema)
    made.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()


def settings(fake: Fake, **more: Any) -> schema.OpenEnvTask:
    return schema.OpenEnvTask(**{"url": fake.url, "seeds": 4} | more)


def said(found: Turn | Fault) -> str:
    return turn(found).observation[0]["content"]


def test_replies_are_actions_and_rewards_add_up(fake: Fake) -> None:
    task = episodes(settings(fake, instructions="Play.", reset={"level": 2}, solved=1.0))
    (prompt,) = task.batch(0, 1)
    assert prompt.messages[0]["content"] == f"Play.\n\nseed {prompt.data['seed']}"
    assert fake.resets[-1].keys() == {"level", "seed"}
    go, more, refused, end = played(task, prompt, [" go\n", "more", "refuse", "end"])
    assert (said(go), turn(go).reward) == ("on", 0.5)
    assert fake.actions[0] == {"text": "go"}
    assert json.loads(said(more)) == {"text": "on", "left": 2}  # several fields: all of them, without metadata
    assert said(refused) == "That is no action: text: not a move"
    assert (turn(refused).metrics, turn(refused).reward, turn(refused).done) == ({"tool_errors": 1.0}, 0.0, False)
    assert (turn(end).done, turn(end).metrics, turn(end).observation) == (True, {"correct": 1.0}, ())
    assert turn(played(task, prompt, ["end"])[0]).metrics == {"correct": 0.0}
    held, asked = ({p.messages[0]["content"] for p in ps} for ps in (task.heldout("id_probe", 4), task.batch(0, 4)))
    assert held.isdisjoint(asked)


def test_further_episodes_wait_for_a_session(fake: Fake) -> None:
    task = episodes(settings(fake, sessions=1))
    (prompt,) = task.batch(0, 1)
    fake.sessions = 2
    runner = task.runner(prompt)
    assert runner is not None
    for key in ("a", "b"):
        runner.begin(key, prompt, 1)
    answered = [key for _ in range(8) for key, _ in runner.poll(0.25)]
    assert answered == ["a"]
    runner.end("a")
    while not (answers := runner.poll(1.0)):
        pass
    assert [key for key, _ in answers] == ["b"]
    runner.end("b")


def test_a_reply_is_the_whole_action(fake: Fake) -> None:
    task = episodes(settings(fake, action="json", observation="metadata"))
    (prompt,) = task.batch(0, 1)
    assert json.dumps(TEXT) in prompt.messages[0]["content"]
    wrong, listed, right, fenced = played(
        task, prompt, ["go", "[1]", '{"text": "a", "n": [1]}', '```json\n{"text": "end"}\n```']
    )
    for found in (wrong, listed):
        assert said(found) == "That is no action: it is not one JSON object"
        assert turn(found).metrics == {"tool_errors": 1.0}
    assert said(right) == '{"secret": 1}'
    assert fake.actions == [{"text": "a", "n": [1]}, {"text": "end"}]
    assert turn(fenced).done


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("fail", "EXECUTION_ERROR: it is broken"),
        ("break", "the connection to the server broke"),
        ("hang", "longer than 0.5 s"),
    ],
)
def test_a_failure_is_no_score(fake: Fake, action: str, why: str) -> None:
    fake.sessions = 2
    task = episodes(settings(fake, turns=schema.Turns(step_seconds=0.5 if action == "hang" else 20.0)))
    (prompt,) = task.batch(0, 1)
    before = len(fake.resets)
    (fault,) = played(task, prompt, [action])
    assert isinstance(fault, Fault)
    assert why in fault.why
    assert len(fake.resets) == before + 1  # an episode is not begun again
    assert turn(played(task, prompt, ["end"])[0]).done


def test_an_opening_that_breaks_is_tried_once_more(fake: Fake) -> None:
    task = episodes(settings(fake))
    (prompt,) = task.batch(0, 1)
    fake.breaks = 1
    assert turn(played(task, prompt, ["end"])[0]).done
    fake.breaks = 2
    with pytest.raises(TaskError, match="the connection to the server broke"):
        openenv.OpenEnv(settings(fake), fake.url, "text", "").start(1)
    assert fake.breaks == 0


def test_a_session_that_is_freed_late_is_waited_for_and_one_that_never_is_is_said(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = episodes(settings(fake))
    (prompt,) = task.batch(0, 1)
    fake.late = 0.5
    assert turn(played(task, prompt, ["end"])[0]).done
    assert turn(played(task, prompt, ["end"])[0]).done
    with fake.lock:
        fake.sessions = 0
    one = openenv.OpenEnv(settings(fake), fake.url, "text", "")
    monkeypatch.setattr(openenv, "FREED_SECONDS", 0.3)
    with pytest.raises(TaskError, match=r"the server had no free session for 0\.3 s: no room\n.*task\.sessions"):
        one.start(1)


def test_what_cannot_be_played_is_refused_before_the_run(fake: Fake, tmp_path: Path, tiny_model_dir: Path) -> None:
    def refused(why: str, **more: Any) -> None:
        with pytest.raises(TaskError, match=why) as caught:
            build_task(settings(fake, **more), 0)
        until = time.monotonic() + 60
        while fake.open and time.monotonic() < until:
            time.sleep(0.01)
        assert not fake.open, f"a session is still open after {caught.value}"

    refused("cannot be the field word alone: an action has text, metadata and requires text", action="word")
    refused(r"the observation has no field board; its fields are: text, metadata", observation="board")
    refused("no OpenEnv server answers at this address .*404", url=f"{fake.url}/elsewhere")
    refused("there is no program nowhere", url=None, command="nowhere")
    refused(
        r"the server ended; it printed: .*no such port",
        url=None,
        command=f"{sys.executable} -c 'exit(\"no such port\")'",
    )
    refused("does not answer on port", url=None, command="sleep 60", start_seconds=0.5)
    assert not [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
    fake.seeded = False
    refused("two episodes with the same seed differently")
    fake.action = {"properties": {"row": {"type": "integer"}, "text": {"type": "string"}}, "required": ["row", "text"]}
    refused("cannot be the field text alone", action="text")
    fake.action = {"properties": {"row": {"type": "integer"}}, "required": ["row"]}
    refused("cannot be an action: an action has row")
    gone = "task={kind: openenv, url: 'http://127.0.0.1:9'}"
    checks = start_checks(load(["smoke", f"model.path={tiny_model_dir}", f"runs_dir={tmp_path}", gone]))
    assert any(check.verdict == "fail" and "no OpenEnv server answers" in check.found for check in checks)
    for wrong in (
        "",
        "url: 'http://127.0.0.1:9', command: a",
        "url: 'http://127.0.0.1:9', env: {A: b}",
        "command: a, reset: {seed: 1}",
    ):
        with pytest.raises(ConfigError):
            load(["smoke", f"task={{kind: openenv, {wrong}}}"])


def test_a_server_ends_with_its_owner_and_takes_along_what_it_started() -> None:
    command = ["sh", "-c", "sleep 1000 & sleep 1000"]
    owned = subprocess.Popen(
        [sys.executable, openenv.die_with_parent.__file__, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while len(started := psutil.Process(owned.pid).children(recursive=True)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    for pipe in (owned.stdout, owned.stdin):  # as when the owner is killed
        assert pipe is not None
        pipe.close()
    assert owned.wait(60) < 0
    _, alive = psutil.wait_procs(started, 10)
    assert (len(started), alive) == (3, [])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has openenv."""
    return python_with(tmp_path_factory.mktemp("hub"), "openenv")


@pytest.mark.slow
def test_a_run_trains_on_an_environment_of_the_package(tmp_path: Path, tiny_model_dir: Path, hub: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"""
name: letters
runs_dir: {tmp_path}/runs
steps: 1
prompts_per_step: 4
samples_per_prompt: 4
model: {{path: {tiny_model_dir}, dtype: fp32}}
task: {{kind: openenv, command: '{hub} {SERVER} {{port}} 3', sessions: 3, seeds: 20, turns: {{limit: 3, reply_tokens: 2}}}}
rollout: {{max_tokens: 300, slots: 8}}
optimizer: {{lr: 1.0e-3}}
eval: {{enabled: false}}
""")
    program = "import sys; from lockstep.cli import main; sys.exit(main(['train', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "recipe.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = read_rollouts(RunDirectory.open(tmp_path / "runs" / "letters"), 1)
    assert len(rows) == 16
    for row in rows:
        assert row.error is None
        assert row.messages[0]["content"].startswith("Name one letter of ")
        assert row.reward * 3 == pytest.approx(round(row.reward * 3))
        assert sum(row.trained) < len(row.ids)  # what the environment said is read, not trained
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(SERVER) in (p.info["cmdline"] or ())]
