from __future__ import annotations

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.track.rollouts import RolloutRow, read_rollouts, rollout_path, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Group
from lockstep.view import api, index
from lockstep.view.api import Viewer
from lockstep.view.index import Index
from lockstep.view.query import Query
from tests.track.runs import FACTS
from tests.view.conftest import groups, prompt, reply, write

BY_HAND = [
    ({}, lambda row: True),
    ({"result": "right"}, lambda row: row.right is True),
    ({"result": "wrong"}, lambda row: row.right is False),
    ({"result": "unscored"}, lambda row: row.right is None),
    ({"answer": "none"}, lambda row: row.extracted is None),
    ({"answer": "found", "result": "wrong"}, lambda row: row.extracted is not None and row.right is False),
    ({"finish": "length"}, lambda row: row.finish == "length"),
    ({"reward_min": 0.5, "reward_max": 0.9}, lambda row: row.reward is not None and 0.5 <= row.reward <= 0.9),
    ({"length_min": 3, "length_max": 9}, lambda row: 3 <= len(row.ids) <= 9),
    ({"text": "ärger"}, lambda row: "ärger" in f"{row.text} {row.messages[0]['content']}".lower()),
    ({"text": "boxed{7}"}, lambda row: "boxed{7}" in row.text),
    ({"text": "%"}, lambda row: False),
    ({"prompt": "a2"}, lambda row: row.prompt_id == "a2"),
    ({"prompt": "' OR 1=1 --"}, lambda row: False),
]  # fmt: skip


def rows_of(run: RunDirectory, last: int = 4) -> list[tuple[int, int, RolloutRow]]:
    return [(s, i, row) for s in range(last, 0, -1) for i, row in enumerate(read_rollouts(run, s))]


@pytest.mark.parametrize(("given", "fits"), BY_HAND, ids=[str(given) for given, _ in BY_HAND])
def test_a_filter_finds_the_rows_that_fit(viewer: Viewer, run: RunDirectory, given: dict, fits) -> None:
    expected = [(step, place, row) for step, place, row in rows_of(run) if fits(row)]
    found = viewer.rollouts({name: str(value) for name, value in given.items()} | {"limit": "500"})
    assert [(row["step"], row["row"]) for row in found["rows"]] == [(step, place) for step, place, _ in expected]
    assert found["total"] == len(expected)
    assert found["right"] == sum(row.right is True for *_, row in expected)
    assert found["unscored"] == sum(row.right is None for *_, row in expected)


def test_pages_follow_each_other_in_every_order(viewer: Viewer, run: RunDirectory) -> None:
    for order in ("newest", "oldest", "reward", "worst", "advantage", "longest", "shortest"):
        pages = [viewer.rollouts({"order": order, "limit": "7", "offset": str(at)})["rows"] for at in range(0, 32, 7)]
        places = [(row["step"], row["row"]) for page in pages for row in page]
        assert sorted(places) == sorted((step, place) for step, place, _ in rows_of(run))
    lengths = [row["length"] for row in viewer.rollouts({"order": "longest"})["rows"]]
    assert lengths == sorted(lengths, reverse=True)


def test_steps_are_found_while_a_run_trains_and_those_of_a_lost_attempt_are_not(
    run: RunDirectory, viewer: Viewer
) -> None:
    total = viewer.rollouts({})["total"]
    with RunDirectory.resume(run.path, FACTS) as again:
        write(again, range(3, 4))  # step 4 belonged to weights that are gone, step 3 was sampled again
        one, advantages = groups(3)
        write_rollouts(again, 3, one[:1], advantages[:1])
        assert viewer.index.refresh()
        assert not viewer.index.refresh()
        assert viewer.rollouts({"limit": "500"})["total"] == total / 2 + 2
        write(again, range(4, 6))
        assert viewer.index.refresh()
    assert {row["step"] for row in viewer.rollouts({"limit": "500"})["rows"]} == {1, 2, 3, 4, 5}


def test_a_damaged_file_is_said_and_the_rest_is_shown(run: RunDirectory, viewer: Viewer) -> None:
    path = rollout_path(run, 2)
    path.write_bytes(path.read_bytes()[:-40])
    viewer.index.refresh()
    (state,) = viewer.state({})["runs"]
    assert "step_000002.parquet" in state["notes"][0]
    assert {row["step"] for row in viewer.rollouts({"limit": "500"})["rows"]} == {1, 3, 4}
    path.unlink()
    viewer.index.refresh()
    assert viewer.state({})["runs"][0]["notes"] == []


@pytest.mark.parametrize(
    "given", [{"result": "maybe"}, {"limit": "0"}, {"limit": "9999"}, {"reward_min": "nan"}, {"sql": "1"}, {"run": "7"}]
)
def test_other_questions_are_refused(viewer: Viewer, given: dict[str, str]) -> None:
    with pytest.raises(RunDirectoryError):
        viewer.rollouts(given)


def test_no_value_becomes_sql() -> None:
    text, values = Query(prompt="'; DROP TABLE rollouts; --", text="x' OR '1").where(3)
    assert "DROP" not in text
    assert "OR" not in text.replace("OR REPLACE", "")
    assert len(values) == text.count("?")


def test_looking_rests_in_proportion_to_what_it_took(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a page that follows a run takes less than a hundredth of a core, however long the run is."""
    viewer.state({})
    assert viewer.state({})["pause"] == api.PAUSE_S
    viewer.spend(0.05)
    assert viewer.state({})["pause"] == pytest.approx(0.05 * api.REST)
    assert api.REST > 100
    viewer.spend(10.0)
    assert viewer.state({})["pause"] == api.LONGEST_S
    assert viewer.state({})["pause"] == api.PAUSE_S


def test_files_are_only_looked_at_if_their_folder_has_changed(
    viewer: Viewer, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "SETTLED_NS", -1)
    viewer.index.refresh()
    looked: list[RunDirectory] = []
    monkeypatch.setattr(index, "rollout_steps", lambda one: looked.append(one) or [1, 2, 3, 4])
    assert not viewer.index.refresh()
    assert looked == []
    (run.rollouts_path / "new").touch()
    assert not viewer.index.refresh()
    assert len(looked) == 1


@pytest.mark.parametrize("text", ["ΟΔΟΣ", "οδοσ", "İSTANBUL", "istanbul"])
def test_upper_and_lower_case_are_the_same_in_every_script(run: RunDirectory, text: str) -> None:
    asked = prompt("greek")
    with RunDirectory.resume(run.path, FACTS) as again:
        write_rollouts(again, 1, [Group(asked, (reply(asked, 0, "Η ΟΔΟΣ, İSTANBUL", 1.0),))], [[0.0]])
    found = Index([run])
    found.refresh()
    assert found.browse(Query(text=text), None)["total"] == 1
    found.close()
