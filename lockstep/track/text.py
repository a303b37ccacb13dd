"""Lines and tables of text that is safe to show, whatever its origin."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence

from lockstep.text import visible

__all__ = ["cell_width", "one_line", "plain_table", "visible"]


def one_line(text: str, width: int = 0) -> str:
    """`visible` on one line, newlines as ⏎; cut to `width` characters with … if that is above 0."""
    shown = visible(text).replace("\t", " ").replace("\n", "⏎")
    return shown[: width - 1] + "…" if 0 < width < len(shown) else shown


def block(title: str, content: str) -> str:
    """Return a text of unknown origin, indented under its title."""
    return f"   {one_line(title, 30)}:\n" + textwrap.indent(visible(content), "     │ ", lambda line: True)


def reading_line(extracted: str | None, method: str, answer: str) -> str:
    """Say how a reply was read, and the reference. Example: "extracted '7' by boxed, answer '7'"."""
    reference = f"answer {one_line(answer, 80)!r}"
    if method == "environment":
        return f"graded by the environment, {reference}" if answer else "graded by the environment"
    if extracted is None and not method:  # a function of the user's, which does not say what it read
        return f"graded as a whole, {reference}"
    if extracted is None:
        return f"no answer was found in the reply, {reference}"
    how = f" by {one_line(method, 40)}" if method else ""
    return f"extracted {one_line(extracted, 80)!r}{how}, {reference}"


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in aligned text; columns of numbers are right-aligned. Raises ValueError if a row has another length."""
    cells = [[one_line(cell) for cell in row] for row in (columns, *rows)]
    by_column = list(zip(*cells, strict=True))
    widths = [max(cell_width(cell) for cell in column) for column in by_column]
    right = [bool(rows) and all(_numeric(cell) for cell in column[1:]) for column in by_column]
    padded = [[_pad(*cell) for cell in zip(row, widths, right, strict=True)] for row in cells]
    lines = ["  ".join(row).rstrip() for row in padded]
    return "\n".join([*([title] if title else []), lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def cell_width(text: str) -> int:
    """Columns that the text takes in a terminal: wide characters take two, combining marks none."""
    wide = {"W", "F"}
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in wide else 1 for c in text)


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * (width - cell_width(cell))
    return space + cell if right else cell + space


def _numeric(cell: str) -> bool:
    return not cell or cell in "–-" or cell.strip(" +-–−%[]()<>≤≥,.=0123456789ept") == ""
