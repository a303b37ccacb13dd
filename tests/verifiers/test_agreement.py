"""Where `math` and math-verify differ is what docs/verifiers.md lists, no more and no less."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.verifiers.pairs import pairs

ROOT = Path(__file__).parents[2]


def test_there_are_two_thousand_pairs():
    assert len(pairs()) >= 2000
    assert pairs() == pairs()


@pytest.mark.slow
def test_every_difference_is_listed_and_explained(monkeypatch):
    spec = importlib.util.spec_from_file_location("verifiers_benchmark", ROOT / "benchmarks" / "verifiers.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)  # dataclasses look their module up there
    spec.loader.exec_module(benchmark)
    found, compared = benchmark.differences()
    assert sum(compared.values()) >= 2000
    assert all(difference.why != "not explained" for difference in found)
    assert benchmark.MARKS[0] + benchmark.difference_table(found) + benchmark.MARKS[1] in benchmark.DOC.read_text()
