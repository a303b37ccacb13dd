from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from lockstep.config.data import Data
from lockstep.data.load import open_rows
from lockstep.data.locate import choose_files, locate
from lockstep.errors import DataError


def problem(source: str, **settings: str) -> str:
    with pytest.raises(DataError) as error:
        open_rows(Data(source=source, **settings), where="task.data")
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("https://huggingface.co/datasets/openai/gsm8k", "write the hub id openai/gsm8k"),
        (
            "https://huggingface.co/datasets/a/b/resolve/main/data/x.parquet?download=true",
            "write hf://datasets/a/b/data/x.parquet",
        ),
        ("https://huggingface.co/datasets/a/b/blob/v2/x.csv", "write hf://datasets/a/b@v2/x.csv"),
        ("https://huggingface.co/datasets/a/b/viewer/main", "write the hub id a/b"),
        ("hf://a/b/x.parquet", "did you mean hf://datasets/a/b/x.parquet?"),
        ("hf://datasets/a", "did you mean hf://datasets/org/name/file.parquet?"),
        ("s3://bucket/x.parquet", "download it and give its path"),
        ("file:///data/x.jsonl", "write the path alone: /data/x.jsonl"),
        ("own.py", "write own.py:NAME"),
        ("datasets/a/b", "write a/b (or ./datasets/a/b for a folder)"),
    ],
)
def test_a_wrong_form_names_the_right_one_before_anything_is_looked_up(source: str, said: str) -> None:
    with pytest.raises(ValueError, match="Value error") as error:
        Data(source=source)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": "a.jsonl", "split": "test"}, "subset and split belong to a hub id"),
        ({"source": "hf://datasets/a/b/c.csv", "revision": "v1"}, "write hf://datasets/org/name@revision/"),
        ({"source": "./folder", "revision": "v1"}, "leave it out"),
        ({"source": "a.jsonl", "settings": {"top": 3}}, "settings are the arguments of a generator"),
        ({"source": "a", "messages": "chat", "prompt": "q"}, "messages holds the whole conversation"),
        ({"source": "a", "filters": [{"kind": "distinct"}, {"kind": "distinct"}]}, "two filters are called 'distinct'"),
        ({"source": "a", "preset": "gsm8"}, "'gsm8k'"),
        ({"source": "a", "filters": [{"kind": "among", "columns": [], "values": [1]}]}, "at least 1 item"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="validation error") as error:
        Data.model_validate(settings)
    assert said in str(error.value)


def test_a_text_is_short_for_the_source() -> None:
    assert Data.model_validate("org/name") == Data(source="org/name")


def test_what_does_not_exist_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert "there is no file trian.jsonl; nearest: train.jsonl" in problem("trian.jsonl")
    assert "nearest: train.jsonl" in problem("train.parquet")
    assert "there is no file no/such/folder/a.jsonl" in problem("no/such/folder/a.jsonl")
    assert "there is no folder ./nowhere" in problem("./nowhere")
    assert "a hub id, which has the form ORG/NAME; did you mean gsm8k (openai/gsm8k)?" in problem("gsm8")
    assert "a hub id, which has the form ORG/NAME; did you mean aime-2024" in problem("AIME_2024")
    said = problem("openai/gsm8k/main")
    assert "a hub id, which has the form ORG/NAME" in said
    assert (
        "for a subset set source=openai/gsm8k and subset=main; for a file set source=hf://datasets/openai/gsm8k/main"
        in said
    )
    assert "files of type .txt cannot be read" in problem("notes.txt")
    assert "there is no such file" in problem_of_rows("own.py:rows")


def problem_of_rows(source: str) -> str:
    with pytest.raises(DataError) as error:
        list(open_rows(Data(source=source), where="task.data"))
    return str(error.value)


def test_a_folder_laid_out_like_a_hub_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "squares"
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "hard/train-0.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"prompt": "{name}", "answer": 1}}\n')
    assert locate(Data(source=str(folder), subset="hard"), "d").labels == ("hard/train-0.jsonl",)
    assert locate(Data(source=str(folder), split="test"), "d").labels == ("main/test-0.jsonl",)
    assert "there is no split 'validation'; there are: train, test" in problem(str(folder), split="validation").replace(
        "test, train", "train, test"
    )
    assert "there is no subset 'hrd'; did you mean hard?" in problem(str(folder), subset="hrd")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: main/*\n- config_name: all\n  data_files:\n"
        "  - split: train\n    path: ['main/train*', 'hard/*']\n---\n"
    )
    assert "the data set has 2 subsets, and none was chosen: easy, all" in problem(str(folder))
    assert locate(Data(source=str(folder), subset="all"), "d").labels == ("hard/train-0.jsonl", "main/train-0.jsonl")
    assert locate(Data(source=str(folder), subset="easy"), "d").labels == ("main/test-0.jsonl", "main/train-0.jsonl")


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["data/dapo-math-17k.parquet"], None, ["data/dapo-math-17k.parquet"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "test", ["data/test-0.parquet"]),
        (["test.jsonl"], None, ["test.jsonl"]),
        (["dev.json", "train.json", "dataset_infos.json"], "validation", ["dev.json"]),
        (["train/1.parquet", "train/0.parquet", "test/0.parquet"], "train", ["train/0.parquet", "train/1.parquet"]),
        (["contest.jsonl", "latest.jsonl"], None, ["contest.jsonl", "latest.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_split_by_their_names(names: list[str], split: str | None, chosen: list[str]) -> None:
    assert list(choose_files(names, "", Data(source="a/b", split=split), "here")) == chosen


LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    "front",
    [LAUGHS + "configs:\n- config_name: *j\n  data_files: main/*\n", "configs: " + "[" * 5000, "configs: {a: 1\n"],
    ids=["aliases", "nested", "torn"],
)
def test_configs_of_a_card_that_cannot_be_read_are_refused(front: str) -> None:
    """With other files in their place the run would train on other data; aliases unfold into gigabytes."""
    with pytest.raises(
        DataError, match=r"`configs` in the data set's README.md cannot be read: README\.md:\d+: (.|\n)*source=hf://"
    ):
        choose_files(["main/train.jsonl"], f"---\n{front}\n---\n", Data(source="a/b"), "data")


def test_the_card_of_many_empty_lines_is_read_at_once() -> None:
    assert choose_files(["a.jsonl"], "---" + "\n" * 1_000_000, Data(source="a/b"), "data") == ("a.jsonl",)


def test_a_pipe_among_data_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"train\.jsonl: this is a pipe or device, not a regular file"):
        open_rows(Data(source=str(tmp_path)), where="data").prompts()
