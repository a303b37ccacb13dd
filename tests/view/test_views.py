"""The answers behind the views: curves, one rollout, groups, the funnel, settings, scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.schema import Model
from lockstep.errors import RunDirectoryError
from lockstep.evaluation.records import score_path, write_score
from lockstep.models.load import load_tokenizer
from lockstep.models.resolve import resolve
from lockstep.report.data import page_data
from lockstep.track.rollouts import read_rollouts, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Group
from lockstep.view.api import Viewer
from lockstep.view.runs import open_runs
from lockstep.view.tokens import pieces, stretches
from tests.evaluation.scores import score
from tests.track.runs import FACTS, finished_run
from tests.view.conftest import prompt, reply


def test_the_funnel_counts_every_reply_once_and_names_each_loss(viewer: Viewer) -> None:
    found = viewer.funnel({"first": "2", "last": "3"})
    stages = {stage.name: (stage.count, {loss.reason: loss.count for loss in stage.lost}) for stage in found.stages}
    assert stages["asked for"] == (16, {})
    assert stages["generated"] == (14, {"the reply is empty": 2})
    assert stages["scored"] == (12, {"timed out": 2})
    assert stages["with an advantage"][0] == 6
    assert sorted(stages["with an advantage"][1].values()) == [2, 4]
    assert "cut off at the token budget, mean advantage 0" in stages["with an advantage"][1]
    assert {one.label: one.y for one in found.by_step.series}["with an advantage"] == (3.0, 3.0)


def test_a_reply_that_is_cut_off_has_no_advantage_for_its_reward_if_that_is_the_mean(tmp_path: Path) -> None:
    """A budget alone takes no advantage away: the first reply's is 0 because its reward is the group's mean."""
    one = prompt("a")
    replies = tuple(reply(one, i, "so", reward, cut=True) for i, reward in enumerate((0.5, 0.0, 1.0)))
    with RunDirectory.create(tmp_path / "demo", "name: demo\n", FACTS) as run:
        write_rollouts(run, 1, [Group(one, replies)], [[0.0, -1.0, 1.0]])
    viewer = Viewer([tmp_path / "demo"])
    viewer.index.refresh()
    (loss,) = viewer.funnel({}).stages[-1].lost
    viewer.close()
    assert loss.reason.startswith("mean advantage 0: reward equal to the baseline")


def test_one_rollout_has_its_tokens_and_their_log_probabilities(
    viewer: Viewer, run: RunDirectory, tiny_model_dir: Path
) -> None:
    found = viewer.rollout({"step": "2", "row": "1"})
    row = read_rollouts(run, 2)[1]
    tokenizer = load_tokenizer(resolve(Model(path=str(tiny_model_dir))))
    (stretch,) = found["stretches"]
    assert stretch.sampled
    assert stretch.logprobs == row.logprobs
    assert "".join(stretch.pieces) == tokenizer.decode(row.ids, skip_special_tokens=False)
    assert found["seen"] == tokenizer.decode(row.prompt_ids, skip_special_tokens=False)
    assert (found["is_right"], found["advantage"], found["extracted"]) == (False, -0.7, "8")


def test_an_episode_is_split_into_what_was_sampled_and_what_was_told(run: RunDirectory) -> None:
    one = prompt("game")
    with RunDirectory.resume(run.path, FACTS) as writable:
        episode = reply(one, 0, "a b c", 1.0, length=5, trained=(True, True, False, False, True))
        write_rollouts(writable, 4, [Group(one, (episode,))], [[1.0]])
    (row,) = read_rollouts(run, 4)
    found = stretches(row, lambda ids: "".join(f"<{i}>" for i in ids))
    assert [(part.sampled, "".join(part.pieces)) for part in found] == [
        (True, "<5><6>"),
        (False, "<7><8>"),
        (True, "<9>"),
    ]
    assert [len(part.logprobs) for part in found] == [2, 2, 1]


def test_pieces_of_a_character_stand_with_its_last_byte() -> None:
    symbols = "a€😀b".encode()
    ids = list(range(len(symbols)))
    texts = pieces(ids, lambda some: bytes(symbols[i] for i in some).decode("utf-8", "replace"))
    assert texts == ["a", "", "", "€", "", "", "", "😀", "b"]


def test_without_a_tokenizer_the_text_is_still_shown(tmp_path: Path) -> None:
    recipe = f"name: demo\nmodel: {{path: {tmp_path}/gone}}\n"
    with RunDirectory.create(tmp_path / "demo", recipe, FACTS) as run:
        write_rollouts(run, 1, [Group(prompt("a"), (reply(prompt("a"), 0, "hello", 1.0),))], [[0.0]])
    found = Viewer([tmp_path / "demo"]).rollout({"step": "1", "row": "0"})
    assert found["text"] == "hello"
    assert "stretches" not in found
    assert "the run's tokenizer cannot be read" in found["problem"]


def test_a_recipe_cannot_make_the_page_run_code(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A stranger's run may trust the code of its model's folder; this page does not."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    recipe = f"name: demo\nmodel: {{path: {folder}, trust_remote_code: true}}\n"
    with RunDirectory.create(tmp_path / "demo", recipe, FACTS) as run:
        write_rollouts(run, 1, [Group(prompt("a"), (reply(prompt("a"), 0, "hello", 1.0),))], [[0.0]])
    assert "stretches" in Viewer([tmp_path / "demo"]).rollout({"step": "1", "row": "0"})
    assert not (tmp_path / "owned").exists()


def test_a_group_has_all_samples_of_a_prompt_in_a_step(viewer: Viewer) -> None:
    rows = viewer.group({"step": "3", "prompt": "c3"})
    assert [(row["sample"], row["reward"], row["advantage"]) for row in rows] == [
        (0, 0.0, 0.0), (1, 0.5, 0.5), (2, None, 0.0), (3, 0.0, 0.0),
    ]  # fmt: skip
    assert viewer.group({"step": "3", "prompt": "c2"}) == []


def test_curves_and_any_metric_have_help_and_a_range(viewer: Viewer) -> None:
    found = viewer.curves({})
    assert {"Reward", "Time of a step by phase"} <= {figure.title for figure in found["figures"]}
    (norm,) = viewer.metrics({"text": "GRAD/norm"})["figures"]
    assert norm.series[0].x == (1, 2, 3, 4)
    assert norm.healthy == (0.0, 100.0)
    assert "Healthy: > 0 and ≤ 100" in norm.help
    with viewer.runs[0].run.recipe_path.open("a") as recipe:
        recipe.write("health: {ranges: {grad/norm: {high: 2}}}\n")
    (norm,) = Viewer([viewer.runs[0].run.path]).metrics({"text": "grad/norm"})["figures"]
    assert (norm.healthy, "Healthy: ≤ 2 (health.ranges)" in norm.help) == ((None, 2.0), True)


def test_settings_of_two_runs_differ_where_they_do(tmp_path: Path) -> None:
    for name, more in (("a", "steps: 3\n"), ("b", "steps: 4\noptimizer: {lr: 0.1}\n")):
        RunDirectory.create(tmp_path / name, f"name: {name}\n{more}", {**FACTS, "threads": len(more)}).close()
    found = {one.path: one for one in Viewer([tmp_path / "a", tmp_path / "b"]).settings({"other": "1"}) if not one.same}
    assert set(found) == {"name", "steps", "optimizer.lr", "threads"}
    assert (found["steps"].first, found["steps"].second) == ("3", "4")
    assert "steps" in found["steps"].help
    assert found["optimizer.lr"].first == "–"


def test_scores_are_compared_item_by_item(tmp_path: Path) -> None:
    finished_run(tmp_path / "a", steps=13)
    finished_run(tmp_path / "b", steps=13)
    write_score(score_path(tmp_path / "b", 13, "greedy"), score([True] * 40, weights="c" * 16, step=13))
    viewer = Viewer([tmp_path / "a", tmp_path / "b"])
    base = viewer.scores({})["comparison"]
    assert base["rows"][0][5].startswith("+45.0")
    between = viewer.compare({"run": "0", "other": "1"})
    assert between["columns"][3:5] == ["a", "b"]
    assert between["rows"][0][5].startswith("+30.0")
    assert between["rows"][0][-1] == "improved"
    assert between["rows"][1][-1] == "no effect shown"


def test_scores_that_may_not_be_compared_are_said(tmp_path: Path, viewer: Viewer) -> None:
    finished_run(tmp_path / "a", steps=13)
    both = Viewer([tmp_path / "a", viewer.runs[0].run.path])
    (note,) = both.compare({"run": "0", "other": "1"})["notes"]
    assert "there are no scores" in note
    assert "\n" not in note


def test_the_same_run_twice_is_refused_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        RunDirectory.create(tmp_path / folder / "a", "name: a\n", FACTS).close()
    assert [one.label for one in open_runs([tmp_path / "x" / "a", tmp_path / "y" / "a"])] == ["x/a", "y/a"]
    with pytest.raises(RunDirectoryError, match="given twice"):
        open_runs([tmp_path / "x" / "a", tmp_path / "x" / ".." / "x" / "a"])


def test_data_of_a_page_are_strict_json() -> None:
    found = page_data({"a\x1b": [float("nan"), "\u202ex", (1, None)], "b": float("-inf")})
    assert found == {"a\\x1b": [None, "\\u202ex", [1, None]], "b": None}
    with pytest.raises(TypeError):
        page_data(object())
