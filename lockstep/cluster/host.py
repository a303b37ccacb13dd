"""The process of a worker: what is set up before torch is imported, and how errors are sent to the driver.

This module imports nothing large: environment variables must be set first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

OK, FAILED = "ok", "failed"


class Host:
    """Runs one worker. Its results are [OK, value] or [FAILED, plain Failure]."""

    def __init__(self, place: Any) -> None:
        rank, _, folder, *_ = place
        self._place, self._rank = place, rank
        self._worker: Any = None
        self._log = (Path(folder) / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8")
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        self._stacks = (Path(folder) / f"stacks_{rank}.txt").open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def pid(self) -> int:
        return os.getpid()

    def worker_class(self) -> Any:
        """Return the class of the worker, which is imported now."""
        from lockstep.cluster.sampler import Sampler
        from lockstep.cluster.worker import Worker

        return Worker if self._rank < self._place[1] else Sampler

    def call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Call a method of the worker, which is made at the first call."""
        try:
            if self._worker is None:
                self._worker = self.worker_class()(self._place)
            return [OK, getattr(self._worker, method)(*arguments)]
        except LockstepError as error:
            known = [type(error).__name__, error.what, error.where, error.fix, time.time()]
            return [FAILED, known]
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            return [FAILED, ["", what, "", "", time.time()]]
