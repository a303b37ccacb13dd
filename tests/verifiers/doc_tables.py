"""The tables of docs/verifiers.md as data: what is written there is asserted."""

from __future__ import annotations

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "verifiers.md"


def rows(name: str) -> list[list[str | None]]:
    """The rows of the table after <!-- name -->: text in backticks as it is, other text stripped, None for nothing."""
    table = DOC.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")[1].split("\n\n")[0]
    return [[_cell(cell) for cell in _cells(line)] for line in table.splitlines()[2:]]


def _cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line)[1:-1]


def _cell(cell: str) -> str | None:
    cell = cell.strip().replace(r"\|", "|")
    if cell.startswith("`") and cell.endswith("`"):
        return cell[1:-1].replace(r"\n", "\n")
    return cell or None
