from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.data.questions import question_digest
from lockstep.errors import DataError, TaskError
from lockstep.loops.preflight import ready_items
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task


def write(path: Path, rows: list[tuple[str, object]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text, answer in rows))
    return path


def sums(numbers: range) -> list[tuple[str, object]]:
    return [(f"What is {n} + 1?", n + 1) for n in numbers]


def build(path: Path, **settings: object) -> BuiltTask:
    return build_task(schema.FileTask.model_validate({"data": str(path), **settings}), 0)


def test_rows_are_held_out_by_hash(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(300)))
    task = build(path, heldout_rows=100)
    assert task.name == "sums"
    held = {question_digest(p.messages) for p in task.heldout("id_probe", 100)}
    asked = {question_digest(p.messages) for step in range(20) for p in task.batch(step, 10)}
    assert (len(held), len(asked), len(held & asked)) == (100, 200, 0)
    assert task.notes == (
        f"sums: 300 rows in {path}",
        "sums: 100 questions held out by hash as id_probe, 200 rows left to train on, "
        "0 more rows dropped because they repeat a held-out question",
        "sums: 100 held-out rows for id_probe, none of them in training",
    )
    assert [p.id for p in task.heldout("id_probe", 20)] == [p.id for p in task.heldout("id_probe", 100)][:20]


def test_a_question_with_two_answers_is_a_warning(tmp_path):
    rows = [*sums(range(30)), ("What is  5 + 1?", 6), ("What is 7 + 1?", 9), ("What is 8 + 1?", "9.0")]
    path = write(tmp_path / "sums.jsonl", rows)
    held = write(tmp_path / "held.jsonl", [*sums(range(50, 60)), ("What is 50 + 1?", 0)])
    assert [
        note for note in build(path, heldout={"id_probe": str(held)}).notes if "repeat" in note or "of these" in note
    ] == [
        "sums: 3 of 33 rows repeat a question",
        "sums: warning: of these, 1 with another answer than the first row that asks it: sums/8 and sums/32",
        "sums@id_probe: 1 of 11 rows repeat a question",
        "sums@id_probe: warning: of these, 1 with another answer than the first row that asks it: "
        "sums@id_probe/1 and sums@id_probe/11",
    ]


def test_two_builds_are_equal(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(300)))
    first, second = build(path), build(path)
    assert [first.batch(step, 8) for step in range(5)] == [second.batch(step, 8) for step in range(5)]
    assert first.heldout("id_probe", 200) == second.heldout("id_probe", 200)


def test_files_for_roles(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(50)))
    probe = write(tmp_path / "probe.jsonl", sums(range(100, 120)))
    hard = write(tmp_path / "hard.jsonl", sums(range(1000, 1005)))
    task = build(path, heldout={"id_probe": str(probe), "ood_probe": str(hard)})
    assert {p.id for p in task.batch(0, 50)} == {f"sums/{row}" for row in range(1, 51)}
    assert [p.id for p in task.heldout("id_probe", 2)] == ["sums@id_probe/1", "sums@id_probe/2"]
    assert [p.answer for p in task.heldout("ood_probe", 5)] == ["1001", "1002", "1003", "1004", "1005"]
    assert task.heldout("ood_probe", 1)[0].task == "sums"
    assert task.grade(task.heldout("ood_probe", 1)[0], "\\boxed{1,001}").reward == 1.0
    sets = {"items": 20, "also": [{"role": "ood_probe", "items": 6}]}
    with pytest.raises(TaskError, match="6 held-out questions were requested, but ood_probe has only 5") as caught:
        ready_items(schema.Recipe.model_validate({"eval": sets}), task)
    assert caught.value.fix.startswith("set eval.also.0.items=5 or lower")


def test_overlap_is_refused(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(50)))
    probe = write(tmp_path / "probe.jsonl", [*sums(range(100, 120)), (" what is 7 +  1?", 8)])
    with pytest.raises(DataError) as error:
        build(path, heldout={"id_probe": str(probe)})
    assert "1 of 21 held-out questions are also training questions: sums@id_probe/21 = sums/8" in str(error.value)
    assert f"{path} and {probe}" in str(error.value)


def test_too_few_rows_are_errors(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(50)))
    with pytest.raises(
        DataError, match="200 questions are to be held out, which leaves none to train on: there are 50"
    ):
        build(path)
    task = build(path, heldout_rows=10)
    with pytest.raises(TaskError, match="200 held-out questions were requested, but id_probe has only 10"):
        task.heldout("id_probe", 200)
    with pytest.raises(TaskError, match="the task has only 40 for training"):
        task.batch(0, 41)
    with pytest.raises(TaskError, match="no held-out questions for sanity; its roles are: id_probe"):
        task.heldout("sanity", 1)
    with pytest.raises(TaskError, match=r"for id_probe; its roles are: none\n  to fix: set task.heldout_rows above 0"):
        build(path, heldout_rows=0).heldout("id_probe", 1)


def test_answers_that_the_verifier_cannot_read(tmp_path):
    path = write(tmp_path / "sums.jsonl", [*sums(range(50)), ("What is the capital of France?", "Paris")])
    with pytest.raises(TaskError) as error:
        build(path, heldout_rows=0)
    assert "the verifier cannot grade 1 of 51 questions" in str(error.value)
    assert "sums/51: the reference 'Paris' in a box cannot be scored" in str(error.value)
    build(path, heldout_rows=0, verifier={"kind": "text"})


def test_a_grader_that_always_fails_is_given_up_early(tmp_path):
    """Each failure may cost its whole time limit."""
    path = write(tmp_path / "sums.jsonl", sums(range(50)))
    (tmp_path / "own.py").write_text("def grade(prompt, reply):\n    raise RuntimeError('never')\n")
    with pytest.raises(TaskError, match="the verifier cannot grade 5 of 5 questions"):
        build(path, heldout_rows=0, verifier={"kind": "python", "path": f"{tmp_path}/own.py:grade", "workers": 1})


def test_bad_rows_stop_the_build(tmp_path):
    path = write(tmp_path / "sums.jsonl", [("", 1), *sums(range(50))])
    with pytest.raises(DataError, match=r"sums.jsonl:1: 'prompt' is empty"):
        build(path)


def test_columns_are_settings():
    path = Path(__file__).parents[1] / "data" / "files" / "sums.jsonl"
    task = build_task(
        schema.FileTask(data=schema.Data(source=str(path), prompt="question", id="key"), heldout_rows=1), 0
    )
    ids = {p.id for p in [*task.batch(0, 3), *task.heldout("id_probe", 1)]}
    assert ids == {"sums/a1", "sums/a2", "sums/a3", "sums/a4"}


def test_a_source_in_short_or_with_columns(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(range(30)))
    short, whole = (schema.FileTask.model_validate({"data": data}) for data in (str(path), {"source": str(path)}))
    assert short == whole


def test_filters_and_dropped_rows_are_noted(tmp_path):
    path = write(tmp_path / "sums.jsonl", [("", 1), *sums(range(50))])
    data = {
        "source": str(path),
        "on_bad_row": "drop",
        "filters": [{"kind": "integer_answer", "name": "small", "high": 30}],
    }
    task = build_task(schema.FileTask.model_validate({"data": data, "heldout_rows": 5}), 0)
    assert task.notes[:3] == (
        f"sums: 30 rows in {path}",
        "sums: 1 of 51 rows are bad and were dropped",
        "sums: filter small kept 31 of 51",
    )


def test_held_out_questions_that_share_thirteen_words(tmp_path):
    words = " ".join(f"w{n}" for n in range(20))
    path = write(tmp_path / "sums.jsonl", [*sums(range(20)), (f"First: {words}", 1)])
    probe = write(tmp_path / "probe.jsonl", [*sums(range(100, 104)), (f"Second: {words}", 2)])
    near = "1 of 5 held-out questions for id_probe share 13 words in a row with a training question"
    task = build(path, heldout={"id_probe": str(probe)})
    assert task.notes[-1] == f"sums: warning: {near}: sums@id_probe/5 and sums/21"
    with pytest.raises(DataError, match=near):
        build(path, heldout={"id_probe": str(probe)}, near_overlap="refuse")
    assert not any(
        "warning" in note for note in build(path, heldout={"id_probe": str(probe)}, near_overlap="allow").notes
    )
