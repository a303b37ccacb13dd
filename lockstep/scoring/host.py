"""Process of a worker that scores. Nothing heavy is imported here: settings of the environment must come first."""

from __future__ import annotations

from typing import Any

from lockstep.cluster.host import Host


class EvalHost(Host):
    """Runs one worker that scores."""

    def worker_class(self) -> Any:
        """Return the class of the worker, which is imported now."""
        from lockstep.scoring.workers import Evaluator

        return Evaluator
