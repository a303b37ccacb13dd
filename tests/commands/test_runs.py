"""`lockstep runs`: what is there, what it is called, what may go."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config.text import value_at
from lockstep.evaluation.records import read_score, write_score
from lockstep.scoring.notes import write_note
from lockstep.track.listing import list_runs
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from tests.gallery import Gallery


@pytest.fixture
def runs(gallery: Gallery, tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    gallery.copy("lora", folder / "scored")
    gallery.copy("plain", folder / "plain")
    RunDirectory.create(folder / "begun", "steps: 5\n", {"time": "2030-01-01T00:00:00Z"}).close()
    shutil.copytree(folder / "plain", folder / "broken")
    (folder / "broken" / "metrics.jsonl").write_text("no JSON\n{}\n")
    (folder / "no run").mkdir()
    return folder


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["runs", *words, "--dir", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_list_has_state_steps_reward_and_best_score(runs: Path, capsys: pytest.CaptureFixture[str]):
    rows = {one.path.name: one for one in list_runs(runs)}
    assert next(iter(rows)) == "begun"  # the newest first
    assert {name: one.state for name, one in rows.items()} == {
        "begun": "never began", "broken": "unreadable", "plain": "finished", "scored": "finished",
    }  # fmt: skip
    metrics = read_metrics(RunDirectory.open(runs / "scored"))
    accuracies = {
        row.step: row.metrics["eval/greedy/accuracy"] for row in metrics if "eval/greedy/accuracy" in row.metrics
    }
    best = max(accuracies.values())
    assert rows["scored"].reward == metrics[-1].metrics["reward/mean"]
    assert rows["scored"].best == ("greedy", best, min(step for step, value in accuracies.items() if value == best))
    lines = listed(runs, capsys)
    line = next(line for line in lines if line.startswith("scored"))
    assert line.split()[1:4] == ["finished", "3/3", f"{metrics[-1].metrics['reward/mean']:.3f}"]
    assert any(line.startswith("broken: the line is not a JSON object") for line in lines)


def test_filters_tags_and_the_archive_narrow_the_list(runs: Path, capsys: pytest.CaptureFixture[str]):
    def names(*words: str) -> set[str]:
        table = listed(runs, capsys, *words)[2:]
        return {line.split()[0] for line in table if line and ":" not in line.split()[0]} & {
            one.name for one in runs.iterdir()
        }

    assert names("--filter", "adapter=lora") == {"scored"}
    assert names("--filter", "finished", "--filter", "steps=3") == {"scored", "plain"}
    assert cli.main(["runs", "--filter", "adapter=lora", "list", "--filter", "finished", "--dir", str(runs)]) == 0
    assert "plain" not in capsys.readouterr().out  # a filter before the action counts, too
    precise = value_at(RunDirectory.open(runs / "plain").settings(), "optimizer.lr")
    recipe = runs / "plain" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"lr: {precise}", "lr: 1.2345678e-05"))
    assert names("--filter", "optimizer.lr=1.2345678e-5") == {"plain"}
    assert names("--filter", "optimizer.lr=1.23457e-5") == set()
    assert names("--filter", "steps=3.0e0") == names("--filter", "steps=3")
    assert names("--filter", "noise=null", "--filter", "adapter=lora") == {"scored"}
    assert "no run has a setting nothing;" in "".join(listed(runs, capsys, "--filter", "nothing=null"))
    assert "no run has a setting tag; names, states and tags" in "".join(listed(runs, capsys, "--filter", "tag=good"))
    assert "tags good, small" in listed(runs, capsys, "tag", "plain", "good", "small")[0]
    assert names("--filter", "small") == {"plain"}
    listed(runs, capsys, "untag", "plain", "small")
    assert names("--filter", "good") == {"plain"}
    recipe.write_text(recipe.read_text().replace("tags: []", "tags: [first]"))
    assert "first: given by the run's recipe" in listed(runs, capsys, "untag", "plain", "first")[1]
    listed(runs, capsys, "archive", "plain")
    assert "plain" not in names()
    assert "plain" in names("--all")
    assert RunDirectory.open(runs / "plain").attempt == 1  # nothing else changed
    listed(runs, capsys, "unarchive", "plain")
    assert "plain" in names()


@pytest.mark.parametrize(
    ("file", "content"),
    [("checkpoints.json", '{"run": 1}'), ("recipe.yaml", "track: hello\n"), ("manifest.json", '"tags": 5')],
)
def test_a_damaged_run_hides_no_other(runs: Path, capsys: pytest.CaptureFixture[str], file: str, content: str):
    path = runs / "plain" / file
    if file == "manifest.json":
        content = path.read_text().replace('"format": 1', f'"format": 1, {content}')
    path.write_text(content)
    assert {line.split()[0] for line in listed(runs, capsys)[2:6]} == {"begun", "broken", "plain", "scored"}


def test_the_best_known_score_is_over_all_runs(runs: Path, capsys: pytest.CaptureFixture[str]):
    lines = listed(runs, capsys, "best")
    greedy = next(line for line in lines if " greedy " in line)
    scores = (row.metrics.get("eval/greedy/accuracy") for row in read_metrics(RunDirectory.open(runs / "scored")))
    assert f"{100 * max(value for value in scores if value is not None):.1f} %" in greedy
    assert "lora at step" in greedy


def test_gc_says_what_it_would_remove_and_then_removes_it(runs: Path, capsys: pytest.CaptureFixture[str]):
    listed(runs, capsys, "archive", "scored")
    folder = runs / "scored" / "checkpoints"
    saved = sorted(path.name for path in folder.iterdir())
    assert len(saved) == 3
    damaged = shutil.copytree(folder / saved[-1], folder / "step_000099")
    next(damaged.glob("*.safetensors")).write_bytes(b"cut off")
    assert "nothing to remove" in listed(runs, capsys, "gc", "--yes", "--filter", "plain")[0]
    would = listed(runs, capsys, "gc")
    assert sum(line.startswith("would remove") for line in would) == 3
    assert (runs / "begun").exists()
    with RunDirectory.resume(runs / "scored", {}):  # a process writes there: left alone
        assert listed(runs, capsys, "gc", "--yes")[-1] == "0.0 MiB"  # what is left does not count
        assert not (runs / "begun").exists()
        assert len(list(folder.iterdir())) == 4
    listed(runs, capsys, "gc", "--yes")
    assert sorted(path.name for path in folder.iterdir()) == [saved[-1], damaged.name]  # the newest that is whole stays
    assert "nothing to remove" in listed(runs, capsys, "gc")[0]


def test_a_note_is_filled_in_again_and_leaves_your_text(runs: Path, capsys: pytest.CaptureFixture[str]):
    listed(runs, capsys, "note", "scored", "plain")
    notes = runs / "NOTES.md"
    text = notes.read_text()
    rewards = [row.metrics["reward/mean"] for row in read_metrics(RunDirectory.open(runs / "scored"))[1:]]
    first = next(line for line in text.splitlines() if line.strip().startswith("1-3"))
    assert f"{sum(rewards) / 3:.4g}" in first
    assert "no effect shown" in text
    assert "no comparison of scores" in text  # plain was not evaluated
    notes.write_text(text.replace("Learnt: \n", "Learnt: a tiny model is tiny.\n").replace("reward/mean", "x-y"))
    listed(runs, capsys, "note", "scored")
    again = notes.read_text()
    assert again.count("Learnt: a tiny model is tiny.") == 2
    assert again.count("## scored") == 1
    assert again.count("x-y") == 1  # plain's entry alone is as it was


def test_a_note_says_that_scores_of_other_items_are_not_compared(runs: Path, capsys: pytest.CaptureFixture[str]):
    path = sorted((runs / "scored" / "scores").glob("step_*_greedy.json"))[-1]
    score = read_score(path)
    write_score(path, replace(score, conditions=replace(score.conditions, data_hash="of other items")))
    listed(runs, capsys, "note", "scored")
    assert "no comparison of scores: the conditions differ" in (runs / "NOTES.md").read_text()


def test_a_note_waits_for_that_of_another_command(runs: Path) -> None:
    folder, notes = os.open(runs, os.O_RDONLY), runs / "NOTES.md"
    fcntl.flock(folder, fcntl.LOCK_EX)
    writing = threading.Thread(target=write_note, args=(RunDirectory.open(runs / "plain"),))
    writing.start()
    writing.join(1.0)
    assert not notes.exists()
    notes.write_text("# Notes\n\n## other\n")
    os.close(folder)
    writing.join()
    assert {"## other", "## plain"} <= set(notes.read_text().splitlines())


def test_notes_that_are_not_utf_8_are_refused_and_stay(runs: Path, capsys: pytest.CaptureFixture[str]):
    (runs / "NOTES.md").write_bytes(own := "# Notes of a café\n".encode("latin-1"))
    assert cli.main(["runs", "note", "plain", "--dir", str(runs)]) == 6
    assert "the notes are not UTF-8 at byte 16" in capsys.readouterr().err
    assert (runs / "NOTES.md").read_bytes() == own


def test_wrong_uses_are_told(runs: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["tag", "plain"], ["archive"], ["note"], ["list", "plain"]):
        assert cli.main(["runs", *words, "--dir", str(runs)]) == 2
    assert cli.main(["runs", "archive", "nothing", "--dir", str(runs)]) != 0
    assert "no such run directory" in capsys.readouterr().err
    assert (
        cli.main(["runs", "--dir", str(runs), "--filter", "lora", "archive", "scored"]) == 0
    )  # options may come first
    assert cli.main(["runs", "tag", "--dir", str(runs), "scored", "x"]) == 0
    capsys.readouterr()
    assert "no runs in" in listed(runs / "no run", capsys)[0]


def test_listing_loads_no_torch(runs: Path):
    call = f"cli.main(['runs', '--dir', {str(runs)!r}])"
    script = f"import sys; from lockstep import cli; {call}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
