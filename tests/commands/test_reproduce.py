"""Published runs in miniature: the same recipe files with a tiny model of the same family and rows of the same columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lockstep.cli import main
from tests.learner.models import FAMILIES
from tests.models.mxfp4_files import write_mxfp4_model
from tests.saying import Printed
from tests.tiny import VOCABULARY, write_tiny_tokenizer

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "recipes" / "tasks"
FEW = (
    "prompts_per_step=2",
    "samples_per_prompt=2",
    "rollout.max_tokens=8",
    "eval.items=4",
    "rollout.slots=8",
    "threads=1",
)


def tiny(folder: Path, family: str) -> Path:
    """Write a random model of a family with a tokenizer, and return its folder."""
    import transformers as hf

    config = {"qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config}[family](
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.1, pad_token_id=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    assert family in FAMILIES
    return folder


def gsm8k(folder: Path, rows: int = 24) -> Path:
    """Write a train and a test set with the columns of openai/gsm8k."""
    folder.mkdir()
    for split, first in (("train", 0), ("test", rows)):
        questions = [f"Tom has {n} apples and eats {n % 7}. How many are left?" for n in range(first, first + rows)]
        answers = [
            f"{n} - {n % 7} = <<{n}-{n % 7}={n - n % 7}>>{n - n % 7}\n#### {n - n % 7}"
            for n in range(first, first + rows)
        ]
        pq.write_table(pa.table({"question": questions, "answer": answers}), folder / f"{split}.parquet")
    return folder


def copied(folder: Path, recipe: Path, expects: dict[str, Any]) -> str:
    """Copy a recipe file as it is, with figures of its own beside it."""
    folder.mkdir(exist_ok=True)
    path = folder / recipe.name
    path.write_text(recipe.read_text())
    path.with_suffix(".expects.yml").write_text(json.dumps(expects))
    return str(path)


def gsm8k_words(tmp_path: Path, expects: dict[str, Any]) -> list[str]:
    data = gsm8k(tmp_path / "data")
    return [
        "reproduce", copied(tmp_path / "recipes", TASKS / "gsm8k_0.5b.yaml", expects), *FEW, f"runs_dir={tmp_path / 'runs'}",
        f"model.path={tiny(tmp_path / 'model', 'qwen2')}", "epochs=null", "steps=2", "adapter.rank=4",
        f"task.data.source={data}", "task.data.split=train", "task.data.preset=gsm8k",
        f"task.heldout.id_probe.source={data}", "task.heldout.id_probe.preset=gsm8k",
    ]  # fmt: skip


def test_gsm8k_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expects = {
        "counts": [
            {"of": "train", "rows": 24, "source": "A"},
            {"of": "id_probe", "rows": 25, "within": 0.05, "source": "B"},
        ],
        "figures": [
            {"score": "base", "value": 0.496, "source": "C"},
            {"score": "trained", "value": 0.0, "source": "D"},
        ],
    }
    words = gsm8k_words(tmp_path, expects)
    assert main([*words, "--counts-only"]) == 0
    assert not (tmp_path / "runs").exists()
    assert main(words) == 0
    table = (tmp_path / "runs" / "gsm8k-0.5b" / "reproduce.md").read_text()
    assert "| rows of train | 24 | 24 | same | A |" in table
    assert "| rows of id_probe | about 25 | 24 | same | B |" in table
    assert "| accuracy of base, greedy | 49.6% | 0.0% [0.0%, 49.0%] of 4 | outside ours | C |" in table
    assert "| within ours | D |" in table
    assert "(McNemar, exact)" in table
    assert "With other settings than the published run's: prompts_per_step=2" in table
    capsys.readouterr()
    assert main(words) == 0  # a finished run is read, not trained again
    assert (tmp_path / "runs" / "gsm8k-0.5b" / "reproduce.md").read_text() == table


def test_a_count_that_differs_ends_it_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = gsm8k_words(tmp_path, {"counts": [{"of": "train", "rows": 7473, "source": "A"}]})
    assert main(words) == 7
    assert "| rows of train | 7,473 | 24 | differs | A |" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("figure", "changed", "refused"),
    [
        ({"mode": "greed"}, (), "the run has no score greed; there are greedy"),
        ({"score": "base"}, ("eval.at_start=false",), "no score greedy of the base: eval.at_start is false"),
        ({}, ("eval.enabled=false", "save.keep_best=null"), "its evaluations are off"),
    ],
)
def test_a_figure_of_a_score_that_the_run_will_not_have_is_refused_before_training(
    figure: dict[str, str], changed: tuple[str, ...], refused: str, tmp_path: Path, printed: Printed
) -> None:
    figure = {"score": "trained", "value": "0.5", "source": "A", **figure}
    words = gsm8k_words(tmp_path, {"figures": [figure]})
    assert refused in printed(*words, *changed, code=2)
    assert not (tmp_path / "runs").exists()


def test_without_the_hub_it_says_what_is_missing(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "lockstep", "reproduce", str(TASKS / "gsm8k_0.5b.yaml")],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "LOCKSTEP_CACHE": str(tmp_path / "cache")},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 4
    assert "task.data (gsm8k)" in found.stderr
    assert "task.heldout.id_probe (gsm8k)" in found.stderr
    assert "run the same command again" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_recipe_without_published_figures_is_refused(tmp_path: Path, printed: Printed) -> None:
    assert "quickstart.expects.yml: there is no such file" in printed(
        "reproduce", ROOT / "recipes" / "quickstart.yaml", code=2
    )


def test_a_file_of_figures_that_cannot_be_read_is_named(tmp_path: Path, printed: Printed) -> None:
    recipe = copied(tmp_path, ROOT / "recipes" / "quickstart.yaml", {})
    figures = Path(recipe).with_suffix(".expects.yml")
    for content, said in (
        (b"counts: []  # \xff", "quickstart.expects.yml:1: not UTF-8"),
        (b"counts: []\ncounts: []", "quickstart.expects.yml:2: counts: written twice"),
        (b"counts: [", "quickstart.expects.yml:1: "),
        (b"counts: [{of: train}]", "quickstart.expects.yml: "),
    ):
        figures.write_bytes(content)
        assert said in printed("reproduce", recipe, code=2)


def test_the_stages_of_numinamath_are_counted(tmp_path: Path, printed: Printed) -> None:
    rows: list[dict[str, str]] = []

    def add(number: int, **changes: str) -> None:
        for _ in range(number):
            rows.append({
                "problem": f"There are {len(rows)} birds in a tree. How many birds are there?", "solution": "", "answer": "7",
                "problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads",
                "problem_is_valid": "Yes", "solution_is_valid": "Yes",
            } | changes)  # fmt: skip

    add(5, question_type="proof")
    add(4, answer="1/2")
    add(3, source="amc_aime")
    add(2, problem_is_valid="Incomplete")
    add(2, problem="The same problem is here twice, or even more often.")
    add(1, problem="Too short")
    add(9)
    (tmp_path / "numina.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = {"": 26, "word_problems": 21, "integers": 17, "no_amc_aime": 14, "valid": 12, "distinct": 11, "length": 10}
    counts = [{"of": "train", "after": name, "rows": number, "source": "here"} for name, number in after.items()]
    recipe = copied(tmp_path, ROOT / "recipes" / "data" / "numinamath.yaml", {"counts": counts})
    aime = tmp_path / "aime.jsonl"
    aime.write_text(json.dumps({"prompt": "What is the answer to AIME?", "reward_model": {"ground_truth": "3"}}) + "\n")
    words = [
        recipe,
        f"task.data.source={tmp_path / 'numina.jsonl'}",
        "task.data.preset=numinamath-1.5",
    ]
    words += [f"task.data.filters.6.sources=[{aime}]", "task.data.filters.6.preset=aime-2024", "--counts-only"]
    said = printed("reproduce", *words)
    assert said.count("| same |") == 7
    assert "| rows of train after length | 10 | 10 | same | here |" in said


@pytest.mark.slow
def test_games_with_a_qwen3_in_miniature(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    recipe = copied(tmp_path / "recipes", TASKS / "open_spiel_qwen3_4b.yaml", {})
    words = [
        *FEW,
        f"runs_dir={tmp_path / 'runs'}",
        f"model.path={tiny(tmp_path / 'model', 'qwen3')}",
        "steps=2",
        "adapter.rank=4",
    ]
    assert main(["reproduce", recipe, *words, "task.num_tasks_per_case=10", "task.playouts=2"]) == 0
    assert (tmp_path / "runs" / "open-spiel-qwen3-4b" / "reproduce.md").is_file()


@pytest.mark.slow
def test_gpt_oss_in_miniature(tmp_path: Path) -> None:
    write_mxfp4_model(tmp_path / "model")
    for name, first in (("train", 0), ("probe", 100), ("ood", 200), ("aime", 300)):
        rows = [
            {"problem": f"What is {n} plus {n}? It is a small sum.", "answer": str(2 * n)}
            for n in range(first, first + 20)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "prompt: problem, answer: answer"
    roles = {"id_probe": "probe", "ood_probe": "ood", "sanity": "aime"}
    counts = [{"of": name, "rows": 20, "source": "here"} for name in ("train", "id_probe", "ood_probe")]
    figures = [{"score": "base", "mode": "sanity.greedy", "value": 0.278, "source": "here"}]
    recipe = copied(tmp_path / "recipes", TASKS / "gpt_oss_20b.yaml", {"counts": counts, "figures": figures})
    words = [
        *FEW, f"runs_dir={tmp_path / 'runs'}", f"model.path={tmp_path / 'model'}", "steps=2", "adapter.rank=4",
        f"task.data.source={tmp_path / 'train.jsonl'}", "eval.also.0.items=4", "eval.also.1.items=4",
        *(f"task.heldout.{role}={{source: {tmp_path / name}.jsonl, {columns}}}" for role, name in roles.items()),
        "task.near_overlap=allow", "optimizer.warmup_ratio=0",
    ]  # fmt: skip
    assert main(["reproduce", recipe, *words]) == 0
    table = (tmp_path / "runs" / "gpt-oss-20b" / "reproduce.md").read_text()
    assert "| accuracy of base, sanity.greedy | 27.8% |" in table
