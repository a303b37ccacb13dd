"""Final answers and single questions are graded while others are sampled, in episodes and in evaluations."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lockstep.chat.chat import ChatFormat
from lockstep.config import schema
from lockstep.config.schema import Chat, EvalMode, Turns
from lockstep.envs.runners import InlineRunner, Runner
from lockstep.evaluation.plan import EvalPlan
from lockstep.evaluation.runner import evaluate
from lockstep.rollout.grading import AsyncGrader
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.build import build_task
from lockstep.tasks.mixed import Mixed
from lockstep.tasks.multi_turn import ToolQuestions
from lockstep.types import Grade, Prompt, Turn
from tests.chat.toy_tokenizers import chatml
from tests.envs.played import chat_of, engine_of, play
from tests.evaluation.scores import PROOF
from tests.evaluation.toys import Sums, TableEngine

SECONDS = 0.1
PROMPTS = [Prompt(f"p/{i}", ({"role": "user", "content": f"State {i}"},), str(i), "slow") for i in range(6)]


class Once:
    """The first reply is the final answer."""

    def start(self, seed: int) -> Turn:
        return Turn()

    def step(self, reply: str) -> Turn:
        return Turn(reward=0.25, done=True, answer=True, metrics={"tool_calls": 0.0})


class Slow(BuiltTask):
    """Odd prompts are episodes, even ones questions; a grade takes a tenth of a second, in threads."""

    name, plays, workers = "slow", True, 0

    def __init__(self, workers: int, error: str = "") -> None:
        self.workers, self.error = workers, error
        self.inline = InlineRunner(lambda prompt: Once())

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        time.sleep(SECONDS)
        return Grade(None, error=self.error) if self.error else Grade(0.5, {"correct": 1.0}, reply[:5], "slow")

    def runner(self, prompt: Prompt) -> Runner | None:
        return self.inline if int(prompt.answer) % 2 else None

    def limits(self, prompt: Prompt) -> Turns:
        return Turns()

    def batch(self, step: int, size: int) -> list[Prompt]:
        return PROMPTS[:size]

    heldout = batch


def test_episodes_and_questions_wait_for_their_grades_side_by_side(tiny_model_dir: Path) -> None:
    task = Slow(workers=12)
    grading = AsyncGrader(task)
    engine, chat = engine_of(tiny_model_dir, slots=12), chat_of(tiny_model_dir)
    played = play(engine, chat, task, PROMPTS, budget=6, grader=grading)
    for one in [found.rollout for found in played.values()]:
        assert one.grade.reward == (0.75 if one.turns else 0.5)
        assert one.grade.metrics["correct"] == 1.0
        assert one.grade.extracted is not None
    assert grading.metrics["time/grade_work"] >= 12 * SECONDS
    assert grading.held < 6 * SECONDS  # one after the other they take twelve


def test_an_answer_that_cannot_be_graded_leaves_its_episode_unscored(tiny_model_dir: Path) -> None:
    task = Slow(workers=2, error="no judge")
    for one in play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, PROMPTS[:2], 1, budget=6).values():
        assert one.rollout.grade == Grade(None, error="no judge")


class SlowSums(Sums):
    """Graded in threads, a tenth of a second each."""

    workers = 20

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        time.sleep(SECONDS)
        return super().grade(prompt, reply)


def test_an_evaluation_grades_while_it_samples() -> None:
    chat = ChatFormat(chatml(), Chat(suffix=" now"))
    plan = EvalPlan("toy", "fp32", "native", "id_probe", 20, 8, 5, "numeric")
    answers = {prompt.id: prompt.answer for prompt in Sums().heldout("id_probe", 20)}
    engine = TableEngine(chat, lambda request: answers[request.group])
    start = time.perf_counter()
    beside = evaluate(engine, SlowSums(), chat, EvalMode(), plan, PROOF, step=0)
    assert time.perf_counter() - start < 20 * SECONDS  # one after the other they take that long by themselves
    at_once = evaluate(
        TableEngine(chat, lambda request: answers[request.group]), Sums(), chat, EvalMode(), plan, PROOF, step=0
    )
    assert beside.results == at_once.results
    assert beside.accuracy == 1.0


# --- tasks with tools -------------------------------------------------------------------------------------------------
def own(folder: Path) -> dict[str, object]:
    (folder / "own.py").write_text("def grade(prompt, reply):\n    return float(reply == prompt.answer)\n")
    return {"kind": "python", "path": f"{folder}/own.py:grade", "workers": 3}


SUMS = {"kind": "reasoning_gym", "dataset": "chain_sum", "settings": {"max_terms": 2}, "size": 20}


class Keeping(Slow):
    """A task that says where it was told to keep things."""

    kept: Path | None = None

    def keep_in(self, folder: Path) -> None:
        self.kept = folder

    def problems(self, prompt: Prompt) -> list[str]:
        return [f"problem of {prompt.id}"]


def test_questions_with_tools_are_graded_kept_and_tested_as_without(tmp_path: Path) -> None:
    questions = Keeping(0)
    task = ToolQuestions(schema.ToolTask(), questions)
    task.keep_in(tmp_path)
    assert questions.kept == tmp_path  # a judge's answers are kept with the run
    assert task.problems(PROMPTS[0]) == ["problem of p/0"]
    assert task.workers == 0
    settings = schema.ToolTask.model_validate({"kind": "tools", "questions": {**SUMS, "verifier": own(tmp_path)}})
    assert build_task(settings, 0).workers == 3


def test_each_task_of_a_mix_is_graded_where_it_works(tmp_path: Path) -> None:
    settings = schema.MixedTask.model_validate(
        {
            "kind": "mixed",
            "tasks": {"here": {"task": SUMS}, "there": {"task": {**SUMS, "verifier": own(tmp_path)}}},
        }
    )
    task = build_task(settings, 0)
    assert isinstance(task, Mixed)
    assert task.workers == 3
    here, there = sorted(task.batch(0, 2), key=lambda prompt: prompt.task)
    assert (task.workers_for(here), task.workers_for(there)) == (0, 3)
    assert task.grades_many(here) is None
    found = task.grades_many(there)
    assert found is not None
    together, own_prompt = found
    assert f"there/{own_prompt.id}" == there.id
    graded = together([(own_prompt, [there.answer]), (own_prompt, ["?"])], lambda: None)
    assert [grade.reward for (grade,) in graded] == [1.0, 0.0]


def test_a_run_of_episodes_says_what_grading_took(tmp_path: Path, tiny_model_dir: Path) -> None:
    from lockstep.loops.start import start_run
    from lockstep.track.writer import read_metrics
    from tests.loops.test_turns import GUESS, recipe

    run = start_run(recipe(tmp_path, tiny_model_dir, GUESS, "steps=1"))
    (row,) = [row for row in read_metrics(run) if row.step == 1]
    for phase in ("time/grade", "time/grade_work", "time/grade_slowest", "time/grade_share"):
        assert 0.0 <= row.metrics[phase] < 60
    assert re.search(r"grading added \d+\.\d%", run.log_path.read_text())
