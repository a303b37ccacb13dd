"""Legal moves and outcomes, against OpenSpiel itself and numbers worked out by hand."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import chain
from pathlib import Path

import pyspiel
import pytest

from lockstep.config import schema
from lockstep.config.load import load
from lockstep.envs.spiel.cases import BOARD
from lockstep.envs.spiel.outcome import outcome, pool
from lockstep.envs.spiel.play import mcts_mover
from lockstep.envs.spiel.states import moves_at, state_at
from lockstep.envs.spiel.text import question, read_move, written
from lockstep.errors import TaskError
from lockstep.loops.step_metrics import rollout_metrics
from lockstep.tasks.build import build_task
from lockstep.tasks.open_spiel import SpielStates
from lockstep.types import FinishReason, Grade, Group, Prompt, Rollout

ROOT = Path(__file__).resolve().parents[3]
WIN_OR_NOT = (0, 3, 1, 4)
"""Tic-tac-toe: x has the first two cells of the upper row, o of the middle one; x is to move."""


def task_of(**settings: object) -> SpielStates:
    task = build_task(schema.OpenSpielTask.model_validate(settings), 0)
    assert isinstance(task, SpielStates)
    return task


def at(game: str, *history: int) -> Prompt:
    """A prompt of this state; graders need no more of it."""
    return Prompt("x", (), "", game, {"game": game, "case": game, "history": list(history)})


@pytest.mark.parametrize("game", BOARD)
def test_legality_is_what_openspiel_says(game: str) -> None:
    task = task_of(games=[game], num_tasks_per_case=20)
    prompts = task.batch(0, 20)
    legal = []
    for prompt in prompts:
        state = pyspiel.load_game(game).new_initial_state()
        for action in prompt.data["history"]:  # type: ignore[attr-defined]
            state.apply_action(action)
        legal.append({state.action_to_string(action) for action in state.legal_actions()})
    everything = sorted(set(chain(*legal)))
    paid, refused = 0, 0
    for prompt, moves in zip(prompts, legal, strict=True):
        for move in everything:  # those of other states are well-formed, and mostly not legal here
            grade = task.grade(prompt, f"I think so.\n<move>{move}</move>")
            assert grade.reward == grade.metrics["correct"] == grade.metrics["legal"] == float(move in moves)
            assert grade.extracted == move
            paid, refused = paid + (move in moves), refused + (move not in moves)
        assert task.grade(prompt, f"<move>{prompt.answer}</move>").reward == 1.0
        assert task.problems(prompt) == []
    assert paid > 0
    assert refused > 0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<move>x2</move>", 1.0),
        ("o could answer x3. <move> x2 </move>\n", 1.0),
        ("", 0.0),
        ("x2", 0.0),
        ("2", 0.0),
        ("<move></move>", 0.0),
        ("<move>2</move>", 0.0),
        ("<move>X2</move>", 0.0),
        ("<move>o2</move>", 0.0),
        ("<move>x7</move>", 0.0),
        ("<move>x2, x3</move>", 0.0),
        ("<move>x2</move> or <move>x3</move>", 0.0),
        ("<move>x2</move><move>x2</move>", 0.0),
        ("<move>x2</move> is best", 0.0),
        ("<move>x2", 0.0),
        ("</move>x2<move>", 0.0),
        ("</move><move>x2</move>", 0.0),
        ("<move><move>x2</move></move>", 0.0),
        ("Legal moves: x0, x1, x2, x3, x4, x5, x6", 0.0),
        ("<move>" + "x2" * 10_000 + "</move>", 0.0),
        ("<move>\ud800</move>", 0.0),
    ],
)
def test_only_a_move_in_its_tag_counts(reply: str, reward: float) -> None:
    assert task_of(games=["connect"]).grade(at("connect_four"), reply).reward == reward


@pytest.mark.parametrize(
    ("answer", "reply", "reward"),
    [
        ("line", "Centre first.\nx3", 1.0),
        ("line", "x3\n\n", 1.0),
        ("line", "x3\nthat is all", 0.0),
        ("line", "I play x3", 0.0),
        ("line", "<move>x3</move>", 0.0),
        ("reply", " x3\n", 1.0),
        ("reply", "Centre first.\nx3", 0.0),
        ("reply", "x3 x4", 0.0),
    ],
)
def test_other_places_for_the_move(answer: str, reply: str, reward: float) -> None:
    assert task_of(games=["connect"], answer=answer).grade(at("connect_four"), reply).reward == reward


@pytest.mark.parametrize(
    "game", ["morpion_solitaire", "amazons", "quoridor", "twixt", "leduc_poker", "gin_rummy", "skat"]
)
def test_other_games_pay_the_moves_that_they_list(game: str) -> None:
    task = task_of(games=[game], num_tasks_per_case=3)
    for prompt in task.batch(0, 3):
        assert task.problems(prompt) == []
        assert "\x1b" not in prompt.messages[0]["content"]


def test_a_full_column_and_the_other_side_are_not_legal() -> None:
    task, full = task_of(games=["connect"], answer="reply"), at("connect_four", 3, 3, 3, 3, 3, 3)
    assert task.grade(full, "x3").reward == 0.0
    assert task.grade(full, "x4").reward == 1.0
    assert task.grade(at("connect_four", 0), "x4").reward == 0.0
    assert task.grade(at("connect_four", 0), "o4").reward == 1.0


def test_outcomes_worked_out_by_hand() -> None:
    prompt = at("tic_tac_toe", *WIN_OR_NOT)
    task = task_of(games=["tic"], reward_mode="outcome", playouts=4, answer="reply")
    won = task.grade(prompt, "x(0,2)")
    assert (won.reward, won.metrics["value"], won.metrics["correct"], won.metrics["legal"]) == (1.0, 1.0, 1.0, 1.0)
    assert task.grade(prompt, "x(1,0)") == Grade(
        0.0, {"correct": 0.0, "has_answer": 1.0, "legal": 0.0}, "x(1,0)", "reply"
    )
    signed = task_of(games=["tic"], reward_mode="outcome", playouts=4, answer="reply", reward_range="signed")
    assert signed.grade(prompt, "x(0,2)").reward == 1.0
    assert signed.grade(prompt, "hm").reward == -1.0
    last = at("tic_tac_toe", 0, 4, 8, 1, 7, 6, 2, 5)  # one cell is left, and fills the board without a line
    assert task.grade(last, "x(1,0)").metrics == {"correct": 0.0, "has_answer": 1.0, "legal": 1.0, "value": 0.5}
    assert signed.grade(last, "x(1,0)").reward == 0.0


def test_outcomes_go_by_the_utilities_of_the_game() -> None:
    """Kuhn poker pays -2 to 2: with the lowest card against the middle one, a fold loses 1 and a call loses 2."""
    prompt = at("kuhn_poker", 0, 1, 0, 1)
    low = task_of(games=["kuhn"], num_tasks_per_case=2, reward_mode="outcome", answer="reply")
    assert low.grade(prompt, "Pass").reward == pytest.approx(0.25)
    assert low.grade(prompt, "Bet").reward == 0.0
    signed = task_of(games=["kuhn"], num_tasks_per_case=2, reward_mode="outcome", answer="reply", reward_range="signed")
    assert signed.grade(prompt, "Pass").reward == pytest.approx(-0.5)


@pytest.mark.parametrize("game", BOARD)
def test_playouts_are_bounded_and_the_same_whenever_they_are_made(game: str) -> None:
    settings = {
        "games": [game],
        "num_tasks_per_case": 4,
        "reward_mode": "outcome",
        "playouts": 2,
        "reward_range": "signed",
    }
    one, two = task_of(**settings), task_of(**settings)
    prompts = one.batch(0, 4)
    replies = [written(list(moves_at(game, tuple(p.data["history"])))[-1], "tag") for p in prompts]  # type: ignore[arg-type]
    first = [one.grade(p, reply) for p, reply in zip(prompts, replies, strict=True)]
    moves_at.cache_clear()
    random.seed(5)
    again = [two.grade(p, reply) for p, reply in reversed(list(zip(prompts, replies, strict=True)))]
    assert first == again[::-1]
    assert all(grade.reward is not None and -1.0 <= grade.reward <= 1.0 for grade in first)


def test_playouts_follow_the_seed_and_their_mean_nears_the_truth() -> None:
    prompt = at("tic_tac_toe", 0, 1, 3)  # o must block; elsewhere x wins at once or later, with some probability
    values = {
        task_of(games=["tic"], reward_mode="outcome", playouts=3, answer="reply", seed=seed)
        .grade(prompt, "o(1,1)")
        .reward
        for seed in range(12)
    }
    assert len(values) > 1
    exact = _expected(state_at("tic_tac_toe", (0, 1, 3, 4)), 1)
    many = task_of(games=["tic"], reward_mode="outcome", playouts=2000, answer="reply").grade(prompt, "o(1,1)").reward
    assert many == pytest.approx(exact, abs=0.04)


def _expected(state: pyspiel.State, player: int) -> float:
    """Of random play, by brute force: 0 is a loss, 1 a win."""
    if state.is_terminal():
        return (state.returns()[player] + 1) / 2
    actions = state.legal_actions()
    return sum(_expected(state.child(action), player) for action in actions) / len(actions)


def test_search_finds_what_chance_misses() -> None:
    """x threatens to win at (2,0): mcts takes it, so any move of o but the block loses every playout."""
    prompt = at("tic_tac_toe", 0, 1, 3)
    settings = {"games": ["tic"], "reward_mode": "outcome", "answer": "reply", "playouts": 3}
    search = task_of(**settings, playout="mcts", simulations=100)
    assert search.grade(prompt, "o(2,2)").reward == 0.0
    assert search.grade(prompt, "o(2,2)") == search.grade(prompt, "o(2,2)")
    assert task_of(**{**settings, "playouts": 40}).grade(prompt, "o(2,2)").reward > 0.0


def test_grading_a_move_takes_under_a_millisecond() -> None:
    task = task_of(num_tasks_per_case=20)
    prompts = task.batch(0, 360)
    moves_at.cache_clear()
    start = time.process_time()
    for prompt in prompts:
        task.grade(prompt, "<move>a1</move>")
    assert (time.process_time() - start) / len(prompts) < 1e-3


def test_a_state_that_does_not_exist_is_an_error_and_never_a_zero() -> None:
    with pytest.raises(TaskError, match="the stored moves of a state are not legal"):
        task_of(games=["tic"]).grade(at("tic_tac_toe", 0, 0), "<move>x(0,0)</move>")


def test_numbers_are_kept_for_each_case() -> None:
    task = task_of(games=["tic", "connect"], num_tasks_per_case=4)
    groups = []
    for prompt in task.batch(0, 8):
        replies = [f"<move>{prompt.answer}</move>", "no", "no", "no"][: 2 if prompt.task == "tic_tac_toe" else 4]
        graded = [
            Rollout(prompt, (1,), (2,), (0.0,), (True,), reply, FinishReason.STOP, 0, task.grade(prompt, reply), i)
            for i, reply in enumerate(replies)
        ]
        groups.append(Group(prompt, tuple(graded)))
    metrics = rollout_metrics(groups, load([str(ROOT / "recipes" / "smoke.yaml")]))
    assert metrics["task/tic_tac_toe/reward"] == metrics["task/tic_tac_toe/correct"] == 0.5
    assert metrics["task/connect_four/reward"] == metrics["task/connect_four/correct"] == 0.25
    assert metrics["answer/legal"] == pytest.approx(8 / 24)


def test_cases_take_part_in_a_mix() -> None:
    states = schema.OpenSpielTask(games=["hex"], num_tasks_per_case=3)
    games = schema.OpenSpielTask(games=["tic"], num_tasks_per_case=3, reward_mode="game")
    shares = {"states": schema.Share(task=states), "games": schema.Share(task=games)}
    task = build_task(schema.MixedTask(tasks=shares), 0)
    assert task.plays
    for prompt in task.batch(0, 8):
        assert prompt.task in shares
        assert (task.runner(prompt) is None) == (prompt.task == "states")
        if prompt.task == "states":
            assert task.grade(prompt, f"<move>{prompt.answer}</move>").reward == 1.0
            assert task.problems(prompt) == []


def test_the_recipes_examples_are_what_the_task_asks() -> None:
    recipe = load([str(ROOT / "recipes" / "envs" / "open_spiel_legal.yaml")])
    assert isinstance(recipe.task, schema.OpenSpielTask)
    for example, game, history in zip(
        recipe.chat.examples, ("tic_tac_toe", "connect_four"), ((0, 4), (3, 2, 3)), strict=True
    ):
        state = state_at(game, history)
        (asked,) = question(state, game, recipe.task.answer, show_moves=recipe.task.show_moves)
        assert example.user == asked["content"]
        move = read_move(example.assistant, recipe.task.answer)
        assert move in {state.action_to_string(action) for action in state.legal_actions()}


def test_outcomes_are_played_out_in_processes_of_their_own() -> None:
    settings = {"games": ["tic"], "answer": "reply", "playouts": 2, "playout": "mcts", "simulations": 8, "workers": 3}
    task = task_of(reward_mode="outcome", **settings)
    assert task.workers == 3
    assert task_of(games=["tic"]).workers == 0
    for prompt in task.batch(0, 4):
        history = tuple(prompt.data["history"])
        move, action = next(iter(moves_at("tic_tac_toe", history).items()))
        grade = task.grade(prompt, move)
        assert grade.reward == outcome("tic_tac_toe", history, action, mcts_mover(8), 2, 1)
        os.kill(pool(3).pids[0], signal.SIGKILL)  # a process that somebody kills is replaced, and the move graded again
        assert task.grade(prompt, move) == grade
