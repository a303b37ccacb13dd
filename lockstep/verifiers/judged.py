"""Caches the verdicts of the verifier `judge`, so that no reply is judged twice."""

from __future__ import annotations

import datetime
import json
import logging
import threading
from pathlib import Path

log = logging.getLogger(__name__)


class Verdicts:
    """Scores by content hash; with a path also in a file, one line of JSON each. Used by several threads."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._scores = {} if path is None else _read(path)

    def move(self, path: Path) -> None:
        """Keep them in this file from now on, and know what it holds."""
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
    """Return the file's verdicts. Lines that are none, left by a run that was killed, are removed from it."""
    if not path.exists():
        return {}
    scores, kept, dropped = {}, b"", 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
            scores[str(value["key"])] = int(value["score"])
            kept += line.rstrip(b"\n") + b"\n"
        except (ValueError, KeyError, TypeError):
            dropped += 1
    if dropped:
        log.warning("%s: dropped %d lines that are no verdicts; the judge is asked again for them", path, dropped)
        new = path.with_suffix(".new")
        new.write_bytes(kept)
        new.replace(path)
    return scores
