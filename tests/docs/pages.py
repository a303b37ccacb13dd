"""The pages of docs/algorithms: their recipes and what these print.

`python -m tests.docs.pages` writes the formulas and the copies of docs/examples anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.algorithms.build import build_objective
from lockstep.config.load import load_mapping
from lockstep.config.text import parse

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
_RECIPE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_FORMULA = re.compile(r"(## What a run prints\n\n```text\n)(.*?)(```)", re.DOTALL)


def with_formula() -> list[Path]:
    """The pages that show what a run prints."""
    return [path for path in sorted(FOLDER.glob("*.md")) if _FORMULA.search(path.read_text(encoding="utf-8"))]


def shown(path: Path) -> str:
    """The formula on the page."""
    found = _FORMULA.search(path.read_text(encoding="utf-8"))
    assert found is not None
    return found.group(2)


def printed(path: Path) -> str:
    """The formula that the first recipe of the page prints."""
    recipe = _RECIPE.search(path.read_text(encoding="utf-8"))
    assert recipe is not None, f"{path.name} has no recipe"
    tree = parse(recipe.group(1), path.name).value
    assert isinstance(tree, dict)
    return build_objective(load_mapping(tree)).formula + "\n"


def write_formulas() -> None:
    """Put into every page what its recipe prints."""
    for path in with_formula():
        formula = printed(path)
        text = _FORMULA.sub(lambda found, new=formula: found.group(1) + new + found.group(3), path.read_text("utf-8"))
        path.write_text(text, encoding="utf-8")


def quoted_files() -> dict[str, Path]:
    """The code blocks of own_loss.md that are copies of files, by language."""
    examples = FOLDER.parent / "examples"
    return {"python": examples / "sapo.py", "diff": examples / "sapo_built_in.diff"}


def block(language: str) -> str:
    """The first code block of own_loss.md in that language."""
    found = _block(language).search((FOLDER / "own_loss.md").read_text(encoding="utf-8"))
    assert found is not None
    return found.group(2)


def write_copies() -> None:
    """Put the examples into own_loss.md."""
    page = FOLDER / "own_loss.md"
    for language, path in quoted_files().items():
        new = path.read_text(encoding="utf-8")
        text = _block(language).sub(
            lambda found, new=new: found.group(1) + new + found.group(3), page.read_text("utf-8"), 1
        )
        page.write_text(text, encoding="utf-8")


def _block(language: str) -> re.Pattern[str]:
    return re.compile(rf"(```{language}\n)(.*?)(^```\n)", re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    write_formulas()
    write_copies()
