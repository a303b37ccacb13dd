from __future__ import annotations

import pytest

from lockstep.cli import main
from lockstep.track.catalogue import all_metrics, metrics_markdown


def test_explain_tells_unit_range_source_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "explain", "length/truncated", "eval/greedy/unscored"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines()[0] == "length/truncated  (share of replies)"
    assert "healthy: ≤ 0.5 (" in first
    assert "if not:  Raise rollout.max_tokens" in first
    assert "described as eval/<mode>/unscored" in second


def test_a_name_that_does_not_exist_is_exit_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "explain", "lenght/mean"]) == 2
    assert "did you mean length/mean" in capsys.readouterr().err


def test_list_has_a_line_a_metric_and_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_metrics()) + 2
    assert main(["metrics", "list", "grad/"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "grad/norm",
        "grad/clipped",
        "grad/skipped",
    ]
    assert main(["metrics", "list", "eval/greedy/accuracy"]) == 0
    assert "described as eval/<mode>/accuracy" in capsys.readouterr().out
    assert main(["metrics", "list", "gard/"]) == 2


def test_the_page_can_be_written_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "list", "--markdown"]) == 0
    assert capsys.readouterr().out == metrics_markdown()
