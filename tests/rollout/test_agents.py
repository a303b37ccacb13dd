"""Programs as environments: what goes wrong with one costs its own sample, and the same program gives the same rollout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import schema
from lockstep.envs.programs import MODEL, outcome_of
from lockstep.errors import TaskError
from lockstep.evaluation.runner import item_result
from lockstep.rollout.agents import AgentEpisode, Agents
from lockstep.rollout.episodes import make_rollouts
from lockstep.rollout.grading import AsyncGrader
from lockstep.rollout.native import NativeEngine
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.serve.endpoint import Endpoint
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.types import ClientRequest, FinishReason, Prompt, Request, Rollout, Sampling
from tests.envs.played import chat_of, engine_of
from tests.envs.sandboxed import require_sandbox, sandbox_refused

PROGRAM = Path(__file__).with_name("own_program.py")


def built(folder: Path, *kinds: str, **settings: Any) -> BuiltTask:
    rows = [{"prompt": f"{kind} please: 3 + 4 =", "answer": "7"} for kind in kinds]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = {"kind": "file", "data": str(folder / "rows.jsonl"), "heldout_rows": 0}
    task = {"questions": questions, "command": f"{sys.executable} {PROGRAM}", **settings}
    return build_task(schema.AgentTask.model_validate(task), 0)


def played(task: BuiltTask, model: Path, samples: int = 1, budget: int = 60) -> dict[str, list[Rollout]]:
    chat = chat_of(model)
    task.open_endpoint = lambda sampler: Endpoint(sampler, chat.unframed(), model=MODEL)
    prompts = task.batch(0, len(task._questions.train))  # type: ignore[attr-defined]
    groups = make_rollouts(
        engine_of(model), chat, task, prompts, samples, Sampling(budget), ("run", 0), 0, AsyncGrader(task)
    )
    return {group.prompt.messages[-1]["content"].split()[0]: list(group.rollouts) for group in groups}


@pytest.mark.parametrize("isolation", ["none", "strict"])
def test_what_goes_wrong_with_a_program_costs_its_own_sample(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    kinds, how = ("crash", "hang", "idle", "greedy", "wordy", "seeded"), require_sandbox(isolation)
    task = built(tmp_path, *kinds, requests=3, seconds=20, isolation=how)
    task.keep_in(tmp_path / "run")
    one = {kind: rollouts[0] for kind, rollouts in played(task, tiny_model_dir).items()}
    assert one["seeded"].grade.reward == 1.0
    assert one["crash"].grade.error == "program: it ended with status 1: the wheel came off"
    assert one["crash"].cut == "error"
    assert one["crash"].sampled > 0, "what it sampled is kept for people to read"
    assert (one["hang"].grade.error, one["hang"].cut) == ("program: it took longer than 20 s", "timeout")
    assert one["idle"].grade.error == "program: it ended without a reply of the model"
    assert (one["idle"].ids, one["idle"].turns) == ((), 0)
    assert one["greedy"].grade.scored
    assert (one["greedy"].turns, one["greedy"].cut) == (3, "turns")
    assert len(one["greedy"].rows) == 3
    assert len(one["greedy"].ids) < one["greedy"].sampled == one["greedy"].charged, "its budget pays for all rows"
    assert item_result(one["greedy"]).tokens == one["greedy"].sampled, "a score counts those of all rows, too"
    assert one["wordy"].grade.scored
    assert (one["wordy"].sampled, one["wordy"].finish) == (60, FinishReason.LENGTH)
    (log,) = (tmp_path / "run" / "agents").glob("*.log")
    assert "the wheel came off" in log.read_text()


def test_a_program_may_give_its_own_reward(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = built(tmp_path, "reward", "nonsense", result="reward", seconds=60)
    one = {kind: rollouts[0] for kind, rollouts in played(task, tiny_model_dir).items()}
    assert one["reward"].grade.reward == 0.5
    assert one["reward"].grade.metrics == {"correct": 0.0, "steps": 3.0}
    assert one["reward"].grade.extracted == "done"
    assert "its last line is not" in str(one["nonsense"].grade.error)


@pytest.mark.parametrize(
    "line", ["", "[1]", '{"reward": 1e400}', f'{{"reward": 1{"0" * 400}}}', '{"reward": 1, "metrics": [1]}']
)
def test_a_last_line_without_a_reward_is_said(line: str) -> None:
    fault = outcome_of(f"thinking\n{line}", "reward").fault
    assert fault is not None
    assert fault.why.startswith("its last line is not")


@pytest.mark.parametrize(("answer", "text"), [('"two\u2028lines\x85"', "two\u2028lines\x85"), ("null", ""), ("0", "0")])
def test_a_last_line_has_an_answer_of_any_text_or_none(answer: str, text: str) -> None:
    found = outcome_of(f'1 %\r2 %\r{{"reward": 1, "answer": {answer}}}\r\n', "reward")
    assert (found.fault, found.text) == (None, text)


def test_a_program_reads_a_reply_while_it_is_sampled(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = built(tmp_path, "stream", result="reward", seconds=60)
    (one,) = played(task, tiny_model_dir)["stream"]
    assert one.grade.scored, one.grade.error
    assert float(one.grade.reward or 0) >= 5
    assert one.grade.extracted == one.text


def test_parallel_requests_without_a_limit_share_a_budget_that_holds(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The first may use all that is left, so the second is refused while it runs; with reply_tokens there is room for both."""
    task = built(tmp_path, "unlimited", result="reward", seconds=60)
    (one,) = played(task, tiny_model_dir)["unlimited"]
    assert (one.turns, one.sampled <= 60, one.finish) == (1, True, FinishReason.LENGTH)
    assert "403" in str(one.grade.error)
    assert "or kept for requests" in str(one.grade.error)
    task = built(tmp_path, "unlimited", seconds=60, reply_tokens=20)
    (one,) = played(task, tiny_model_dir)["unlimited"]
    assert (one.turns, one.sampled <= 40, one.finish) == (2, True, FinishReason.STOP)


def test_the_same_program_gives_the_same_rollouts_in_any_order_of_its_requests(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Six requests at once, of three different prompts: two samples of each, which differ; samples of the group differ too. Also
    in the sandbox, bit for bit."""
    ways = ["none", "none" if sandbox_refused() else "strict"]
    tasks = [built(tmp_path, "parallel", seconds=60, isolation=way) for way in ways]
    found = [played(task, tiny_model_dir, samples=2)["parallel"] for task in tasks]
    rows = [[sorted((row.prompt_ids, row.ids, row.logprobs) for row in one.rows) for one in run] for run in found]
    assert rows[0] == rows[1]
    first, second = rows[0]
    assert len(first) == 6
    assert len({prompt for prompt, _, _ in first}) == 3
    assert len({ids for _, ids, _ in first}) == 6
    assert first != second


def test_a_command_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no program no-such-agent"):
        built(tmp_path, "idle", command="no-such-agent --yes")
    with pytest.raises(TaskError, match=r"no file gone\.py"):
        built(tmp_path, "idle", command=f"{sys.executable} gone.py")
    built(tmp_path, "idle", command="sh -c 'exec python gone.py'")  # a text for the shell, which may change its folder


def test_paths_in_a_command_hold_in_the_folder_of_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    monkeypatch.chdir(PROGRAM.parent)
    monkeypatch.setenv("PATH", str(tmp_path))  # the Python that runs Lockstep is meant
    task = built(tmp_path, "seeded", command="python own_program.py", seconds=60)
    assert played(task, tiny_model_dir)["seeded"][0].grade.reward == 1.0


def test_requests_carry_the_key_of_their_episode(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of several GPUs are dealt whole prompts, which the part of an id before "#" names."""
    asked: list[Request] = []
    submit = NativeEngine.submit
    monkeypatch.setattr(NativeEngine, "submit", lambda self, some: asked.extend(some) or submit(self, some))
    (rollouts,) = played(built(tmp_path, "seeded", requests=3, isolation="none"), tiny_model_dir, samples=2).values()
    assert {one.id.rpartition("/")[0] for one in asked} == {f"{rollouts[0].prompt.id}#{sample}" for sample in (0, 1)}
    assert {one.id.rpartition("#")[0] for one in asked} == {rollouts[0].prompt.id}


@pytest.mark.parametrize("kind", [NativeEngine, PagedEngine])
def test_a_reply_that_is_done_when_its_client_goes_is_dropped(tmp_path: Path, tiny_model_dir: Path, kind: type) -> None:
    """The engine has ended the request already: there is nothing to cancel, and its completion comes."""
    engine, prompt = engine_of(tiny_model_dir, kind=kind), Prompt("q", ({"role": "user", "content": "3 + 4"},), "7")
    agents = Agents(engine, chat_of(tiny_model_dir), Sampling(60), ("run", 0), 0)
    programs = built(tmp_path, "idle").programs(prompt)
    assert programs is not None
    agents.open["q#0"] = AgentEpisode("q#0", prompt, 0, schema.Turns(limit=3), programs, "token", 1)
    replies = [agents.sample(ClientRequest(f"c-{i}", "q#0", (1, 5, 7 + i), Sampling(1))) for i in range(2)]
    agents.listen(0)
    taken = []
    for completion in engine.completed():
        agents.cancel("c-1")
        agents.listen(0)
        taken.append(agents.takes(completion))
    assert taken == [True, True]
    assert [one.cancelled() for one in replies] == [False, True]
    assert agents.cancelled == 1
    assert len(agents.open["q#0"].done) == 1
