"""A context manager that sets an engine's precision and noise, and restores the previous ones at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import LockstepError
from lockstep.types import Forward, ForwardReport, RolloutEngine


@contextmanager
def computing(engine: RolloutEngine, forward: Forward) -> Iterator[ForwardReport]:
    """Run the engine in this precision inside the block; restore the previous one on exit, unless it failed with open requests.

    Raises EngineError if the engine cannot, or if no layer would be changed.
    """
    before = engine.forward
    if before == forward:
        yield ForwardReport()
        return
    report = engine.set_forward(forward)
    try:
        yield report
    except BaseException as error:
        try:
            engine.set_forward(before)
        except LockstepError as second:  # the first error is the one to report
            error.add_note(f"the engine could not go back to its former numerics: {second}")
        raise
    engine.set_forward(before)
