"""The pages of docs/algorithms: their recipes and what these print.

`python -m tests.docs.pages` writes the formulas, the rules of docs/health.md and the copies of docs/examples anew.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import lockstep
from lockstep.algorithms.build import build_objective
from lockstep.api.evaluate import ComparedScores
from lockstep.api.run import Run
from lockstep.config.load import load_mapping
from lockstep.config.schema import Recipe
from lockstep.config.text import parse
from lockstep.scoring.score import Outcome
from lockstep.track.state import RunState

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


HEALTH = FOLDER.parent / "health.md"
_RULES = re.compile(r"(?<=<!-- rules -->\n).*?(?=<!-- end of rules -->)", re.DOTALL)


def rules_table() -> str:
    """The rules of health with their defaults, as docs/health.md shows them."""
    times = {
        "fixed": "",
        "clip": " × `optimizer.max_grad_norm`",
        "lr": " × `optimizer.lr`",
        "checkpoint": " checkpoints + 0.25 GiB",
    }
    times |= {"start": " × mean of the first 5 steps", "recent": " × median of the last 50 steps"}
    times |= {"numerics": "; × 4 where rollouts have other numerics or noise, × 10 with activations in four bits"}
    lines = ["| rule | broken when | limit | steps | tier | source of the limit |", "|---|---|---|---|---|---|"]
    for rule, setting in Recipe().health.in_force():
        steps = f"{setting.steps} of {setting.within}" if setting.within else f"{setting.steps} in a row"
        steps += f", of the first {setting.until}" if setting.until else ""
        limit = f"{setting.limit:g}{times[rule.when.against]}"
        limit += f", where {' or '.join(f'`{name}`' for name in rule.needs)} is above 0" if rule.needs else ""
        limit += f"; not for {', '.join(rule.not_for)}" if rule.not_for else ""
        what = f"`{rule.metric}` {rule.side}"
        lines.append(f"| `{rule.name}` | {what} | {limit} | {steps} | {setting.tier} | {rule.source} |")
    return "\n".join(lines) + "\n"


def write_rules() -> None:
    """Put the rules into docs/health.md."""
    HEALTH.write_text(_RULES.sub(lambda _: rules_table(), HEALTH.read_text("utf-8")), encoding="utf-8")


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


PYTHON = FOLDER.parent / "python_reference.md"
CLASSES = (Run, RunState, Outcome, ComparedScores)
"""Classes that a user of the functions gets."""


def python_reference() -> str:
    """The names of the Python interface with their docstrings, and the members of the classes that they return."""
    functions = [getattr(lockstep, name) for name in ("recipe", "train", "resume", "evaluate", "compare")]
    parts = ["# Python reference\n\nMade from the docstrings (`make docs`); [python.md](python.md) is the guide.\n"]
    parts += [f"## `lockstep.{one.__name__}`\n\n{_signed(one)}" for one in functions]
    for kind in CLASSES:
        parts.append(f"## `{kind.__name__}`\n\n{inspect.cleandoc(kind.__doc__ or '')}\n")
        parts += [f"`{kind.__name__}.{name}: {of}`{f': {text}' if text else ''}\n" for name, of, text in _fields(kind)]
        own = [(name, member) for name, member in vars(kind).items() if not name.startswith("_")]
        for name, member in own:
            if isinstance(member, property):
                parts.append(f"`{kind.__name__}.{name}`: {inspect.cleandoc(member.__doc__ or 'see above')}\n")
            elif inspect.isfunction(member) and member.__doc__:
                parts.append(f"### `{kind.__name__}.{name}`\n\n{_signed(member)}")
    return "\n".join(parts)


def _fields(kind: type) -> list[tuple[str, str, str]]:
    """Name, type and text of each field of a record."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    found = []
    for one, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            value = after.value if isinstance(after, ast.Expr) else None
            text = inspect.cleandoc(str(value.value)) if isinstance(value, ast.Constant) else ""
            found.append((one.target.id, ast.unparse(one.annotation), text))
    return found


def _signed(function: Callable[..., object]) -> str:
    signature = f"{function.__name__}{inspect.signature(function)}"
    return f"```python\n{signature}\n```\n\n{inspect.cleandoc(function.__doc__ or '')}\n"


def write_python_reference() -> None:
    """Write docs/python_reference.md."""
    PYTHON.write_text(python_reference(), encoding="utf-8")


if __name__ == "__main__":
    write_python_reference()
    write_formulas()
    write_rules()
    write_copies()
