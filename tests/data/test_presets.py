"""Each known data set, on small files with the columns of the real one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.data import Data
from lockstep.data.load import Rows, open_rows
from lockstep.data.presets import PRESETS, completed, preset_of
from lockstep.errors import DataError
from lockstep.types import Prompt

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def rows_of(folder: Path, preset: str, items: list[dict[str, object]], **settings: object) -> Rows:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(items), path)
    return open_rows(Data.model_validate({"source": str(path), "preset": preset, **settings}), where="task.data")


def shown(prompts: tuple[Prompt, ...]) -> list[tuple[str, str]]:
    return [(prompt.messages[-1]["content"], prompt.answer) for prompt in prompts]


@pytest.mark.parametrize("preset", ["dapo-math-17k", "aime-2024"])
def test_verl_files(tmp_path: Path, preset: str) -> None:
    items = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{BEFORE}What is {n}²?{AFTER}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n * n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{n}-{copy}"},
        }
        for copy in range(32)
        for n in (3, 4)
    ]
    rows = rows_of(tmp_path, preset, items)
    assert shown(rows.prompts()) == [("What is 3²?", "9"), ("What is 4²?", "16")]
    (stage,) = rows.reading.stages
    assert (stage.name, stage.before, stage.dropped) == ("repeats", 64, 62)
    assert "reward_model" not in rows.prompts()[0].data, "the grader sees the answer, the reply does not"


def test_gsm8k(tmp_path: Path) -> None:
    item = {"question": "How many?", "answer": "She sold 48/2 = <<48/2=24>>24.\nSo 48+24 = 72.\n#### 1,072"}
    rows = rows_of(tmp_path, "gsm8k", [item])
    assert shown(rows.prompts()) == [("How many?", "1,072")]
    (chat,) = rows.conversations()
    assert chat.messages[-1]["content"] == item["answer"], "SFT learns the whole solution"
    with pytest.raises(DataError, match="'answer' has no ####"):
        rows_of(tmp_path, "gsm8k", [{"question": "q", "answer": "72"}]).prompts()


def test_math(tmp_path: Path) -> None:
    solution = r"First \boxed{1}, then $x = \boxed{\frac{1}{2}}$."
    item = {"problem": "Find x.", "level": "Level 5", "type": "Algebra", "solution": solution}
    (prompt,) = rows_of(tmp_path, "math", [item]).prompts()
    assert shown((prompt,)) == [("Find x.", r"\frac{1}{2}")]
    assert prompt.data == {"level": "Level 5", "type": "Algebra"}
    with pytest.raises(DataError, match=r"'solution' has no closed \\boxed"):
        rows_of(tmp_path, "math", [item | {"solution": r"\boxed{1"}]).prompts()


def test_45_problems_of_levels_4_and_5(tmp_path: Path) -> None:
    """Of rows as MATH-500 has them: the first 45 of those levels, or as many as the recipe says."""
    items: list[dict[str, object]] = [
        {
            "problem": f"p{n}",
            "solution": f"s{n}",
            "answer": f"{n}",
            "subject": "Algebra",
            "level": n % 5 + 1,
            "unique_id": f"test/{n}",
        }
        for n in range(500)
    ]
    rows = rows_of(tmp_path, "math-l45", items)
    prompts = rows.prompts()
    hard = [n for n in range(500) if n % 5 + 1 >= 4]
    assert shown(prompts) == [(f"p{n}", str(n)) for n in hard[:45]]
    assert prompts[0].id == "rows/test/3"
    (stage,) = rows.reading.stages
    assert (stage.name, stage.before - stage.dropped) == ("levels_4_and_5", 45)
    assert len(rows_of(tmp_path, "math-l45", items, max_rows=100).prompts()) == 100
    named = completed(Data(source="math-l45"))
    assert (named.source, named.split) == ("HuggingFaceH4/MATH-500", "test")
    whole = rows_of(tmp_path, "math", [items[0] | {"solution": r"\boxed{1}"}]).prompts()
    assert (len(whole), preset_of(Data(source="HuggingFaceH4/MATH-500"))) == (1, PRESETS["math"])


def test_numinamath_and_apex(tmp_path: Path) -> None:
    item: dict[str, object] = dict.fromkeys(("problem_type", "source"), "x")
    item |= {"problem": "p", "solution": "s", "answer": "12", "question_type": "math-word-problem", "synthetic": False}
    item |= {"problem_is_valid": "Yes", "solution_is_valid": "Yes"}
    rows = rows_of(tmp_path, "numinamath-1.5", [item])
    assert shown(rows.prompts()) == [("p", "12")]
    assert next(rows.conversations()).messages[-1]["content"] == "s"
    apex = rows_of(tmp_path, "apex-shortlist", [{"problem_idx": 7, "problem": "p", "answer": "5"}]).prompts()
    assert [(p.id, p.answer) for p in apex] == [("rows/7", "5")]


def test_settings_win_over_the_preset(tmp_path: Path) -> None:
    item = {"question": "q", "answer": "1\n#### 2", "other": "o", "label": "3"}
    (prompt,) = rows_of(tmp_path, "gsm8k", [item], prompt="other", answer="label").prompts()
    assert shown((prompt,)) == [("o", "3")], "another answer column is read as it is"
    (boxed,) = rows_of(tmp_path, "gsm8k", [item], extract="text").prompts()
    assert boxed.answer == "1\n#### 2"


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if not preset.by_name])
def test_a_presets_name_and_its_hub_id_mean_the_same(name: str) -> None:
    preset = PRESETS[name]  # type: ignore[index]
    by_name, by_id = (completed(Data(source=text)) for text in (name, preset.source))
    assert by_name == by_id
    assert (by_name.source, by_name.subset, by_name.split) == (preset.source, preset.subset, "train")
    assert completed(Data(source=name, split="test")).split == "test"
