"""Verdicts that were given, so that nothing is asked twice."""

from __future__ import annotations

import datetime
import json
import threading
from pathlib import Path

from lockstep.errors import TaskError


class Verdicts:
    """Scores by content hash; with a path also in a file, one line of JSON each. Used by several threads."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises TaskError if the file holds something else than verdicts."""
        self.path = path
        self._lock = threading.Lock()
        self._scores = {} if path is None else _read(path)

    def move(self, path: Path) -> None:
        """Keep them in this file from now on, and know what it holds. Raises TaskError as at the start."""
        with self._lock:
            before, self.path = self._scores, path
            self._scores = _read(path)
        for key in before.keys() - self._scores.keys():
            self.keep(key, before[key])

    def find(self, key: str) -> int | None:
        with self._lock:
            return self._scores.get(key)

    def keep(self, key: str, score: int) -> None:
        """Raises OSError if the file cannot be written."""
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        with self._lock:
            self._scores[key] = score
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="ascii") as file:
                    file.write(json.dumps({"key": key, "score": score, "day": day}) + "\n")


def _read(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    scores = {}
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            scores[str(value["key"])] = int(value["score"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                path.write_text("".join(lines[:-1]), encoding="ascii")  # a run was killed while it wrote this
                break
            raise TaskError(
                f"line {number} is no verdict: {error}", where=str(path), fix="delete that line or the file"
            ) from error
    return scores
