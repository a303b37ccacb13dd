"""The Python interface: recipes as objects, training, evaluation, and runs as data frames."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.api.figure import RunFigure
from lockstep.config.load import CACHES, dump, load
from lockstep.errors import ConfigError, HealthStop, Interrupted, LockstepError, RunDirectoryError, RunLockedError
from lockstep.track.rundir import RunDirectory, manifest_facts
from tests.gallery import Gallery
from tests.loops.runs import LORA, NO_EVAL, numbers, terminate_in, words

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(gallery: Gallery) -> lockstep.Run:
    return lockstep.Run(gallery.run("lora").path)


def test_importing_the_package_loads_nothing_heavy_and_completes_its_names():
    script = """
import sys, lockstep
assert {"train", "evaluate", "Run", "recipe"} <= set(dir(lockstep))
lockstep.recipe("quickstart", steps=3), lockstep.train, lockstep.Run
assert not {"torch", "pandas", "matplotlib", "transformers"} & sys.modules.keys(), sys.modules.keys()
assert callable(lockstep.evaluate)
import lockstep.evaluation.records
assert callable(lockstep.evaluate) and lockstep.evaluation.records
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_stub_has_the_names_of_the_package():
    stub = (ROOT / "lockstep" / "__init__.pyi").read_text()
    assert {name for name in lockstep.__all__ if f" as {name}\n" in stub} == set(lockstep.__all__) - {"__version__"}


def test_a_recipe_from_settings_is_that_of_the_command_line():
    made = lockstep.recipe("quickstart", steps=20, optimizer__lr=1e-5, adapter={"kind": "lora", "rank": 4})
    typed = load(["quickstart", "steps=20", "optimizer.lr=1e-5", "adapter={kind: lora, rank: 4}"])
    assert dump(made) == dump(typed)
    again = lockstep.recipe(made, "steps=30", adapter=made.adapter)
    assert dump(again) == dump(load(["quickstart", "optimizer.lr=1e-5", "adapter={kind: lora, rank: 4}", "steps=30"]))


def test_texts_of_settings_arrive_as_they_are():
    for text in ("Hi 😀", "\\ud83d\\ude00", "a\u2028b", 'say "7"\n', "\\\\😀"):
        assert lockstep.recipe("quickstart", chat__system=text).chat.system == text


def test_mistakes_in_settings_are_all_named_with_the_nearest_names():
    with pytest.raises(ConfigError) as caught:
        lockstep.recipe("quickstart", stepz=3, optimizer__learning=2)
    assert any("stepz=3: no such setting; did you mean steps?" in line for line in caught.value.mistakes)
    assert any("optimizer.learning" in line for line in caught.value.mistakes)
    with pytest.raises(ConfigError, match="does not say which questions"):
        lockstep.train(lockstep.Recipe())


def test_training_from_python_is_training_from_the_command_line(tmp_path: Path, tiny_model_dir: Path):
    given = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL)
    subprocess.run([sys.executable, "-m", "lockstep", "train", *given, "name=typed"], check=True, capture_output=True)
    run = lockstep.train(given[0], *given[1:], name="called")
    assert run.state.name == "finished"
    assert numbers(RunDirectory.open(run.path)) == numbers(RunDirectory.open(tmp_path / "runs" / "typed"))
    assert lockstep.resume(run).state == run.state  # nothing is left to do
    with pytest.raises(RunDirectoryError, match="a run already exists here"):
        lockstep.train(given[0], *given[1:], name="called")


def test_training_works_inside_a_running_event_loop(tmp_path: Path, tiny_model_dir: Path):
    async def cell() -> lockstep.Run:
        return lockstep.train(words(tmp_path, tiny_model_dir)[0], *LORA, NO_EVAL, steps=1)

    assert asyncio.run(cell()).state.name == "finished"


def test_training_works_in_a_thread_which_gets_no_signals(tmp_path: Path, tiny_model_dir: Path):
    given = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lockstep.train, *given).result().state.name == "finished"


def test_a_signal_saves_and_raises_and_the_run_can_be_resumed(tmp_path: Path, tiny_model_dir: Path):
    given = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL)
    # The grader, a child of this process, sends the signal.
    terminate_in(tmp_path, tmp_path / "runs" / "run", 2)
    with pytest.raises(Interrupted, match="a checkpoint was saved"):
        lockstep.train(*given)
    run = lockstep.Run(tmp_path / "runs" / "run")
    assert run.state.name == "interrupted"
    assert "SIGTERM after step" in run.state.reason
    assert lockstep.resume(run.path).state.name == "finished"
    assert run.metrics.index.tolist() == [1, 2, 3]


def test_the_reason_of_a_stop_is_in_the_state(tmp_path: Path, tiny_model_dir: Path):
    given = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, f"task.verifier.path={tmp_path}/grader.py:down")
    (tmp_path / "down").write_text(str(tmp_path / "runs" / "run"))
    with pytest.raises(HealthStop):
        lockstep.train(*given, steps=5)
    state = lockstep.Run(tmp_path / "runs" / "run").state
    assert state.name == "stopped"
    assert state.reason


def test_a_run_that_another_process_writes_is_locked_and_running(tmp_path: Path, tiny_model_dir: Path):
    made = load(words(tmp_path, tiny_model_dir, *LORA, NO_EVAL))
    with RunDirectory.create(tmp_path / "runs" / "run", dump(made), manifest_facts()):
        run = lockstep.Run(tmp_path / "runs" / "run")
        assert run.state.name == "running"
        with pytest.raises(RunLockedError):
            lockstep.resume(run)
    assert run.state.name == "killed"


def test_the_frames_of_a_run(run: lockstep.Run):
    assert run.recipe.name == "lora"
    assert run.metrics.loc[3, "reward/mean"] == pytest.approx(run.rollouts(3)["reward"].mean())
    last = run.metrics.index[-1]  # numpy's
    assert run.rollouts(last).equals(run.rollouts([last]))
    every = run.rollouts()
    assert sorted(every["step"].unique()) == [1, 2, 3]
    assert len(every) == 3 * 2 * 4
    assert every["question"].str.contains("State the final answer").all()
    scores = run.scores
    assert sorted(scores["step"].unique()) == [0, 2, 3]
    assert (scores["low"] <= scores["value"]).all()
    sampled = scores[scores["mode"].str.startswith("sampled")].iloc[-1]
    assert sampled["value"] == run.metrics.loc[3, "eval/sampled/accuracy"]
    kinds = run.events.set_index("kind")
    assert kinds.loc["finished", "step"] == 3
    assert str(kinds["time"].dt.tz) == "UTC"
    assert "finished, step 3 of 3" in repr(run)
    with pytest.raises(RunDirectoryError, match="no rollouts of step 9"):
        run.rollouts(9)
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        lockstep.Run(run.path.parent / "nothing")


@pytest.mark.parametrize("call", [lockstep.Run, lockstep.resume, lockstep.evaluate, lockstep.compare])
def test_a_path_that_no_file_can_have_is_refused(call: Callable[[str], object]):
    with pytest.raises(RunDirectoryError, match="no file or folder can have so long a name"):
        call("a" * 300)


def test_the_plot_is_a_picture_that_a_notebook_shows(run: lockstep.Run):
    figure = run.plot("reward/mean", "grad/norm", smooth=2)
    assert isinstance(figure, RunFigure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    rewards = run.metrics["reward/mean"].dropna()
    drawn = figure.axes[0].lines[0]
    assert drawn.get_xdata().tolist() == rewards.index.tolist()
    assert drawn.get_ydata()[1] == pytest.approx((rewards.iloc[0] + rewards.iloc[1]) / 2)
    assert len(run.plot("reward/mean", beside=[run]).axes[0].lines) == 1  # the same run twice is one curve
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        run.plot("reward/meen")


def test_scores_are_measured_and_compared(gallery: Gallery, tmp_path: Path):
    run = lockstep.Run(gallery.copy("lora", tmp_path / "copy").path)
    outcome = lockstep.evaluate(run, step=2, mode="greedy")
    stored = run.scores.query("step == 2 and mode == 'greedy'").iloc[0]
    assert outcome.scores[0].accuracy == stored["value"]
    (compared,) = [one for one in lockstep.compare(run) if one.pair.after.brief.score.conditions.mode == "greedy"]
    assert compared.comparisons[0].trained == run.scores.query("step == 3 and mode == 'greedy'").iloc[0]["value"]
    assert "McNemar" in str(compared)


@pytest.mark.parametrize(("asked", "told"), [({"role": "bogus"}, "id_probe"), ({"items": 0}, "at least one item")])
def test_options_that_no_evaluation_has_are_refused(run: lockstep.Run, asked: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        lockstep.evaluate(run, **asked)


def test_a_cache_of_the_recipe_serves_training_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in CACHES:
        monkeypatch.setenv(name, "")
    with pytest.raises(LockstepError):
        lockstep.train("quickstart", f"paths.cache={tmp_path}", f"model.path={tmp_path}/nothing")
    assert os.environ["HF_HOME"] == f"{tmp_path}/huggingface"


def test_a_loop_of_your_own_trains(tmp_path: Path, tiny_model_dir: Path):
    example = ROOT / "docs" / "examples" / "own_loop.py"
    code = [line for line in example.read_text().splitlines() if line.strip()]
    assert len(code) <= 45  # 40 of code, and the docstring
    given = words(tmp_path, tiny_model_dir, "steps=2", NO_EVAL)
    done = subprocess.run([sys.executable, example, *given], check=True, capture_output=True, text=True, cwd=ROOT)
    first, second = done.stdout.splitlines()
    assert first.startswith("step 1: reward 0.")
    assert first.split("weights ")[1] != second.split("weights ")[1]
