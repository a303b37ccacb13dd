from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.data.questions import data_hash, question_digest
from lockstep.errors import TaskError
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.types import Prompt

ONE_DIGIT: dict[str, schema.Json] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SIGNED = ONE_DIGIT | {"allow_negation": True}


def sums(run_seed: int = 0, **changes: object) -> BuiltTask:
    values = {"settings": ONE_DIGIT} | changes
    return build_task(schema.ReasoningGymTask.model_validate(values), run_seed)


def questions(prompts: object) -> set[bytes]:
    return {question_digest(prompt.messages) for prompt in prompts}  # type: ignore[attr-defined]


def test_training_never_asks_a_held_out_question():
    held = questions(sums().heldout("id_probe", 105))
    assert len(held) == 105  # all there are
    for seed in range(5):
        task = sums(seed, seed=seed)
        assert not held & questions(prompt for step in range(30) for prompt in task.batch(step, 8))


def test_an_epoch_asks_each_question_once():
    task = sums()
    asked = [prompt.id for step in range(11) for prompt in task.batch(step, 8)]  # 95 // 8 = 11 steps
    assert len(asked) == len(set(asked)) == 88
    assert set(asked) != {prompt.id for step in range(11, 22) for prompt in task.batch(step, 8)}


def test_batches_depend_on_their_arguments_alone():
    first, second = sums(), sums()
    for step in (7, 0, 300, 7):
        assert first.batch(step, 8) == second.batch(step, 8)
    second.heldout("id_probe", 10)
    assert first.batch(3, 8) == second.batch(3, 8)
    assert first.batch(3, 8) != first.batch(4, 8)
    assert first.batch(0, 8) != sums(1).batch(0, 8)


CODE = """
from lockstep.config import schema
from lockstep.data.questions import data_hash
from lockstep.tasks.build import build_task
task = build_task(schema.ReasoningGymTask(settings=%r), 3)
print([data_hash(task.batch(step, 8)) for step in (0, 5, 99)], data_hash(task.heldout("id_probe", 100)))
"""


def test_another_process_asks_the_same():
    task = sums(3)
    here = f"{[data_hash(task.batch(step, 8)) for step in (0, 5, 99)]} {data_hash(task.heldout('id_probe', 100))}"
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", CODE % ONE_DIGIT]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert there.stdout.strip() == here


def test_held_out_questions_are_the_same_for_every_seed_and_pinned():
    hashes = {data_hash(sums(seed, seed=seed, settings=SIGNED).heldout("id_probe", 200)) for seed in (0, 1, 2)}
    # Changing it makes old scores incomparable.
    assert hashes == {"c5ed414edb086a7c"}


def test_too_few_held_out_questions_are_an_error():
    with pytest.raises(TaskError) as error:
        sums().heldout("id_probe", 200)
    assert "200 held-out questions were requested, but these settings give only 105 different ones" in str(error.value)
    assert "set eval.items=105" in str(error.value)
    assert len({p.id for p in sums(settings=SIGNED).heldout("id_probe", 200)}) == 200


def test_repeats_are_asked_for_even_and_marked():
    prompts = sums(repeat_heldout=True).heldout("id_probe", 230)
    assert len({prompt.id for prompt in prompts}) == 230
    assert len(questions(prompts)) == 105
    assert prompts[105].messages == prompts[0].messages
    assert prompts[105].id == f"{prompts[0].id}#2"
    assert prompts[210].id == f"{prompts[0].id}#3"
    assert prompts[210].data["repeats"] == prompts[0].id
    assert "repeats" not in prompts[0].data
    assert sums(repeat_heldout=True).heldout("id_probe", 105) == sums().heldout("id_probe", 105)


def test_other_roles_are_named():
    with pytest.raises(TaskError, match="no held-out questions for ood_probe; its roles are: id_probe"):
        sums().heldout("ood_probe", 1)


def test_a_batch_larger_than_the_pool():
    with pytest.raises(TaskError, match="a step needs 96 different questions, but the task has only 95 for training"):
        sums().batch(0, 96)
    assert len(sums().batch(0, 95)) == 95


def test_size_bounds_the_pool_and_notes_count():
    task = sums(size=40)
    assert len(questions(p for step in range(10) for p in task.batch(step, 40))) == 40
    assert task.notes[0] == "chain_sum: graded by verifier numeric"
    assert task.notes[1].startswith("chain_sum: 40 different training questions of 40 asked for, from ")
    assert "95 different training questions of 2000 asked for" in sums().notes[1]


def test_replies_are_graded():
    task = sums()
    prompt = task.batch(0, 1)[0]
    assert task.grade(prompt, f"\\boxed{{{prompt.answer}}}").reward == 1.0
    assert task.grade(prompt, f"\\boxed{{{int(prompt.answer) + 1}}}").reward == 0.0
    assert task.grade(prompt, prompt.answer).reward == 0.0


def test_answers_that_the_verifier_cannot_read_are_found_at_once():
    with pytest.raises(TaskError, match="the verifier cannot grade 20 of 20 questions"):
        build_task(schema.ReasoningGymTask(dataset="caesar_cipher", scoring="verifier"), 0)
    task = build_task(schema.ReasoningGymTask(dataset="caesar_cipher", size=10), 0)
    assert task.notes[0] == "caesar_cipher: graded by its own score function: numeric does not fit its answers"
    task = build_task(schema.ReasoningGymTask(dataset="caesar_cipher", verifier=schema.TextVerifier(), size=10), 0)
    prompt = task.batch(0, 1)[0]
    assert task.grade(prompt, f"\\boxed{{{prompt.answer.lower()}}}").reward == 1.0


def test_the_data_sets_own_scorer_in_a_python_verifier(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = next(block for block in document.split("```python\n")[1:] if "get_score_answer_fn" in block).split("```")[0]
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    verifier = schema.PythonVerifier(path=f"{tmp_path}/own.py:grade")
    task = build_task(schema.ReasoningGymTask(dataset="chain_sum", size=10, verifier=verifier), 0)
    prompt: Prompt = task.batch(0, 1)[0]
    assert task.grade(prompt, f"\\boxed{{{prompt.answer}}}").reward == 1.0
    assert task.grade(prompt, "no").reward == 0.0


def test_a_data_sets_own_score_function_takes_any_right_answer_and_pays_in_part_if_asked():
    """countdown has many solutions; a wrong one that uses the numbers earns a little from the data set itself."""
    settings = {"min_numbers": 3, "max_numbers": 3, "min_target": 10, "max_target": 50}
    whole, part = (
        build_task(schema.ReasoningGymTask(dataset="countdown", settings=settings, size=10, partial=partial), 0)
        for partial in (False, True)
    )
    prompt = whole.heldout("id_probe", 1)[0]
    assert whole.grade(prompt, f"\\boxed{{({prompt.answer})}}").reward == 1.0
    assert whole.grade(prompt, f"<answer>{prompt.answer}</answer>").reward == 1.0
    numbers = " + ".join(str(number) for number in prompt.data["metadata"]["numbers"])
    target = prompt.data["metadata"]["target"]
    if sum(prompt.data["metadata"]["numbers"]) != target:
        assert whole.grade(prompt, f"\\boxed{{{numbers}}}").reward == 0.0
        assert 0 < part.grade(prompt, f"\\boxed{{{numbers}}}").reward < 1
    for hostile in ("__import__('os').system('true')", "9**9**9**9", "import os", ""):
        assert whole.grade(prompt, f"\\boxed{{{hostile}}}").reward == 0.0
