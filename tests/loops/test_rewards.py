"""Reward files and rows of TRL and verl train as they are: only the recipe names them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.cli import main
from lockstep.errors import TaskError
from lockstep.tasks.build import build_task
from lockstep.track.rollouts import read_rollouts
from lockstep.track.writer import read_metrics
from tests.loops.runs import NO_EVAL, fingerprints, recipe, trained

REWARDS = Path(__file__).parents[1] / "verifiers" / "rewards"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def verl_rows(folder: Path) -> list[str]:
    """Write rows as verl's examples/data_preprocess scripts do; returns the overrides that name them."""
    rows = [
        {
            "data_source": "openai/gsm8k" if i % 2 else "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(40)
    ]
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return [f"task.data={folder}/train.parquet", "task.verifier.kind=verl"]


def trl_rows(folder: Path) -> list[str]:
    """Write a conversational data set with a column `ground_truth`; returns the overrides that name it."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "ground_truth": str(i + 1), "task": "math"}
        for i in range(40)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(REWARDS / "trl_rewards.py", folder)
    return [f"task.data={folder}/rows.jsonl", "task.verifier.kind=trl", NO_EVAL]


def test_verls_parquet_and_compute_score_train(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The rewards in the run's files are those that verl's function gives to the sampled text."""
    file = tmp_path / "score.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    letters = len(set(solution_str))\n"
        "    return {'score': letters / 10 + extra_info['index'] / 100, 'acc': ground_truth in solution_str,\n"
        "            'letters': letters, 'even': data_source == 'math_dapo'}\n"
    )
    run = trained(tmp_path, tiny_model_dir, *verl_rows(tmp_path), f"task.verifier.path={file}:compute_score")
    rows = read_metrics(run)
    assert len(rows) == 4
    assert {"answer/letters", "answer/even", "answer/correct"} <= rows[1].metrics.keys()
    assert all(row.metrics["reward/unscored"] == 0 for row in rows[1:])
    assert len(set(fingerprints(run).values())) == 4  # every step changed the weights
    score = module(file).compute_score
    for step in (1, 2, 3):
        for rollout in read_rollouts(run, step):
            index = int(rollout.prompt_id.rpartition("/")[2]) - 1
            assert rollout.reward == pytest.approx(score("", rollout.text, "", {"index": index})["score"])


def test_trls_functions_train_on_whole_groups(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A function that compares the samples of a prompt sees all of them, and no others."""
    own = tmp_path / "own.py"
    own.write_text(
        "async def letters(completions, completion_ids, ground_truth, **kwargs):\n"
        "    assert len(set(ground_truth)) == 1 and all(completion_ids)\n"
        "    counts = [len(set(c[0]['content'])) for c in completions]\n"
        "    return [count - sum(counts) / len(counts) for count in counts]\n"
        "def never(completions, task, **kwargs):\n"
        "    return [None] * len(task)\n"
    )
    paths = f"[{own}:letters, {own}:never]"
    chosen = (*trl_rows(tmp_path), f"task.verifier.path={paths}", "task.verifier.weights=[2.0, 1.0]")
    run = trained(tmp_path, tiny_model_dir, *chosen)
    for step in (1, 2, 3):
        groups: dict[str, list[tuple[float, int]]] = {}
        for rollout in read_rollouts(run, step):
            assert rollout.reward is not None
            groups.setdefault(rollout.prompt_id, []).append((rollout.reward, len(set(rollout.text))))
        for group in groups.values():
            mean = sum(letters for _, letters in group) / len(group)
            assert len(group) == 4
            assert [reward for reward, _ in group] == pytest.approx([2 * (letters - mean) for _, letters in group])
    assert read_metrics(run)[-1].metrics["answer/not_applicable"] == 1.0
    again = trained(tmp_path, tiny_model_dir, *chosen, "task.verifier.workers=3", "rollout.slots=2", "name=again")
    assert fingerprints(again) == fingerprints(run)  # neither workers nor the order of replies matters


def test_rows_are_read_as_the_other_system_lays_them_out(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = recipe(
        tmp_path, tiny_model_dir, *verl_rows(tmp_path), f"task.verifier.path={REWARDS}/verl_rewards.py:compute_score"
    )
    (prompt,) = build_task(made.task, 0).batch(0, 1)
    index = prompt.data["extra_info"]["index"]  # type: ignore[index]
    assert (prompt.answer, prompt.messages[0]["content"]) == (str(index + 1), f"What is {index} + 1?")
    assert set(prompt.data) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    made = recipe(tmp_path, tiny_model_dir, f"task.data={tmp_path}/train.parquet", "task.verifier={kind: numeric}")
    (prompt,) = build_task(made.task, 0).batch(0, 1)  # any other verifier reads verl's files, too
    assert set(prompt.data) == {"data_source", "ability", "reward_model", "extra_info"}
    assert prompt.answer == str(prompt.data["extra_info"]["index"] + 1)  # type: ignore[index]


def test_data_check_grades_whole_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without an answer, whose reward function reads a column of its own, are fit to train; their file is not, alone."""
    (tmp_path / "own.py").write_text(
        "def own(completions, prompt_id, **kwargs):\n    return [float(i) for i in prompt_id]\n"
    )
    rows = [{"prompt": f"What is {i} + 1?", "prompt_id": i} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe_text = (
        f"task: {{kind: file, data: {tmp_path}/rows.jsonl, verifier: {{kind: trl, path: '{tmp_path}/own.py:own'}}}}"
    )
    (tmp_path / "own.yaml").write_text(recipe_text)
    assert main(["data", "check", str(tmp_path / "own.yaml")]) == 0, capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "rows.jsonl")]) != 0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("too_few", "too_few returned 1 rewards for 4 completions"),
        ("never", "every reward function returned None for each of the 20 questions"),
        ("without_kwargs", "unexpected keyword argument"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_before_the_run(tmp_path, tiny_model_dir, function, why):
    chosen = trl_rows(tmp_path)
    made = recipe(tmp_path, tiny_model_dir, *chosen, f"task.verifier.path={tmp_path}/trl_rewards.py:{function}")
    with pytest.raises(TaskError, match=why):
        build_task(made.task, 0)
