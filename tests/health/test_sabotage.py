"""Ruined runs are stopped or named within ten steps, good ones are not stopped: benchmarks/sabotage.py, and its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.sabotage import PAGE, WITHIN, outcome
from benchmarks.sabotage_cases import BAD, GOOD, UNSEEN, Case

FAST = {"frozen weights", "zero gradient", "reward always 0", "grader that rewards anything", "engine half a nat off"}
FAST |= {"grpo, seed 1", "one poisoned row"}


def cases() -> list[object]:
    def marks(case: Case) -> list[pytest.MarkDecorator]:
        return [] if case.name in FAST else [pytest.mark.slow]

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in (*BAD, *GOOD)]


@pytest.mark.parametrize("case", cases())
def test_a_run_gets_what_it_deserves(case: Case, tmp_path: Path) -> None:
    found = outcome(case, tmp_path / "run")
    assert found.right, (found.found, found.step, found.remedied, found.others, found.error)


def test_the_page_has_every_case_and_keeps_its_promise() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(BAD) >= 25
    assert len(GOOD) >= 25
    assert len(UNSEEN) >= 5
    names = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert set(names) >= {case.name for case in (*BAD, *UNSEEN, *GOOD)}
    found = re.search(r"\*\*(\d+) of (\d+) ruined runs .*; (\d+) of (\d+) good runs are stopped", page)
    assert found is not None
    caught, bad, stopped, good = map(int, found.groups())
    assert (bad, good) == (len(BAD), len(GOOD))
    assert caught >= 0.95 * bad
    assert stopped <= 1
    assert f"within {WITHIN} steps" in page
