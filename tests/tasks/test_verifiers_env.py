"""Environments of verifiers, in a Python of their own: a run trains on one that this file takes as a user would write it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.envs.verifiers_env import _driven, _outcome
from lockstep.errors import TaskError
from lockstep.loops.start import start_run
from lockstep.tasks.build import build_task
from lockstep.track.rollouts import read_rollouts
from tests.pythons import python_with

ENVIRONMENT = Path(__file__).parents[2] / "recipes" / "envs" / "digit_sums.py"


def test_a_python_without_the_package_or_the_environment_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no Python interpreter at .*gone"):
        build_task(schema.VerifiersTask(env="gsm8k-v1", python=str(tmp_path / "gone")), 0)
    with pytest.raises(TaskError, match="No module named 'verifiers'"):
        build_task(schema.VerifiersTask(env="gsm8k-v1", python=sys.executable), 0)
    (tmp_path / "talks").write_text("#!/bin/sh\necho welcome; exec sleep 60\n")
    (tmp_path / "talks").chmod(0o755)
    with pytest.raises(TaskError, match=r"its process said 'welcome\\n' instead of its tasks"):
        build_task(schema.VerifiersTask(env="gsm8k-v1", python=str(tmp_path / "talks")), 0)


def test_programs_beside_its_python_are_found_first(tmp_path: Path) -> None:
    """`uv` is installed there; verifiers would fetch another one from the network into the user's home."""
    for name, text in (("python", "exec uv"), ("uv", "echo the uv beside it")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(TaskError, match="its process said 'the uv beside it"):
        build_task(schema.VerifiersTask(env="gsm8k-v1", python=str(tmp_path / "python")), 0)


def test_a_file_is_found_by_its_path_and_an_id_by_its_name() -> None:
    own = _driven(schema.VerifiersTask(env=str(ENVIRONMENT), settings={"most": 3}, requests=5))
    assert own["paths"] == [str(ENVIRONMENT.parent)]
    assert own["env"]["taskset"] == {"id": "digit_sums", "most": 3}
    assert own["env"]["agent"]["max_turns"] == 5
    hub = _driven(schema.VerifiersTask(env="gsm8k-v1", config={"agent": {"max_turns": 2}}))
    assert (hub["paths"], hub["env"]) == ([], {"taskset": {"id": "gsm8k-v1"}, "agent": {"max_turns": 2}})


def test_a_reward_that_is_no_number_is_no_score() -> None:
    fault = _outcome({"ended": "a", "reward": float("nan"), "metrics": {}, "answer": ""}).fault
    assert fault is not None
    assert fault.why == "its reward is nan"
    good = _outcome({"ended": "a", "reward": 1.25, "metrics": {"right": 1.0, "odd": float("inf")}, "answer": "7"})
    assert (good.reward, good.metrics, good.text) == (1.25, {"right": 1.0}, "7")
    assert _outcome({"ended": "a", "reward": 0.0, "metrics": {}, "answer": None}).text == "", "no reply, not 'None'"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has verifiers."""
    return python_with(tmp_path_factory.mktemp("hub"), "verifiers>=0.4,<0.5", "uv")


@pytest.mark.slow
def test_a_run_trains_on_an_environment_as_it_is(tmp_path: Path, tiny_model_dir: Path, hub: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"""
name: hub
runs_dir: {tmp_path}/runs
steps: 1
prompts_per_step: 2
samples_per_prompt: 3
model: {{path: {tiny_model_dir}, dtype: fp32}}
task: {{kind: verifiers, env: {ENVIRONMENT}, python: {hub}, heldout_rows: 4}}
rollout: {{max_tokens: 16, slots: 8}}
optimizer: {{lr: 1.0e-3}}
eval: {{enabled: false}}
""")
    run = start_run(load([str(tmp_path / "recipe.yaml")]))
    rows = read_rollouts(run, 1)
    assert len(rows) == 6
    for row in rows:
        assert row.error is None
        assert row.reward == pytest.approx(row.metrics["right"] * 1.0 + row.metrics["short"] * 0.25)
        assert row.metrics["letters"] >= 0
        assert sum(row.trained) == len(row.ids) == 16
        assert row.messages[0]["role"] == "system"
