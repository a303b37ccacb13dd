"""Links between pages lead somewhere, and what examples and benchmarks import exists.

Nothing is imported here: torch takes seconds.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def names(module: str) -> set[str]:
    """What a module defines or imports, and the modules of a package."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {one.stem for one in path.glob("*.py")} if path.is_dir() else set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign():
                parts = (part for target in node.targets for part in ast.walk(target))
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
            case ast.AnnAssign():
                found.add(ast.unparse(node.target))
    return found | set(lockstep.__all__) if module == "lockstep" else found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        if "://" in link:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_what_the_examples_import_exists() -> None:
    imports = [
        (page.name, module, name)
        for page in PAGES
        for module, listed in re.findall(
            r"^from (lockstep[\w.]*) import ([\w, ]+)$", page.read_text("utf-8"), re.MULTILINE
        )
        for name in listed.split(", ")
    ]
    assert len(imports) > 15
    assert [one for one in imports if one[2] not in names(one[1])] == []


def test_what_the_benchmarks_import_exists() -> None:
    missing = [
        (path.name, node.module, alias.name)
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "lockstep"
        for alias in node.names
        if alias.name not in names(node.module)
    ]
    assert missing == []
