"""Names of games → cases, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pyspiel
import pytest
from pydantic import ValidationError

from lockstep.config import schema
from lockstep.envs.spiel.cases import BOARD, select
from lockstep.errors import TaskError

MISSING = """
import sys
sys.modules["pyspiel"] = None
from lockstep.config import schema
from lockstep.errors import TaskError
from lockstep.tasks.build import build_task
try:
    build_task(schema.OpenSpielTask(), 0)
except TaskError as error:
    print(error)
"""


def games(**settings: object) -> list[str]:
    return [case.game for case in select(schema.OpenSpielTask.model_validate(settings))]


def test_the_suite_is_eighteen_board_games_which_all_load_as_they_are_written() -> None:
    cases = select(schema.OpenSpielTask())
    assert [case.game for case in cases] == list(BOARD)
    assert len({case.name for case in cases}) == 18
    for case in cases:
        assert str(pyspiel.load_game(case.game)).removesuffix("()") == case.game


def test_a_name_stands_for_every_case_of_the_suite_that_begins_with_it() -> None:
    assert games(games=["hex"]) == ["hex(board_size=5)", "hex(board_size=7)", "hex(board_size=9)"]
    assert games(games=["go"]) == ["go(board_size=9)", "go(board_size=13)"]  # not gomoku, goofspiel, go_fish
    assert games(games=["che", "tic", "che"]) == ["chess", "checkers", "tic_tac_toe"]
    assert games(games=["c"]) == [game for game in BOARD if game.startswith("c")]


def test_other_games_are_named_in_full_or_by_a_beginning_of_their_own() -> None:
    assert games(games=["pentag"]) == ["pentago"]
    assert select(schema.OpenSpielTask(games=["connect_four(rows=5,columns=6)"]))[0].name == "connect_four-6x5"
    with pytest.raises(TaskError, match="the names of 3 games begin with it: dark_chess, dark_hex, dark_hex_ir"):
        games(games=["dark"])


def test_one_game_is_one_case_however_it_is_written() -> None:
    assert games(games=["hex", "hex(board_size=7)", "breakthrough(rows=6,columns=6)", "break"]) == [
        "hex(board_size=5)",
        "hex(board_size=7)",
        "hex(board_size=9)",
        "breakthrough(columns=6,rows=6)",
        "breakthrough(columns=8,rows=8)",
    ]


def test_names_that_would_be_alike_are_written_out() -> None:
    cases = select(schema.OpenSpielTask(games=["hex(num_cols=3,num_rows=4)", "clobber(columns=3,rows=4)"]))
    assert [case.name for case in cases] == ["hex-3x4", "clobber-3x4"]
    alike = ["hex(board_size=4)", "hex(num_rows=4)"]
    names = [case.name for case in select(schema.OpenSpielTask(games=alike))]
    assert names == ["hex-board_size-4", "hex-num_rows-4"]


def test_a_list_of_games_takes_its_parameters_from_game_configs() -> None:
    found = games(
        game_list=["hex", "tic_tac_toe", "leduc_poker"],
        game_configs={
            "hex": [{"board_size": 4}, {"num_rows": 3, "num_cols": 4}],
            "leduc_poker": [{"action_mapping": True}],
        },
    )
    assert found == [
        "hex(board_size=4)",
        "hex(num_cols=4,num_rows=3)",
        "tic_tac_toe",
        "leduc_poker(action_mapping=True)",
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["conect_four"], "no game whose name begins with 'conect_four'.*did you mean connect_four"),
        (["hexx(board_size=3)"], "Unknown game 'hexx'.*did you mean hex"),
        (["hex(size=3)"], "Unknown parameter 'size'"),
        (["hex("], "Missing closing bracket"),
        (["goofspiel"], "do not move one after the other"),
        (
            ["connect_four(rows=0)"],
            "cannot be played with these parameters: a process that tried it ended with status -11",
        ),
        (["hex(board_size=0)"], "cannot be played with these parameters"),
    ],
)
def test_what_cannot_be_played_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(TaskError, match=f"(?s){message}"):
        games(games=names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"games": ["hex"], "game_list": ["hex"]}, "set one of them"),
        ({"game_list": ["hex"], "game_configs": {"go": [{}]}}, "'go', which is not in game_list"),
        ({"games": [" "]}, "is not the name of a game"),
        ({"game_list": ["hex"], "game_configs": {"hex": [{"board_size": [3]}]}}, "board_size must be text"),
        ({"playouts": 3}, "playouts applies to reward_mode=outcome only, not to legal"),
        ({"reward_mode": "outcome", "opponent": "mcts"}, "opponent applies to reward_mode=game"),
    ],
)
def test_mistakes_of_the_recipe_are_seen_without_the_package(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        schema.OpenSpielTask.model_validate(settings)


def test_settings_survive_being_written_out_in_full() -> None:
    task = schema.OpenSpielTask(reward_mode="game", opponent="mcts")
    assert schema.OpenSpielTask.model_validate_json(task.model_dump_json()) == task


def test_a_missing_package_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    assert "open_spiel is not installed" in done.stdout
    assert "pip install 'lockstep-rl[envs]'" in done.stdout
