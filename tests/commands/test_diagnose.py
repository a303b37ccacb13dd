from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.track.jsonl import JsonlFile
from lockstep.track.writer import read_metrics
from tests.gallery import Gallery


def test_a_finished_run_is_judged_by_other_rules(gallery: Gallery, capsys: pytest.CaptureFixture[str]) -> None:
    run = gallery.run("plain")
    capsys.readouterr()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(["diagnose", str(run.path)]) == 0
    assert capsys.readouterr().out == "\nno rule stops this run; 3 of 3 steps are recorded\n"
    assert main(["diagnose", str(run.path), "health.clipping={limit: 0.001, steps: 2, within: 2}"]) == 3
    out = capsys.readouterr().out
    first, second = (f"{row.metrics['grad/norm']:.4g}" for row in read_metrics(run)[:2])
    assert "step 2, stop: clipping: grad/norm was above 0.001 (0.001 times optimizer.max_grad_norm = 1)" in out
    assert f"({first}, {second} at steps 1 to 2;" in out
    assert out.count("clipping: ") == 1  # it goes on being broken
    assert out.endswith("of 3 steps the run ends after step 2, 3 are recorded\n")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_what_is_no_rule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "runs/x", "optimizer.lr=1"]) == 2
    assert "only settings of health" in capsys.readouterr().err
    assert main(["diagnose", "nowhere/run"]) == 6


def test_a_file_of_rules_changes_nothing_else(gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, rules = gallery.run("plain"), tmp_path / "rules.yaml"
    rules.write_text("health: {clipping: {limit: 0.001, steps: 2, within: 2}}\n")
    assert main(["diagnose", str(run.path), str(rules)]) == 3
    rules.write_text("steps: 100\n")
    assert main(["diagnose", str(run.path), str(rules)]) == 2
    assert "only settings of health" in capsys.readouterr().err


def test_the_largest_spikes_are_shown_and_a_damaged_line_is_named(
    gallery: Gallery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = gallery.copy("plain", tmp_path / "run")
    rows = [{"id": "row-\x1b[2J", "sample": 0, "why": "its advantage"}]
    norms = [1.0, 7.0, "nan", 3.0, 9.0, "inf", 2.0, 8.0]
    spikes = [
        {"step": n + 1, "update": 0, "cause": "data", "grad_norm": norm, "rows": rows} for n, norm in enumerate(norms)
    ]
    with JsonlFile(run.spikes_path) as file:
        for spike in spikes:
            file.append(spike)
    assert main(["diagnose", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"step \d: gradient norm (\w+), row", out) == ["nan", "inf", "9", "8", "7"]
    assert "steps 1 to 10: 8 (8 by data)\n" in out
    assert "\x1b" not in out
    with JsonlFile(run.spikes_path) as file:
        file.append({"step": 1})
    assert main(["diagnose", str(run.path)]) == 6
    assert "spikes.jsonl: a line is not a spike: KeyError('update')" in capsys.readouterr().err
