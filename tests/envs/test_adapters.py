"""Games and environments of other packages, played through the processes that runs use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import schema
from lockstep.envs.gym_text import gym_maker
from lockstep.envs.runners import Fault, Runner
from lockstep.errors import TaskError
from lockstep.tasks.build import build_task
from lockstep.tasks.multi_turn import Guessing, SeededEpisodes
from lockstep.types import Prompt, Turn
from tests.envs.played import OWN

GYM = Path(__file__).with_name("gym_env.py")


def episodes(settings: schema.Task) -> SeededEpisodes:
    task = build_task(settings, 0)
    assert isinstance(task, SeededEpisodes)
    return task


def played(task: SeededEpisodes | Guessing, prompt: Prompt, replies: list[str]) -> list[Turn | Fault]:
    runner: Runner | None = task.runner(prompt)
    assert runner is not None
    runner.begin("x", prompt, 1)
    said = []
    for reply in [None, *replies]:
        if reply is not None:
            runner.step("x", reply)
        while not (answers := runner.poll(1.0)):
            pass
        said.append(answers[0][1])
    runner.end("x")
    return said[1:]


def turn(found: Turn | Fault) -> Turn:
    assert isinstance(found, Turn), found
    return found


def test_frozen_lake_is_played_by_words() -> None:
    task = episodes(
        schema.GymnasiumTask(
            env="FrozenLake-v1",
            settings={"render_mode": "ansi", "is_slippery": False},
            actions=["left", "down", "right", "up"],
            instructions="Reach G.",
            seeds=4,
        )
    )
    (prompt,) = task.batch(0, 1)
    assert prompt.messages[0]["content"].startswith("Reach G.")
    assert "*S*FFF" in prompt.messages[0]["content"]
    bad, *_, last = [
        turn(t) for t in played(task, prompt, ["jump!", "go down", "down", "right", "right", "down", "Right."])
    ]
    assert bad.observation[0]["content"] == "That is no action. Actions: left, down, right, up."
    assert (last.done, last.reward, last.metrics["correct"], last.extracted) == (True, 1.0, 1.0, "right")
    assert {p.id for p in task.batch(0, 4)}.isdisjoint(p.id for p in task.heldout("id_probe", 4))


@pytest.mark.parametrize(
    ("reply", "action"), [("I go northeast.", 2), ("north, then east", 1), ("Northeast? No: east", 1), ("north", 0)]
)
def test_the_last_named_action_counts_also_where_one_name_ends_another(reply: str, action: int) -> None:
    names = ["north", "east", "northeast", "stay"]
    env = gym_maker(schema.GymnasiumTask(env=f"{GYM}:Compass", actions=names))()
    env.start(0)
    said = env.step(reply)
    assert (said.reward, said.extracted) == (action, names[action])


def test_an_environment_of_text_is_played_as_it_is() -> None:
    task = episodes(schema.GymnasiumTask(env=f"{GYM}:Echo", settings={"words": 2}, seeds=4))
    (prompt,) = task.batch(0, 1)
    word = prompt.messages[0]["content"].removeprefix("Say ")
    again, no_text, right = [turn(t) for t in played(task, prompt, ["zz", "7!", f" {word}\n"])]
    assert again.observation[0]["content"] == "again"
    assert no_text.metrics == {"tool_errors": 1.0}
    assert (right.done, right.reward) == (True, 1.0)
    held, asked = (
        {p.messages[0]["content"] for p in prompts} for prompts in (task.heldout("id_probe", 2), task.batch(0, 4))
    )
    assert held.isdisjoint(asked)  # openings differ, so that none is on both sides


@pytest.mark.parametrize(
    ("name", "why"),
    [("Picture", "cannot read as text"), ("Motor", "only Text or Discrete actions"), ("Nothing", "has no Nothing")],
)
def test_what_cannot_be_said_in_words_is_refused(name: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        build_task(schema.GymnasiumTask(env=f"{GYM}:{name}"), 0)
    with pytest.raises(TaskError):
        build_task(schema.GymnasiumTask(env="NoSuchThing-v9"), 0)


def test_a_game_alone() -> None:
    task = episodes(schema.TextArenaTask(game="GuessTheNumber-v0", seeds=4))
    (prompt,) = task.batch(0, 1)
    assert "between 1 and 20" in prompt.messages[0]["content"]
    turns = [turn(t) for t in played(task, prompt, ["[7]"] * 2)]
    assert (
        "higher" in turns[0].observation[0]["content"] or "lower" in turns[0].observation[0]["content"] or turns[0].done
    )
    assert "between 1 and 20" not in turns[0].observation[0]["content"]  # only what is new is said


def test_a_game_against_a_random_opponent_is_the_same_each_time() -> None:
    task = episodes(schema.TextArenaTask(game="TicTacToe-v0", seeds=4))
    one, other = task.batch(0, 2)
    moves = ["[4]", "[0]", "[2]"]
    first = played(task, one, moves[:1])
    assert first == played(task, one, moves[:1])
    assert "Player 1 placed" in turn(first[0]).observation[0]["content"]
    ends = [turn(t) for p in (one, other) for t in played(task, p, ["[9]", "[9]", "[9]"])]
    assert any(t.done and t.reward == -1.0 and t.metrics["tool_errors"] == 1.0 for t in ends)  # no such square


def test_a_scripted_opponent_and_the_second_seat(tmp_path: Path) -> None:
    script = tmp_path / "opponent.py"
    script.write_text(
        "def first_free(text, numbers):\n    import re\n    return re.findall(r\"'(\\[\\d\\])'\", text)[-9:][0]\n"
    )
    task = episodes(schema.TextArenaTask(game="TicTacToe-v0", seeds=2, seat=1, opponent=f"{script}:first_free"))
    assert "placed their symbol (O) in cell 0" in task.batch(0, 1)[0].messages[0]["content"]


def test_games_that_are_not_there_are_refused_with_the_nearest() -> None:
    with pytest.raises(TaskError, match="TicTacToe-v0"):
        build_task(schema.TextArenaTask(game="TicTacTo-v0"), 0)
    with pytest.raises(TaskError, match="started with neither one nor two players"):
        build_task(schema.TextArenaTask(game="ThreePlayerTicTacToe-v0"), 0)


def test_guessing_splits_the_numbers() -> None:
    task = build_task(schema.GuessNumberTask(low=1, high=10, progress=0.5), 0)
    assert isinstance(task, Guessing)
    asked, held = ({p.answer for p in prompts} for prompts in (task.batch(0, 5), task.heldout("id_probe", 5)))
    assert asked | held == {str(n) for n in range(1, 11)}
    prompt = next(p for p in (*task.batch(0, 5), *task.heldout("id_probe", 5)) if p.answer == "4")
    low, high, found = [turn(t) for t in played(task, prompt, ["is it 2?", "9", "4"])]
    assert [t.observation[0]["content"] for t in (low, high)] == ["higher", "lower"]
    assert low.reward == pytest.approx(0.5 * 2 / 9)  # 3 … 10 are left: 2 of the 9 steps are gone
    assert high.reward == pytest.approx(0.5 * 2 / 9)  # 3 … 8
    assert low.reward + high.reward + found.reward == pytest.approx(1.0)  # type: ignore[operator]
    assert found.done
    with pytest.raises(TaskError, match=r"eval\.items=5"):
        task.heldout("id_probe", 6)


def test_classes_that_are_no_environments_are_refused() -> None:
    for name, why in (("NoStep", "no method step"), ("look_up", "not a class"), ("Absent", "has no Absent")):
        with pytest.raises(TaskError, match=why):
            build_task(schema.EnvTask(path=f"{OWN}:{name}"), 0)
    with pytest.raises(TaskError, match=r"the call with the settings .* failed"):
        build_task(schema.EnvTask(path=f"{OWN}:Counter", settings={"colour": "red"}), 0)
