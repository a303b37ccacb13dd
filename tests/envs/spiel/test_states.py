"""States: every one different, none on both sides, the same in every process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pyspiel
import pytest

from lockstep.config import schema
from lockstep.envs.spiel.cases import BOARD
from lockstep.envs.spiel.states import draw, identity, state_at
from lockstep.envs.spiel.text import MARKS, mover
from lockstep.errors import TaskError
from lockstep.tasks.build import build_task
from lockstep.tasks.generator import Side
from lockstep.tasks.open_spiel import SpielStates
from lockstep.types import Prompt

PRINTED = """
from lockstep.config import schema
from lockstep.tasks.build import build_task
task = build_task(schema.OpenSpielTask(games=["hex", "chess", "tic"], num_tasks_per_case=20), 3)
print([(p.id, p.data["history"], p.messages) for p in (*task.batch(2, 9), *task.heldout("id_probe", 7))])
"""


def task_of(run_seed: int = 0, **settings: object) -> SpielStates:
    task = build_task(schema.OpenSpielTask.model_validate(settings), run_seed)
    assert isinstance(task, SpielStates)
    return task


def replayed(prompts: Sequence[Prompt]) -> list[tuple[str, str, int]]:
    """Each prompt's state as OpenSpiel writes it, made again from the moves in its data."""
    found = []
    for prompt in prompts:
        state = pyspiel.load_game(str(prompt.data["game"])).new_initial_state()
        for action in prompt.data["history"]:  # type: ignore[attr-defined]
            state.apply_action(action)
        assert not state.is_terminal()
        found.append((prompt.task, str(state), state.current_player()))
    return found


@pytest.mark.parametrize("game", BOARD)
def test_a_thousand_tasks_of_a_case_are_a_thousand_states_none_of_them_held_out(game: str) -> None:
    task = task_of(games=[game], num_tasks_per_case=1000)
    trained, held = replayed(task.batch(0, 1000)), replayed(task.heldout("id_probe", 100))
    assert len(set(trained)) == 1000
    assert len(set(held)) == 100
    assert not set(trained) & set(held)
    questions = [prompt.messages[0]["content"] for prompt in (*task.batch(0, 1000), *task.heldout("id_probe", 100))]
    assert len(set(questions)) == 1100


def boards_within(moves: int) -> set[tuple[str, int]]:
    """All boards of tic-tac-toe in which a game can go on, by brute force."""
    level, found = [pyspiel.load_game("tic_tac_toe").new_initial_state()], set()
    for _ in range(moves + 1):
        going_on = [state for state in level if not state.is_terminal()]
        found |= {(str(state), state.current_player()) for state in going_on}
        level = [state.child(action) for state in going_on for action in state.legal_actions()]
    return found


def test_a_case_with_too_few_states_is_refused_with_their_number() -> None:
    everything = boards_within(3)
    assert len(everything) == 1 + 9 + 72 + 252
    counts = {}
    for side in Side:
        found = draw("tic_tac_toe", "test", side, 1000, 3)
        assert found.complete
        counts[side] = len(found.histories)
        boards = {(str(s), s.current_player()) for s in (state_at("tic_tac_toe", h) for h in found.histories)}
        assert boards <= everything
        assert len(boards) == counts[side]
    assert sum(counts.values()) == len(everything)
    few = counts[Side.TRAIN]
    message = f"1000 states of this case are needed for training.* {few} different ones within 3 random moves"
    with pytest.raises(TaskError, match=f"(?s)case tic_tac_toe.*{message}.*num_tasks_per_case={few}"):
        task_of(games=["tic"], num_tasks_per_case=1000, max_random_steps=3).batch(0, 1)
    task = task_of(games=["tic"], num_tasks_per_case=few, max_random_steps=3)
    assert len(set(replayed(task.batch(0, few)))) == few  # every one of them, since draws alone would miss some
    with pytest.raises(TaskError, match=r"(?s)needed for evaluation.*eval\.items"):
        task.heldout("id_probe", 500)


def test_without_random_moves_a_case_is_one_state() -> None:
    with pytest.raises(TaskError, match=r"there are only [01] different ones within 0 random moves"):
        task_of(games=["chess"], max_random_steps=0).batch(0, 1)


def test_clocks_and_move_counts_do_not_make_another_state() -> None:
    there_and_back = ["Nf3", "Nf6", "Ng1", "Ng8"]
    state = pyspiel.load_game("chess").new_initial_state()
    for move in there_and_back:
        state.apply_action(state.string_to_action(move))
    assert str(state) != str(pyspiel.load_game("chess").new_initial_state())
    assert identity(state) == identity(pyspiel.load_game("chess").new_initial_state())


def test_prompts_say_board_side_and_every_legal_move() -> None:
    for prompt, (case, board, player) in zip(
        (asked := task_of(num_tasks_per_case=3).batch(0, 54)), replayed(asked), strict=True
    ):
        text = prompt.messages[0]["content"]
        state = state_at(str(prompt.data["game"]), prompt.data["history"])  # type: ignore[arg-type]
        assert f"Game: {case}\n" in text
        assert board.strip("\n").splitlines()[-1] in text
        assert f"(player {player + 1} of 2)" in text
        assert f"Legal moves: {', '.join(map(state.action_to_string, state.legal_actions()))}\n" in text
    plain = task_of(games=["connect"], num_tasks_per_case=3, show_moves=False).batch(0, 1)[0].messages[0]["content"]
    assert "Legal moves" not in plain


def test_sides_are_called_what_they_are_called_on_the_board() -> None:
    for game in BOARD:
        for prompt in task_of(games=[game], num_tasks_per_case=8).batch(0, 8):
            state = state_at(str(prompt.data["game"]), prompt.data["history"])  # type: ignore[arg-type]
            marks, player = MARKS[state.get_game().get_type().short_name], state.current_player()
            assert mover(state).startswith(marks[player])
            _check_mark(game.partition("(")[0], state, player)


def _check_mark(name: str, state: pyspiel.State, player: int) -> None:
    """What OpenSpiel itself says of the side to move, in each game's own way."""
    moves = [state.action_to_string(action) for action in state.legal_actions()]
    mark = MARKS[name][player]
    match name:
        case "tic_tac_toe" | "connect_four" | "dots_and_boxes" | "go":
            assert all(move.startswith(mark.partition(",")[0]) for move in moves)
        case "chess":
            assert str(state).split()[1] == mark[0]
        case "othello":
            assert f"({mark}) to play" in str(state)
        case "hex":
            assert Counter(str(state.child(state.legal_actions()[0])))[mark] == Counter(str(state))[mark] + 1
        case _:  # pieces stand where moves begin
            rows = {line[0]: line[1:] for line in str(state).splitlines() if re.match(r"\d", line)}
            pieces = {rows[move[1]]["abcdefgh".index(move[0])] for move in moves}
            assert pieces <= ({mark, "8", "*"} if name == "checkers" else {mark})


def test_steps_are_pure_and_a_pass_asks_every_state_once() -> None:
    settings = {"games": ["hex", "othello"], "num_tasks_per_case": 15}
    one, two = task_of(7, **settings), task_of(7, **settings)
    later = two.batch(4, 10)
    steps = [one.batch(step, 10) for step in range(6)]
    assert list(steps[4]) == list(later)
    ids = [prompt.id for step in steps for prompt in step]
    assert len(set(ids)) == 60
    assert ids != [prompt.id for step in range(6) for prompt in task_of(8, **settings).batch(step, 10)]
    assert sorted(ids) == sorted(p.id for step in range(6) for p in task_of(8, **settings).batch(step, 10))


def test_held_out_states_are_those_of_every_run_and_as_many_of_each_case() -> None:
    one = task_of(0, games=["hex", "chess"], num_tasks_per_case=5).heldout("id_probe", 10)
    other = task_of(9, games=["hex", "chess"], num_tasks_per_case=7, seed=4).heldout("id_probe", 10)
    assert list(one) == list(other)
    assert set(Counter(prompt.task for prompt in one).values()) == {2, 3}
    assert list(other[:6]) == list(task_of(games=["hex", "chess"]).heldout("id_probe", 6))
    with pytest.raises(TaskError, match="no held-out questions for sanity"):
        task_of(games=["hex"]).heldout("sanity", 1)


def test_another_process_draws_the_same_states() -> None:
    done = [
        subprocess.run(
            [sys.executable, "-c", PRINTED],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": number, "PATH": ""},
        )
        for number in ("1", "2")
    ]
    assert done[0].stdout == done[1].stdout
    assert done[0].stdout.count("Game: ") == 16


def test_dice_are_rolled_before_a_state_is_asked_for() -> None:
    prompts = task_of(games=["backgammon"], num_tasks_per_case=20, max_random_steps=4).batch(0, 20)
    assert len(set(replayed(prompts))) == 20
    assert all("Dice" in prompt.messages[0]["content"] for prompt in prompts)


def test_hidden_cards_are_not_shown() -> None:
    task = task_of(games=["kuhn_poker"], num_tasks_per_case=3, max_random_steps=2)
    for prompt in task.batch(0, 3):
        state = state_at("kuhn_poker", prompt.data["history"])  # type: ignore[arg-type]
        board = prompt.messages[0]["content"].splitlines()[1]
        assert board == state.information_state_string(state.current_player())
        assert board != str(state)
    with pytest.raises(TaskError, match="hidden information"):
        task_of(games=["kuhn_poker"], reward_mode="outcome", playout="mcts")
