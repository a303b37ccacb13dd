"""A kernel that may start before the one ahead of it has ended must wait before it reads, or results are wrong at times."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
FILES = sorted([*(ROOT / "models").glob("*.py"), *(ROOT / "rollout" / "paged").glob("*.py")])


def overlapped(tree: ast.AST) -> set[str]:
    """Names of the kernels that are launched with the options of overlap()."""
    return {
        call.func.value.attr if isinstance(call.func.value, ast.Attribute) else ast.unparse(call.func.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if any(word.arg is None and "overlap" in ast.unparse(word.value) for word in call.keywords)
    }


def waits_first(kernel: ast.FunctionDef) -> bool:
    """Whether the first statement after the docstring is the wait."""
    body = kernel.body[1:] if ast.get_docstring(kernel) else kernel.body
    return ast.unparse(body[0]) == "await_input()"


def test_every_overlapped_kernel_waits_before_anything_else():
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    kernels = {
        (path, one.name): one for path, tree in trees.items() for one in tree.body if isinstance(one, ast.FunctionDef)
    }
    found = 0
    for path, tree in trees.items():
        for name in overlapped(tree):
            own = [kernel for (file, named), kernel in kernels.items() if named == name and file == path]
            candidates = own or [kernel for (_, named), kernel in kernels.items() if named == name]
            assert candidates, name
            assert all(map(waits_first, candidates)), f"{path.name}: {name}"
            found += 1
    assert found >= 18
