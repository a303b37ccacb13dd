"""docs/limits.md: each limit names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
LIMITS = [row for row in ROWS if not row.startswith(("| limit ", "| --- "))]


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[2:40])
def test_a_limit_names_tests_that_exist(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    assert len(cells) == 3
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cells[2])
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)
