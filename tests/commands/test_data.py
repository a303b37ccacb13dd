from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_load import jsonl, sums
from tests.saying import Told

LONG = "find the sum of all positive integers n such that n squared plus one is prime"


def recipe(folder: Path, model: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(f"model: {model}\n{text}")
    return str(path)


def test_check_reports_every_set_and_the_overlap(tmp_path: Path, told: Told) -> None:
    train = jsonl(
        tmp_path / "train.jsonl", [*sums(50), {"prompt": f"So: {LONG}", "answer": 3}, {"prompt": "x", "answer": "y"}]
    )
    probe = jsonl(tmp_path / "probe.jsonl", [*sums(20, 45), {"prompt": LONG, "answer": 3}])
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "", "answer": 1}, {"answer": 2}])
    filters = "[{kind: integer_answer, name: whole, high: 49}]"
    path = recipe(
        tmp_path,
        Path("unused"),
        f"task: {{kind: file, data: {{source: {train}, filters: {filters}}}, heldout: {{id_probe: {probe}, sanity: {bad}}}}}",
    )
    code, text = told("data", "check", path)
    assert code == 4
    assert "52 rows read, 0 bad, 50 kept; 50 distinct questions" in text
    assert "whole   integer_answer      52        2     50" in text
    assert "train.jsonl:50: answer = 50 | 49 + 1?" in text
    assert "train.jsonl:52: answer = 'y' | x" in text
    assert "train  id_probe       21      4           4        5" in text
    assert "id_probe: probe/1 = train/46 of train" in text
    assert "problem: task.heldout.sanity" in text
    assert "2 of 2 rows are bad:\n  bad.jsonl:1: 'prompt' is empty\n  bad.jsonl:2: there is no column 'prompt'" in text
    assert "problem: 4 of 21 questions of id_probe are also in train" in text
    assert told("data", "check", path, "task.heldout={}")[0] == 0


def test_check_of_a_source_against_others(tmp_path: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", [{"q": f"{n} + 1?", "a": n + 1} for n in range(9)])
    apart, same = jsonl(tmp_path / "apart.jsonl", sums(3, 50)), jsonl(tmp_path / "same.jsonl", sums(3))
    code, text = told("data", "check", train, "prompt=q", "answer=a", "--against", apart, "--against", same)
    assert code == 4
    assert "train  apart           3      0           0        0" in text
    assert "train  same            3      3           3        3" in text
    code, text = told("data", "check", train, "prompt=q", "answer=a", "--against", apart)
    assert (code, text.splitlines()[-1]) == (0, "ok: fit to train")
    assert told("data", "check", train, "--against", "own.py")[0] == 2
    code, text = told("data", "check", jsonl(tmp_path / "words.jsonl", [{"prompt": "Capital?", "answer": "Paris"}]))
    assert code == 4
    assert "the verifier cannot grade 1 of 1 questions" in text


def test_check_tries_the_verifier_of_every_task_that_reads_rows(tmp_path: Path, told: Told) -> None:
    words = jsonl(tmp_path / "words.jsonl", [{"prompt": "Capital?", "answer": "Paris"}])
    numbers = jsonl(tmp_path / "numbers.jsonl", sums(3))
    file = "{kind: file, data: %s, verifier: %s}"
    tools = f"task: {{kind: tools, questions: {file % (words, '{kind: numeric}')}, tools: [{{path: calculator}}]}}"
    code, text = told("data", "check", recipe(tmp_path, Path("unused"), tools))
    assert code == 4, text
    assert "problem: task.questions.data" in text
    mixed = "task: {kind: mixed, tasks: {a: {task: %s}, b: {task: %s}}}"
    for verifier, due in (("text", 0), ("numeric", 4)):
        tasks = (file % (numbers, "{kind: numeric}"), file % (words, f"{{kind: {verifier}}}"))
        code, text = told("data", "check", recipe(tmp_path, Path("unused"), mixed % tasks))
        assert code == due, text
        assert ("the verifier cannot grade 1 of 1 questions" in text) == (due == 4)


def test_against_takes_columns(tmp_path: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", [{"q": f"{n} + 1?", "answer": f"n #### {n + 1}"} for n in range(9)])
    same = jsonl(tmp_path / "same.jsonl", [{"q": "1 + 1?", "answer": "n #### 2"}])
    other = jsonl(tmp_path / "other.jsonl", [{"p": "1 + 1?", "r": "2"}])
    settings = ("data", "check", train, "prompt=q", "extract=after_hashes", "--against")
    assert "train  same            1      1           1        1" in told(*settings, same)[1]
    code, text = told(*settings, other)
    fix = f"--against '{{source: {other}, prompt: COLUMN, answer: COLUMN}}'"
    assert (code, text.rstrip().endswith(f"set the columns of the question and the answer: {fix}")) == (4, True), text
    named = fix.removeprefix("--against '").rstrip("'").replace("COLUMN", "p", 1).replace("COLUMN", "r")
    assert "train  other           1      1           1        1" in told(*settings, named)[1]
    code, text = told(*settings, f"{{source: {other}, colour: p}}")
    assert (code, "colour: no setting of a source; known are source, preset" in text) == (2, True)


@pytest.mark.parametrize("inside", ["", "zz"])
def test_a_folder_that_cannot_be_made_is_refused(inside: str, tmp_path: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", sums(3))
    code, text = told("data", "build", train, "--out", train / inside)
    assert (code, "the output folder cannot be made" in text) == (4, True), text


def test_stats_count_tokens_of_the_chat_format(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", [*sums(10), *sums(10), {"prompt": "7" * 300, "answer": 1}])
    code, text = told("data", "stats", train, f"model={tiny_model_dir}", "--limit", 100)
    assert code == 0
    from lockstep.commands.data import recipe_of
    from lockstep.export.prompt import chat_format

    chat = chat_format(recipe_of([str(train), f"model={tiny_model_dir}"]))
    short, long = (len(chat.render([{"role": "user", "content": content}])) for content in ("0 + 1?", "7" * 300))
    assert long == short + 300 - len(chat.tokenizer("0 + 1?")["input_ids"])
    table = {words[0]: words[1] for line in text.splitlines() if len(words := line.split()) == 2}
    assert (table["shortest"], table["p50"], table["longest"]) == (str(short), str(short), str(long))
    assert "1 of 21 prompts are longer than 100 tokens" in text
    assert "11 distinct questions among 21 prompts (the commonest comes 2 times)" in text
    assert "the longest is train/21" in text


def test_show_prints_rows_and_what_is_trained(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", [*sums(5), {"prompt": "\x1b[2J", "answer": 6}, {"prompt": "q"}])
    code, text = told("data", "show", train, "-n", 2)
    assert (code, text.count("── row")) == (0, 2)
    assert "     │ 1 + 1?\n   answer:\n     │ 2" in text
    assert "\\x1b[2J" in told("data", "show", train, "--row", 6)[1]
    assert (
        "row 7 · train.jsonl:7 · cannot be used: there is no column 'answer'"
        in told("data", "show", train, "--row", 7)[1]
    )
    assert told("data", "show", train, "--row", 99)[0] == 4
    code, text = told("data", "show", train, f"model={tiny_model_dir}", "--row", 3, "--mask")
    assert code == 0
    assert text.splitlines()[2].startswith("── row 3 · train.jsonl:3 · ")
    assert text.splitlines()[2].endswith(" tokens, 2 trained")
    trained = [line for line in text.splitlines() if line.startswith("   + ")]
    assert trained == ["   + 3·<|im_end|>"]
    assert text.splitlines()[-1] == "   | ⏎", "what the template writes after the end token is not trained"


def test_mask_of_a_whole_conversation(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    ]
    file = jsonl(tmp_path / "chats.jsonl", [{"messages": turns}])
    path = recipe(tmp_path, tiny_model_dir, f"loop: sft\nsft: {{data: {{source: {file}, messages: messages}}}}")
    both = ["   + 2·<|im_end|>", "   + 4·<|im_end|>"]
    for words, trained in (((), both[1:]), (("sft.train_on=all_assistant",), both)):  # as the run would train
        code, text = told("data", "show", path, *words, "--mask")
        assert code == 0, text
        assert [line for line in text.splitlines() if line.startswith("   + ")] == trained
    code, text = told("data", "check", path)
    assert (code, "1 rows read, 0 bad, 1 kept" in text) == (0, True), text
    assert "chats.jsonl" in told("data", "show", path)[1]


def test_build_and_split_write_a_manifest(tmp_path: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", sums(40))
    code, text = told("data", "split", train, "--out", tmp_path / "s", "--parts", "test=5,train=rest", "--seed", 7)
    assert code == 0, text
    assert "40 distinct questions dealt by hash (seed 7); 0 repeats and 0 questions left out" in text
    lines = {name: (tmp_path / "s" / f"{name}.jsonl").read_text().splitlines() for name in ("test", "train")}
    assert (len(lines["test"]), len(lines["train"])) == (5, 35)
    code, text = told(
        "data", "check", tmp_path / "s" / "train.jsonl", "id=id", "--against", tmp_path / "s" / "test.jsonl"
    )
    assert (code, "35 rows read" in text) == (0, True)
    names = ("--prompt-name", "input", "--answer-name", "label", "--format", "parquet")
    code, text = told("data", "build", train, "--out", tmp_path / "b", *names)
    assert code == 0, text
    assert (tmp_path / "b" / "manifest.json").is_file()
    code, _ = told("data", "check", tmp_path / "b" / "train.parquet", "prompt=input", "answer=label")
    assert code == 0
    assert told("data", "build", train, "--out", tmp_path / "b", *names)[0] == 4, "nothing is written over"
    with_overlap = ("build", train, "--out", tmp_path / "c", "--against", tmp_path / "s" / "test.jsonl")
    assert told("data", *with_overlap)[0] == 4
    assert not (tmp_path / "c").exists()


def test_sets_of_the_same_name_are_told_apart(tmp_path: Path, told: Told) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    train = jsonl(tmp_path / "train.jsonl", sums(9))
    paths = ["a/test.jsonl", "b/test.jsonl", "c/train.jsonl"]
    others = [jsonl(tmp_path / path, sums(3, 10 * number)) for number, path in enumerate(paths, 1)]
    code, text = told(
        "data", "build", train, *(word for other in others for word in ("--against", other)), "--out", tmp_path / "o"
    )
    assert code == 0, text
    names = ("train", "test", "test_2", "train_3")
    counts = {name: len((tmp_path / "o" / f"{name}.jsonl").read_text().splitlines()) for name in names}
    assert counts == {"train": 9, "test": 3, "test_2": 3, "train_3": 3}
    assert "train  test_2" in text


def test_the_printed_recipe_of_a_split_can_be_read(tmp_path: Path, told: Told) -> None:
    """Also with a folder, or a column, that YAML would take for something else."""
    from lockstep.config.text import parse

    folder = tmp_path / "my data, part: {a} #1"
    rows = [{"yes": row["prompt"], "123": row["answer"]} for row in sums(20)]
    train = jsonl(tmp_path / "train.jsonl", rows)
    columns = ("prompt=yes", "answer='123'")
    code, text = told("data", "split", train, *columns, "--out", folder, "--parts", "test=5,train=rest")
    assert code == 0, text
    recipe = parse(text.partition("in a recipe:\n")[2], "printed").value
    assert isinstance(recipe, dict)
    data = [{"source": str(folder / f"{name}.jsonl"), "prompt": "yes", "answer": "123"} for name in ("train", "test")]
    assert recipe["task"] == {"kind": "file", "data": data[0], "heldout": {"id_probe": data[1]}}


def test_a_row_that_is_nested_too_deep_is_shown_as_unusable(tmp_path: Path, told: Told) -> None:
    train = jsonl(
        tmp_path / "train.jsonl", [*sums(1), {"prompt": "q", "answer": 1, "tools": "[" * 50_000 + "]" * 50_000}]
    )
    code, text = told("data", "show", train)
    assert code == 0
    assert "row 2 · train.jsonl:2 · cannot be used: its values are nested too deep" in text


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_rows_that_shows_none_is_refused(number: str, tmp_path: Path, told: Told) -> None:
    train = jsonl(tmp_path / "train.jsonl", sums(4))
    assert told("data", "show", train, "-n", number)[0] == 2


@pytest.mark.parametrize("parts", ["test", "test=x", "a=1,a=2", "=3"])
def test_parts_that_are_none(parts: str, tmp_path: Path, told: Told) -> None:
    assert told("data", "split", "x.jsonl", "--out", tmp_path, "--parts", parts)[0] == 2


def test_lists_and_wrong_targets(tmp_path: Path, told: Told) -> None:
    code, text = told("data", "filters")
    assert code == 0
    assert "integer_answer: Keep rows whose answer is written as one whole number" in text
    assert "    columns    required" in text
    code, text = told("data", "presets")
    assert code == 0
    assert "gsm8k: openai/gsm8k main/train" in text
    code, text = told("data", "check", tmp_path / "trian.jsonl")
    assert code == 4
    assert "there is no file" in text
    code, text = told("data", "check", "smoke")
    assert code == 2
    assert "the recipe reads no data set: task.kind=reasoning_gym" in text
    code, text = told("data", "check", "https://huggingface.co/datasets/openai/gsm8k")
    assert code == 2
    assert "write the hub id openai/gsm8k" in text
    assert told("data", "check", "a.jsonl", "promt=q")[0] == 2


def test_the_numinamath_recipe_names_its_stages() -> None:
    from lockstep.config.data import stage_name
    from lockstep.config.load import load
    from lockstep.data.sets import sets_of

    path = Path(__file__).parents[2] / "recipes" / "data" / "numinamath.yaml"
    train, sanity = sets_of(load([str(path)]))
    stages = [stage_name(stage) for stage in train.data.filters]
    assert stages == ["word_problems", "integers", "no_amc_aime", "valid", "distinct", "length", "not_aime_2024"]
    assert (train.data.source, sanity.data.source) == ("numinamath-1.5", "aime-2024")
