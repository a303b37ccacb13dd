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
    """Lines of calls that may wait for ever: for a message, a thread or a process."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        waits = node.func.attr in ("get", "wait", "join", "communicate", "recv_bytes") and not node.args
        if "broadcast" in ast.unparse(node.func.value):  # its group has a limit
            continue
        if waits and "timeout" not in [word.arg for word in node.keywords]:
            found.append(node.lineno)
    return found


def test_the_driver_waits_for_nothing_without_a_limit() -> None:
    """But for threads that do nothing else; and a worker waits for its driver, with which it ends."""
    assert unbounded("inbox.get()\nthread.join()\ninbox.get(timeout=3)\nprocess.wait(3)") == [1, 2]
    sources = {path.name: path.read_text() for path in (PACKAGE / "cluster").glob("*.py")}
    assert len(unbounded(sources.pop("host.py"))) == 3
    head, threads = sources.pop("child.py").split("    def _send(self)")
    assert unbounded(head) == []
    assert len(unbounded(f"class Child:\n    def _send(self){threads}")) == 2
    assert {name: lines for name, text in sources.items() if (lines := unbounded(text))} == {}
