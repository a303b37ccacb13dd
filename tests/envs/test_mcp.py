"""Tools of a real MCP server, in the processes of environments."""

from __future__ import annotations

import sys
import time
from itertools import groupby, pairwise
from pathlib import Path
from typing import cast

import psutil
import pytest
from tokenizers import Tokenizer

pytest.importorskip("mcp")

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.envs.calls import Call, read_calls
from lockstep.envs.runners import Fault, ProcessRunner
from lockstep.envs.tools import MAX_RESULT, build_tools, run_call
from lockstep.errors import TaskError
from lockstep.loops.start import start_run
from lockstep.track.rollouts import read_rollouts
from lockstep.track.writer import read_metrics
from lockstep.types import Prompt, Turn
from lockstep.user_code import load_object

SERVER = """
import os, time
from mcp.server import MCPServer

server = MCPServer("counter")
seen = []

@server.tool()
def note(word: str) -> str:
    "Keeps a word and says all of them."
    seen.append(word)
    return " ".join([*seen, os.environ.get("SUFFIX", "")])

@server.tool()
def shout(times: int) -> str:
    "Shouts."
    return "a" * times

@server.tool()
def fail() -> str:
    "Fails."
    raise ValueError("no")

@server.tool()
def hang() -> str:
    "Hangs."
    print(os.getpid(), file=open(__file__ + ".pid", "w"), flush=True)
    time.sleep(1000)

server.run()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


def named(server: Path, **settings: object) -> schema.McpServer:
    return schema.McpServer.model_validate({"mcp": f"{sys.executable} {server}", **settings})


def answers(runner: ProcessRunner, count: int = 1) -> dict[str, Turn | Fault]:
    found: dict[str, Turn | Fault] = {}
    until = time.monotonic() + 120
    while len(found) < count and time.monotonic() < until:
        found |= dict(runner.poll(1.0))
    return found


def test_each_episode_has_a_server_of_its_own_which_ends_with_it(server: Path) -> None:
    tools = [named(server, env={"SUFFIX": "!"})]
    task = schema.ToolTask.model_validate({"tools": [one.model_dump() for one in tools], "format": "plain"})
    runner = ProcessRunner(task, 30.0)
    try:
        for key in ("a", "b"):
            runner.begin(key, Prompt(key, ({"role": "user", "content": "go"},), ""), 1)
        answers(runner, 2)
        said = {}
        for word in ("one", "two"):
            for key in ("a", "b"):
                runner.step(key, f"note({word}{key})")
            said = answers(runner, 2)
        texts = {key: turn.observation[0]["content"] for key, turn in said.items() if isinstance(turn, Turn)}
        assert texts == {"a": "onea twoa !", "b": "oneb twob !"}, "a server keeps the state of its own episode"
        runner.step("a", "shout(20000)\nfail()\nshout(many)")
        runner.step("b", "it is 4")
        turns = answers(runner, 2)
        assert isinstance(turns["a"], Turn)
        assert isinstance(turns["b"], Turn)
        shouted, failed, wrong = turns["a"].observation[0]["content"].split("\n")
        assert shouted == "a" * MAX_RESULT + "… (20000 characters)"
        assert failed.startswith("error: ")
        assert wrong == "error: times: 'many' is not of type 'integer'"
        assert turns["a"].metrics == {"tool_calls": 3.0, "tool_errors": 2.0}
        assert turns["b"].answer
    finally:
        runner.close()


def test_a_server_that_hangs_costs_its_own_episode_and_is_killed(server: Path) -> None:
    task = schema.ToolTask.model_validate({"tools": [named(server, only=["hang"]).model_dump()], "format": "plain"})
    runner = ProcessRunner(task, 8.0)
    try:
        runner.begin("a", Prompt("a", ({"role": "user", "content": "go"},), ""), 1)
        answers(runner)
        runner.step("a", "hang()")
        found = answers(runner)["a"]
        assert isinstance(found, Fault)
        assert found.kind == "timeout"
    finally:
        runner.close()
    pid = int(server.with_name("server.py.pid").read_text())
    until = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_python_is_the_one_that_runs_lockstep(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "note" in build_tools([named(server, mcp=f"python {server}")])


def test_a_server_that_cannot_be_used_is_named_before_the_run(server: Path) -> None:
    with pytest.raises(TaskError, match=r"no tool sing; its tools are: (fail|note)"):
        build_tools([named(server, only=["note", "sing"])])
    with pytest.raises(TaskError, match="the MCP server did not list its tools"):
        build_tools([schema.McpServer(mcp=f"{sys.executable} -c 'raise SystemExit(3)'")])
    with pytest.raises(ValueError, match="is not on this machine"):
        schema.McpServer(mcp="https://example.org/mcp")


@pytest.mark.slow
def test_a_server_over_http_on_this_machine(tmp_path: Path) -> None:
    import socket
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "http_server.py"
    path.write_text(SERVER.replace("server.run()", f'server.run("streamable-http", host="127.0.0.1", port={port})'))
    process = subprocess.Popen([sys.executable, str(path)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        tools = build_tools([schema.McpServer(mcp=f"http://127.0.0.1:{port}/mcp", only=["note"])])
        assert run_call(tools, Call("note", {"word": "here"})).text.strip() == "here"
    finally:
        process.kill()
        process.wait()


GRADER = "def grade(prompt, reply):\n    return len(reply) % 7 / 7\n"
"""Rewards that differ within a group, whatever the model says: so the step has a gradient."""


@pytest.mark.slow
def test_a_run_trains_against_a_server(tmp_path: Path, smollm2_dir: Path) -> None:
    """The recipe of the guide with its server: the model calls it, and what it says is read and never trained."""
    (tmp_path / "grader.py").write_text(GRADER)
    folder = Path(__file__).parents[2] / "recipes" / "envs"
    overrides = {
        "runs_dir": f"{tmp_path}/runs",
        "task.questions.data": f"{folder}/shop.jsonl",
        "task.questions.verifier": f"{{kind: python, path: '{tmp_path}/grader.py:grade', workers: 1}}",
        "task.tools": f"[{{mcp: {sys.executable} {folder}/shop_server.py}}]",
        "eval.enabled": "false",
        "rollout.slots": "8",
        "steps": "1",
        "prompts_per_step": "2",
        "samples_per_prompt": "4",
    }
    run = start_run(load([f"{folder}/shop.yaml", *(f"{name}={value}" for name, value in overrides.items())]))
    prices = cast(dict[str, int], load_object(f"{folder}/shop_server.py:PRICES"))
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    rows = read_rollouts(run, 1)
    calls = 0
    for row in rows:
        assert row.error is None
        tokens = zip(row.ids, row.trained, strict=True)
        spans = [(sampled, [token for token, _ in span]) for sampled, span in groupby(tokens, key=lambda pair: pair[1])]
        for (sampled, said), (_, read) in pairwise(spans):
            answer = tokenizer.decode(read)
            for call in read_calls(tokenizer.decode(said), "plain", ["price"]) if sampled else ():
                if isinstance(call, Call) and call.arguments in prices:
                    calls += 1
                    assert str(prices[str(call.arguments)]) in answer
    assert len(rows) == 8
    assert calls >= 1, "no reply called the server"
    step = next(one.metrics for one in read_metrics(run) if one.step == 1)
    assert step["batch/tokens_generated"] == step["env/tokens_sampled"] == sum(sum(row.trained) for row in rows)
    assert step["grad/norm"] > 0
