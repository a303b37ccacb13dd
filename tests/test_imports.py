"""What modules import: no circle of files, and nothing heavy that they can do without."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("lockstep")
    # raises CycleError, with the modules of the circle
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("lockstep.chat, lockstep.evaluation.runner, lockstep.evaluation.table", {"torch", "transformers"}),
        ("lockstep.checkpoint.store, lockstep.checkpoint.state, lockstep.plan.batch, lockstep.sync.record", {"torch"}),
        ("lockstep.rollout.vllm.engine, lockstep.rollout.vllm.process, lockstep.rollout.vllm.worker", {"vllm"}),
        ("lockstep.track.console", {"rich"}),
    ],
)
def test_what_a_module_can_do_without_is_not_loaded_with_it(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
