"""Rules of code that runs on several workers: it depends on its rank in few places, and waits for nothing without a limit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lockstep"
OF_RANKS = {PACKAGE / "learner" / "ranks.py", PACKAGE / "learner" / "sharded.py"}
"""Where the work is shared out."""


def test_nothing_asks_for_its_rank_but_the_workers_and_the_shares() -> None:
    asking = [
        path
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "cluster" not in path.parents and path not in OF_RANKS
        if re.search(r"\b_?rank\s*==|\bget_rank\(", path.read_text())
    ]
    assert asking == []


def unbounded(text: str) -> list[int]:
    """Lines of calls that may wait for ever: of Ray, of a thread or of a process."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_ray = ast.unparse(node.func.value).endswith("ray") and node.func.attr in ("get", "wait")
        joins = node.func.attr in ("join", "communicate") and not node.args
        if (of_ray or joins) and "timeout" not in [word.arg for word in node.keywords]:
            found.append(node.lineno)
    return found


def test_the_driver_waits_for_nothing_without_a_limit() -> None:
    assert unbounded("self._ray.get(x)\nthread.join()\nself._ray.get(x, timeout=3)") == [1, 2]
    found = {path.name: lines for path in (PACKAGE / "cluster").glob("*.py") if (lines := unbounded(path.read_text()))}
    assert found == {}
