"""The number of rows that a task trains on, before it is built."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.config import schema
from lockstep.tasks.file import count_training_rows

SETTINGS = {"heldout_rows": 0, "verifier": {"kind": "trl", "path": "rewards.py:score"}}


def test_rows_that_only_the_grader_reads_count(tmp_path: Path) -> None:
    """TRL's functions take any columns: an answer is not asked of them."""
    rows = [{"prompt": f"What is {i}?", "target": str(i)} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": str(tmp_path / "rows.jsonl")}
    assert count_training_rows(schema.FileTask.model_validate(SETTINGS | {"data": data})) == 30
