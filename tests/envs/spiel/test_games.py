"""Whole games: what they pay, against whom, and through the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.envs.runners import Fault
from lockstep.envs.spiel.game import SpielGame, spiel_maker
from lockstep.envs.spiel.states import moves_of, state_at
from lockstep.errors import TaskError
from lockstep.tasks.build import build_task
from lockstep.tasks.open_spiel import SpielGames, SpielStates
from lockstep.types import Prompt, Turn
from tests.envs.played import chat_of, engine_of, play

OWN = """
import random
def lowest(state, numbers: random.Random):
    return min(state.legal_actions())
def named(state, numbers):
    return state.action_to_string(max(state.legal_actions()))
def wrong(state, numbers):
    return 99
"""


def game_of(game: str, *history: int, **settings: object) -> SpielGame:
    chosen = {"games": [game], "reward_mode": "game", "answer": "reply", **settings}
    prompt = Prompt("x", (), "", game, {"game": game, "case": game, "history": list(history)})
    return spiel_maker(schema.OpenSpielTask.model_validate(chosen))(prompt)


def own(folder: Path, name: str) -> str:
    (folder / "own.py").write_text(OWN)
    return f"{folder / 'own.py'}:{name}"


def total(turns: list[Turn]) -> float:
    assert all(turn.reward is not None for turn in turns)
    return sum(turn.reward or 0.0 for turn in turns)


def played(game: SpielGame, replies: list[str]) -> list[Turn]:
    game.start(1)
    turns: list[Turn] = []
    for reply in replies:
        assert not (turns and turns[-1].done)
        turns.append(game.step(reply))
    return turns


@pytest.mark.parametrize(("range_", "low", "high"), [("zero_one", 0.0, 1.0), ("signed", -1.0, 1.0)])
def test_a_game_pays_its_result(tmp_path: Path, range_: str, low: float, high: float) -> None:
    """The opponent takes the first free cell: x in the middle row wins."""
    settings = {"opponent": own(tmp_path, "lowest"), "reward_range": range_}
    won = played(game_of("tic_tac_toe", **settings), ["x(1,0)", "x(1,1)", "x(1,2)"])
    assert won[-1].done
    assert total(won) == high
    assert won[-1].metrics == {"legal_moves": 1.0, "correct": 1.0, "finished": 1.0, "value": 1.0}
    lost = played(game_of("tic_tac_toe", **settings), ["x(1,0)", "x(2,0)", "x(2,2)"])  # o has the upper row
    assert lost[-1].done
    assert total(lost) == low
    assert lost[-1].metrics["correct"] == 0.0
    unfinished = played(game_of("tic_tac_toe", **settings), ["x(1,0)", "x(2,0)"])
    assert not unfinished[-1].done
    assert total(unfinished) == low
    illegal = played(game_of("tic_tac_toe", **settings), ["x(1,0)", "x(0,0)"])
    assert illegal[-1].done
    assert total(illegal) == low
    assert illegal[-1].metrics["tool_errors"] == 1.0


def test_the_observation_is_the_next_state_for_the_same_side(tmp_path: Path) -> None:
    (turn,) = played(game_of("connect_four", 3, opponent=own(tmp_path, "named")), ["o3"])
    text = turn.observation[0]["content"]
    expected = state_at("connect_four", (3, 3, 6))
    assert str(expected).strip() in text
    assert "To move: o (player 2 of 2)" in text
    assert "Legal moves: o0, o1" in text


def test_illegal_replies_can_be_forgiven(tmp_path: Path) -> None:
    game = game_of("tic_tac_toe", opponent=own(tmp_path, "lowest"), illegal_moves=1, reward_range="signed")
    turns = played(game, ["what?", "x(1,0)", "x(1,1)", "x(1,2)"])
    assert turns[0].observation[0]["content"].startswith("That is no legal move.\nGame: tic_tac_toe")
    assert total(turns) == 1.0
    assert total(played(game_of("tic_tac_toe", illegal_moves=1), ["what?", "x(9,9)"])) == 0.0


def test_chance_goes_by_the_seed() -> None:
    def course(seed: int) -> list[str]:
        game, said = game_of("connect_four"), []
        turn = game.start(seed)
        while not turn.done:
            said.append(turn.observation[0]["content"])
            turn = game.step(_first_listed(said[-1]))
        return said

    assert course(5) == course(5)
    assert len({tuple(course(seed)) for seed in range(6)}) > 1
    assert course(1)[0] == course(2)[0]  # the opening is the prompt's


def _first_listed(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("Legal moves: ")]
    return line.removeprefix("Legal moves: ").partition(", ")[0]


@pytest.mark.parametrize(
    "game", ["backgammon", "kuhn_poker", "othello", "chess", "dots_and_boxes(num_cols=3,num_rows=3)"]
)
def test_games_with_dice_hidden_cards_and_passes_are_played_to_their_end(game: str) -> None:
    task = build_task(
        schema.OpenSpielTask(games=[game], reward_mode="game", num_tasks_per_case=2, max_random_steps=2), 0
    )
    (prompt,) = task.batch(0, 1)
    made = spiel_maker(schema.OpenSpielTask(games=[game], reward_mode="game", answer="reply"))(prompt)
    turn, turns = made.start(3), []
    while not turn.done and len(turns) < 3000:
        turn = made.step(_first_listed(turn.observation[0]["content"]))
        turns.append(turn)
    assert turn.done
    assert 0.0 <= total(turns) <= 1.0
    assert total(turns) == turn.metrics["value"]


def test_search_does_not_lose_tic_tac_toe() -> None:
    """x begins in a corner and takes the first free cell; mcts answers."""
    game = game_of("tic_tac_toe", opponent="mcts", simulations=400)
    turn = game.start(2)
    while not turn.done:
        turn = game.step(_first_listed(turn.observation[0]["content"]))
    assert turn.metrics["value"] <= 0.5


def test_an_opponent_that_moves_wrongly_leaves_the_game_unscored(tmp_path: Path) -> None:
    settings = schema.OpenSpielTask(
        games=["tic"],
        reward_mode="game",
        num_tasks_per_case=2,
        max_random_steps=3,  # so that no game ends with the first move
        opponent=own(tmp_path, "wrong"),
    )
    task = build_task(settings, 0)
    assert isinstance(task, SpielGames)
    assert task.plays
    (prompt,) = task.batch(0, 1)
    runner = task.runner(prompt)
    assert runner is not None
    said: list[Turn | Fault] = []
    move = moves_of(state_at("tic_tac_toe", prompt.data["history"]))  # type: ignore[arg-type]
    runner.begin("x", prompt, 1)
    runner.step("x", f"<move>{next(iter(move))}</move>")
    while len(said) < 2:
        said += [answer for _, answer in runner.poll(5.0)]
    runner.close()
    assert isinstance(said[0], Turn)
    assert isinstance(said[1], Fault)
    assert "which is not legal" in said[1].why
    with pytest.raises(TaskError, match="has no nobody"):
        build_task(settings.model_copy(update={"opponent": own(tmp_path, "nobody")}), 0)


def test_games_are_played_through_the_engine(tiny_model_dir: Path) -> None:
    settings = schema.OpenSpielTask(
        games=["tic"], reward_mode="game", num_tasks_per_case=4, show_moves=False, reward_range="signed", answer="reply"
    )
    task = build_task(settings, 0)
    assert isinstance(task, SpielGames)
    prompts = task.batch(0, 2)
    found = play(engine_of(tiny_model_dir), chat_of(tiny_model_dir), task, prompts, budget=8)
    assert len(found) == 4
    for one in found.values():
        assert one.rollout.grade.reward == -1.0  # a random model says no legal move
        assert one.rollout.grade.metrics["tool_errors"] == 1.0
    single = build_task(schema.OpenSpielTask(games=["tic"], num_tasks_per_case=4), 0)
    assert isinstance(single, SpielStates)
    assert not single.plays
    assert not task.grade(prompts[0], "x").scored
