"""The first hour with the product: what a start tells, what a mistake costs, and what one command says of another's work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doctor.refused import refused
from tests.loops.runs import LORA, NO_EVAL, words
from tests.saying import Told


@pytest.mark.sampled("*column*", "*grade*", "eval.items*", "device*")
@pytest.mark.parametrize(
    ("mistake", "check", "text"),
    [
        ("task.data=FOLDER/nope.jsonl", "task", "nope.jsonl"),
        ("task.data.prompt=question", "task", "there is no column 'question'"),
        ("task.verifier.path=FOLDER/grader.py:grad", "task", "grade"),
        ("eval.items=100", "evaluation", "eval.items="),
        ("prompts_per_step=500", "task", "500 different questions"),
        ("rollout.max_tokens=4090", "prompts", "4096"),
        ("device=cuda", "device", "torch finds no GPU"),
    ],
)
def test_what_would_stop_a_start_is_found_by_doctor_and_costs_train_no_name(
    mistake: str, check: str, text: str, tmp_path: Path, tiny_model_dir: Path, told: Told
) -> None:
    args = words(tmp_path, tiny_model_dir, mistake.replace("FOLDER", str(tmp_path)))
    code, out = told("doctor", *args, "--json")
    found = {one["name"]: one for one in json.loads(out)["checks"]}
    assert (code, found[check]["verdict"]) == (1, "fail"), found[check]
    assert text in found[check]["found"] + found[check]["fix"]
    code, out = told("train", *args)
    assert code not in (0, 1)
    assert out.count(text) >= 1
    assert not (tmp_path / "runs").exists()


def test_a_failure_in_a_run_is_printed_once_and_the_next_start_replaces_it(
    tmp_path: Path, tiny_model_dir: Path, told: Told
) -> None:
    """A model whose weights are cut off."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    good = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(good[: len(good) // 2])
    args = words(tmp_path, broken, *LORA, NO_EVAL, "steps=1")
    code, out = told("train", *args)
    assert code == 4, out
    assert out.count("the weight file is cut off") == 1
    (broken / "model.safetensors").write_bytes(good)
    code, out = told("train", *args)
    assert code == 0, out
    code, out = told("train", *args)
    assert code == 6
    assert "a run already exists here" in out
    assert "loading" not in out  # refused before anything heavy


def test_a_start_says_what_matters_in_a_few_lines_and_the_rest_in_the_log(
    tmp_path: Path, tiny_model_dir: Path, told: Told
) -> None:
    code, out = told("train", *words(tmp_path, tiny_model_dir, *LORA, "steps=2", "optimizer.lr=1e-9"))
    assert code == 0
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("eval at step 0"))
    assert first <= 12, lines[:first]
    assert any("far below the default of adapters (2e-05)" in line for line in lines[:first])
    assert all(len(line) <= 120 for line in lines if line.startswith("step "))
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    for text in ("first prompt, as the model sees it", "negative control"):
        assert text in log
        assert text not in "\n".join(lines[:first])


def test_a_finished_run_says_so_at_once_and_names_the_way_on(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    run = tmp_path / "runs" / "run"
    assert told("train", *words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1"))[0] == 0
    before = (run / "log.txt").read_bytes()
    code, out = told("train", "--resume", run)
    assert (code, f"{run} is finished: step 1" in out, f"warm_start={run}" in out) == (0, True, True)
    assert (run / "log.txt").read_bytes() == before
    code, out = told("train", "--resume", run, "steps=8")
    assert (code, "--steps 8" in out) == (2, True)


def test_what_the_model_saw_is_a_flag_away(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    chat = "chat={suffix: ' Box it.', examples: [{user: '1 + 1 =', assistant: '2'}]}"
    assert told("train", *words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1", chat))[0] == 0
    run = tmp_path / "runs" / "run"
    for command in (["rollouts", run], ["sample", run, "-n", "1"]):
        _, plain = told(*command)
        assert "the suffix ' Box it.' and 1 solved example before it; --seen prints the whole prompt" in plain
        assert "1 + 1 = Box it." not in plain
        _, seen = told(*command, "--seen")
        assert "prompt, as the model saw it" in seen
        assert "1 + 1 = Box it." in seen


def test_the_turns_of_an_episode_are_marked(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    game = "task={kind: guess_number, low: 1, high: 4, turns: {limit: 3, reply_tokens: 4}}"
    args = words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1", game, "rollout.max_tokens=200")
    assert told("train", *args)[0] == 0
    _, out = told("rollouts", tmp_path / "runs" / "run", "--limit", "1")
    assert "graded by the environment" in out
    assert "   ==> reply 1, by the model:" in out
    assert "   <== from the environment:" in out
    assert "   ==> reply 2, by the model:" in out


def test_supervised_fine_tuning_without_a_task_asks_nothing(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    rows = [{"prompt": f"Say {i}", "answer": f"It is {i}"} for i in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = f"sft={{data: {tmp_path}/chats.jsonl, validation_rows: 4, sequences_per_step: 4}}"
    recipe = ["loop=sft", sft, f"model.path={tiny_model_dir}", f"runs_dir={tmp_path}/runs", "steps=2", "name=chats"]
    assert refused(*recipe) == []
    code, out = told("train", *recipe)
    assert code == 0, out
    run = tmp_path / "runs" / "chats"
    assert not list((run / "scores").iterdir())
    assert "alarm" not in out
    assert "validation/loss" in (run / "metrics.jsonl").read_text()
    page, log = (run / "report.html").read_text(), (run / "log.txt").read_text()
    assert ("Loss of given replies" in page, "Policy loss" in page) == (True, False)
    assert ("reward_flat" in log, "grad_spike" in log) == (False, True)  # rules of rewards do not apply
    code, out = told("rollouts", run)
    assert (code, "a supervised run samples no replies in training" in out) == (6, True)
    code, out = told("eval", run)
    assert (code, "the recipe has no task" in out) == (4, True)


def test_an_option_that_is_a_setting_is_told_its_form(told: Told) -> None:
    for words_, form in ((["--steps", "3"], "steps=3"), (["--optimizer.lr=1e-5"], "optimizer.lr=1e-5")):
        code, out = told("train", "quickstart", *words_)
        assert (code, f"write {form}" in out) == (2, True), out


def test_the_parts_of_a_split_suit_the_recipe_of_their_source(tmp_path: Path, told: Told) -> None:
    rows = [{"question": f"What is {i}?", "label": str(i)} for i in range(20)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("prompt=question", "answer=label")
    split = (
        "data",
        "split",
        tmp_path / "all.jsonl",
        *columns,
        "--out",
        tmp_path / "out",
        "--parts",
        "test=5,train=rest",
    )
    code, out = told(*split)
    assert code == 0, out
    assert json.loads((tmp_path / "out" / "train.jsonl").read_text().splitlines()[0]).keys() == {
        "id",
        "question",
        "label",
    }
    assert f"  data: {{source: {tmp_path}/out/train.jsonl, prompt: question, answer: label}}" in out
    assert told("data", "check", tmp_path / "out" / "train.jsonl", *columns)[0] == 0
    code, out = told("data", "check", tmp_path / "out" / "train.jsonl")
    assert (code, out.count("there is no column 'prompt'"), "(and 14 more rows)" in out) == (4, 1, True)
    assert "task.data.prompt=COLUMN" in out


def test_a_checkpoint_that_is_not_there_is_told_apart_from_a_count(
    tmp_path: Path, tiny_model_dir: Path, told: Told
) -> None:
    assert told("train", *words(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=2"))[0] == 0
    code, out = told("eval", tmp_path / "runs" / "run", "--step", "4")
    assert (code, "no checkpoint of step 4; the saved steps are 1, 2" in out) == (6, True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    code, out = told("export", tmp_path / "runs" / "run", tmp_path / "there")
    assert (code, "there exists already" in out) == (2, True)


def test_a_file_that_looks_like_a_hub_id_is_sought_beside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "train.jsonl").write_text("{}\n")
    code, out = told("data", "check", "units/train.txt")
    assert (code, "hub" in out.partition("to fix")[0], "nearest: units/train.jsonl" in out) == (4, False, True), out


def test_a_model_is_not_scored_on_a_task_that_nobody_named(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    code, out = told("eval", tiny_model_dir, "--recipe", "steps=3")
    assert (code, "task: required" in out) == (2, True), out
