from __future__ import annotations

import pytest

from lockstep.cli import main
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
