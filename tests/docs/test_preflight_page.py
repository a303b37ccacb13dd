"""docs/preflight.md names every refusal, and which of them can be let through."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from lockstep.config.schema import Allowable
from lockstep.plan.refusals import Name

PAGE = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text()


def test_each_refusal_stands_there_with_whether_it_can_be_let_through() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    said = {name.strip("` "): row[-1] for row in rows for name in row[0].split(",")}
    assert {name for name, allow in said.items() if allow == "yes"} == set(get_args(Allowable))
    assert said.keys() == {name for part in get_args(Name) for name in get_args(part)}
