"""The import graph of the package: no circle of files."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("lockstep")
    # raises CycleError, with the modules of the circle
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()
