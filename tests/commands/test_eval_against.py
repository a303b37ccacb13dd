from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.evaluation.records import read_score, score_path, write_score
from tests.gallery import Gallery


def test_an_export_is_compared_with_what_its_run_stored(
    gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gallery.run("lora").path.parents[1])
    run = gallery.copy("lora", tmp_path / "runs" / "lora").path
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    words = ["--against", str(run), "--no-base", "--out", str(tmp_path / "scores"), "--mode", "greedy"]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "out"), *words]) == 0
    assert re.search(r"id_probe greedy: 0 of \d+ marks differ \(at most 2\), 0 of \d+ replies", capsys.readouterr().out)
    base = str(gallery.run("lora").path.parents[1] / "model")
    main(["eval", base, *words])
    told = "".join(capsys.readouterr())
    assert re.search(r"[1-9]\d* of \d+ replies", told)  # the base is another model, whatever its marks
    other = score_path(run, 3, "greedy")
    stored = read_score(other)
    flipped = [dataclasses.replace(one, correct=not one.correct) for one in stored.results]
    write_score(other, dataclasses.replace(stored, results=tuple(flipped)))
    assert main(["eval", str(tmp_path / "out"), *words]) == 7
    assert f"{len(flipped)} of {len(flipped)} marks differ (at most 2)" in capsys.readouterr().err
    assert main(["eval", base, "--against", str(tmp_path / "scores"), "--recipe", str(run / "recipe.yaml")]) == 7
    assert "no run directory" in capsys.readouterr().err


def test_the_best_known_score_stands_beside(
    gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gallery.run("lora").path.parents[1])
    run = gallery.copy("lora", tmp_path / "runs" / "lora").path
    better = score_path(gallery.copy("lora", tmp_path / "runs" / "better").path, 3, "greedy")
    score = read_score(better)
    known = dataclasses.replace(score, conditions=dataclasses.replace(score.conditions, weights="b" * 16), accuracy=1.0)
    write_score(better, dataclasses.replace(known, source="better at step 3"))
    assert main(["eval", str(run), "--mode", "greedy", "--out", str(tmp_path / "out")]) == 0
    (told,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("best known of id_probe greedy")
    ]
    assert told.endswith("by better at step 3")
