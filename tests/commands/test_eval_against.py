from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lockstep.errors import EvaluationError
from lockstep.evaluation.records import read_score, score_path, write_score
from lockstep.scoring.against import stored_by
from tests.gallery import Gallery
from tests.saying import Said


def test_an_export_is_compared_with_what_its_run_stored(
    gallery: Gallery, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gallery.run("lora").path.parents[1])
    run = gallery.copy("lora", tmp_path / "runs" / "lora").path
    assert said("export", run, tmp_path / "out")[0] == 0
    words = ["--against", run, "--no-base", "--out", tmp_path / "scores", "--mode", "greedy"]
    code, out, _ = said("eval", tmp_path / "out", *words)
    assert code == 0
    assert re.search(r"id_probe greedy: 0 of \d+ marks differ \(at most 2\), 0 of \d+ replies", out)
    base = gallery.run("lora").path.parents[1] / "model"
    _, out, err = said("eval", base, *words)
    assert re.search(r"[1-9]\d* of \d+ replies", out + err)  # the base is another model, whatever its marks
    other = score_path(run, 3, "greedy")
    stored = read_score(other)
    flipped = [dataclasses.replace(one, correct=not one.correct) for one in stored.results]
    write_score(other, dataclasses.replace(stored, results=tuple(flipped)))
    code, _, err = said("eval", tmp_path / "out", *words)
    assert (code, f"{len(flipped)} of {len(flipped)} marks differ (at most 2)" in err) == (7, True)
    code, _, err = said("eval", base, "--against", tmp_path / "scores", "--recipe", run / "recipe.yaml")
    assert (code, "not a run directory" in err) == (7, True)


def test_the_best_known_score_stands_beside(
    gallery: Gallery, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gallery.run("lora").path.parents[1])
    run = gallery.copy("lora", tmp_path / "runs" / "lora").path
    better = score_path(gallery.copy("lora", tmp_path / "runs" / "better").path, 3, "greedy")
    score = read_score(better)
    known = dataclasses.replace(score, conditions=dataclasses.replace(score.conditions, weights="b" * 16), accuracy=1.0)
    write_score(better, dataclasses.replace(known, source="better at step 3"))
    code, out, _ = said("eval", run, "--mode", "greedy", "--out", tmp_path / "out")
    assert code == 0
    (told,) = [line for line in out.splitlines() if line.startswith("best known of id_probe greedy")]
    assert told.endswith("by better at step 3")


def test_a_file_of_this_folder_alone_is_no_run(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = read_score(score_path(gallery.run("lora").path, 3, "greedy"))
    write_score(tmp_path / "step_000003_greedy.json", stored)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EvaluationError, match="not a run directory"):
        stored_by("step_000003_greedy.json")
