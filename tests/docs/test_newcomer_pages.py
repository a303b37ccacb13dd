"""README, docs/coming_from.md and the examples of docs/environments.md work as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from xml.dom import minidom

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.cli import main
from lockstep.config.help import groups
from lockstep.config.load import load_run
from tests.doctor.refused import refused

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
REWARDS = (ROOT / "docs" / "coming_from_rewards.md").read_text(encoding="utf-8")
ENVIRONMENTS = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_task_and_reward_of_the_readme_would_start(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (grader,), (recipe,) = blocks(README, "python"), blocks(README, "yaml")
    (tmp_path / "own.py").write_text(grader)
    (tmp_path / "units.yaml").write_text(recipe)
    rows = [{"question": f"How many grams are {i} kg?", "answer": str(1000 * i)} for i in range(1, 101)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert refused("units.yaml", f"model={tiny_model_dir}") == []
    scope: dict = {}
    exec(grader, scope)
    prompt = SimpleNamespace(answer="3000")
    assert [scope["grade"](prompt, reply) for reply in ("It is 3,000.", "4", "none", "")] == [1.0, 0.1, 0.0, 0.0]


def test_the_first_run_of_the_readme_trains_at_the_recipes_rate() -> None:
    (line,) = [line for line in README.splitlines() if "lockstep train recipes/quickstart.yaml" in line]
    words = line.partition("#")[0].split()[2:]
    assert not [word for word in words if "lr" in word]
    words[0] = str(ROOT / words[0])
    assert load_run(words).name == "mine"


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = [
        link for link in re.findall(r"\]\(([^)#]+)", README + COMING.replace("](", "](docs/")) if "://" not in link
    ]
    assert len(links) > 40
    assert [link for link in links if not (ROOT / link).exists()] == []
    minidom.parse(str(ROOT / "docs" / "images" / "architecture.svg"))


def test_the_settings_of_the_table_are_settings() -> None:
    known = {setting.path for group in groups() for setting in group.settings}
    rows = [row.split("|")[2] for row in COMING.splitlines() if row.startswith("| ") and row.count("|") == 6]
    named = [name.partition("=")[0] for row in rows for name in re.findall(r"`([\w.]+(?:=\w+)?)`", row)]
    assert len(named) > 15
    short = {"algorithm", "adapter", "clip_high"}
    assert [name for name in named if name not in known | short] == []


def test_the_reward_of_openrlhf_is_called_as_there() -> None:
    prompt = SimpleNamespace(answer="7", messages=({"role": "user", "content": "3 + 4"},), data={"level": 1})
    (other,) = [block for block in blocks(COMING, "python") if "reward_func" in block]
    scope: dict = {"reward_func": lambda queries, prompts, labels: {"rewards": [float(labels[0] in queries[0])]}}
    exec(other, scope)
    assert (scope["grade"](prompt, "it is 7"), scope["grade"](prompt, "8")) == (1.0, 0.0)


def test_the_reward_files_of_trl_and_verl_would_start(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = [{"prompt": [{"role": "user", "content": f"{i} + 1?"}], "ground_truth": str(i + 1)} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    models = [{"reward_model": {"style": "rule", "ground_truth": row["ground_truth"]}} for row in questions]
    rows = [{"prompt": q["prompt"], "data_source": "sums", **model} for q, model in zip(questions, models, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    page = REWARDS.partition("\n## verifiers\n")[0]  # the rest needs that package: tests/verifiers/test_rubric.py
    for file, code, recipe in zip(
        ("rewards.py", "score.py"), blocks(page, "python"), blocks(page, "yaml"), strict=True
    ):
        (tmp_path / file).write_text(code)
        (tmp_path / "own.yaml").write_text(recipe)
        overrides = [f"model={tiny_model_dir}", "task.heldout_rows=8", "prompts_per_step=8", "eval.items=8"]
        assert refused("own.yaml", *overrides) == []
        main(["doctor", "own.yaml", *overrides])
        assert "as the reference" not in capsys.readouterr().out


def test_an_environment_that_knows_its_question_plays(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks(ENVIRONMENTS, "python") if "class Capitals" in block]
    (tmp_path / "capitals.py").write_text(code)
    recipe = [
        "task={kind: env, path: capitals.py:Capitals}",
        f"model={tiny_model_dir}",
        "steps=1",
        "rollout.max_tokens=64",
    ]
    assert main(["train", *recipe, "prompts_per_step=2", "samples_per_prompt=2", "eval.items=2"]) == 0, (
        capsys.readouterr()
    )
