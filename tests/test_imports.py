"""The import graph of the package: no circle of files."""

from __future__ import annotations

import grimp


def circles() -> list[set[str]]:
    """Sets of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    graph = grimp.build_graph("lockstep")
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            place = stack.index(module)
            found.append(set(stack[place:]))
            del stack[place:]

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return [circle for circle in found if len(circle) > 1]


def test_no_module_imports_itself_through_others() -> None:
    assert circles() == []
